"""`q27app launch` against a daemon: what a client sees, what is printed, what stays on disk."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from .real_clients import install

FAKE = """#!{python}
import json, os, sys
json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, open({path!r}, "w"))
print("the client ran")
sys.exit(5)
"""
REPOSITORY = Path(__file__).resolve().parents[2]


async def launch(running, tmp_path: Path, *arguments: str, path: str = "", connect: bool = True) -> tuple[int, str, str]:
    """(exit code, output, errors) of q27app launch in an empty home."""
    where = ["--connect", running.url] if connect else []
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{path or os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY),
        "HOME": str(tmp_path / "home"), "Q27APP_HOME": str(tmp_path / "q27"), "LANG": "C.UTF-8",
    }
    (tmp_path / "home").mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "q27app", "launch", *where, *arguments, env=environment, cwd=tmp_path / "home",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def fake(tmp_path: Path, name: str) -> Path:
    """A program `name` on PATH that writes down how it was called."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program, seen = tmp_path / "bin" / name, tmp_path / f"{name}.json"
    program.write_text(FAKE.format(python=sys.executable, path=str(seen)))
    program.chmod(0o755)
    return seen


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_a_client_runs_with_what_it_needs_and_its_exit_code_is_ours(start, tmp_path):
    running = await start()
    seen = fake(tmp_path, "codex")
    code, out, _ = await launch(running, tmp_path, "--key", "k1", "codex", "--", "exec", "--full-auto", "say hi")
    assert (code, out) == (5, "the client ran\n")
    call = json.loads(seen.read_text())
    assert call["arguments"][-3:] == ["exec", "--full-auto", "say hi"]
    assert f'model_providers.q27app.base_url="{running.url}/v1"' in call["arguments"]
    assert call["environment"]["Q27_CLIENT_KEY"] == "k1"
    written = files_below(tmp_path / "q27")
    assert [name for name in written if name.endswith("clients/codex/models.json")] == written
    assert files_below(tmp_path / "home") == []
    code, out, _ = await launch(running, tmp_path, "codex", "--restore")
    assert code == 0 and "Removed" in out and files_below(tmp_path / "q27") == []


async def test_print_shows_everything_but_the_key_and_runs_nothing(start, tmp_path):
    running = await start()
    seen = fake(tmp_path, "claude")
    code, out, _ = await launch(running, tmp_path, "--key", "k1-secret", "claude", "--print", "--", "-p", "say hi")
    assert code == 0 and not seen.exists() and "k1-secret" not in out
    assert f"export ANTHROPIC_BASE_URL={running.url}" in out and "claude -p 'say hi'" in out
    assert "export ANTHROPIC_MODEL=tiny-1" in out
    assert files_below(tmp_path / "q27") == files_below(tmp_path / "home") == []


async def test_what_cannot_be_started_is_told(start, tmp_path):
    running = await start()
    code, _, err = await launch(running, tmp_path, "codex", path=str(tmp_path))
    assert code == 1 and "npm install -g @openai/codex" in err
    code, _, err = await launch(running, tmp_path, "vim")
    assert code == 2 and "claude, codex, opencode" in err
    code, _, err = await launch(running, tmp_path, "--connect", "127.0.0.1:1", "claude", connect=False)
    assert code == 7


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("@anthropic-ai/claude-code", ["claude", "--", "-p", "say hi"]),
        ("@openai/codex", ["codex", "--", "exec", "--skip-git-repo-check", "say hi"]),
    ],
)
async def test_the_real_client_finishes_a_turn(start, tmp_path, package, arguments):
    program = Path(install(package, tmp_path / "client"))
    running = await start(["Hello", 0.05, " there."], max_context=400_000, slots=2)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    code, out, err = await launch(running, tmp_path, *arguments, path=path)
    assert (code, out.strip()) == (0, "Hello there."), err
    assert "Model metadata" not in err
    assert [reply for reply in running.replies if reply[0] == "POST" and reply[2] >= 300] == []
