"""The real Codex command line finishes turns against the daemon with a scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from q27app.chat.template import open_template

from .agent_script import Agent
from .real_clients import install, run, write_codex_home

PATCH = """*** Begin Patch
*** Update File: note.txt
@@
-colour = "red"
+colour = "<blue> & \\"green\\""
*** Add File: more.txt
+a \\ backslash, "quotes" and <parameter=x>
*** End Patch"""


@pytest.fixture(scope="module")
def codex(tmp_path_factory) -> str:
    """The program, installed from npm at a pinned version."""
    return install("@openai/codex", tmp_path_factory.mktemp("codex"))


async def execute(program: str, running, home: Path, prompt: str, catalogue: bool) -> tuple[int, str, str]:
    """(exit code, output, errors) of `codex exec` in an empty home that knows the daemon alone.

    Its own sandbox needs rights that a test may lack; the script runs harmless commands in a scratch folder.
    """
    (home / "work").mkdir(parents=True, exist_ok=True)
    listed = (await running.get("/v1/models"))[1] if catalogue else None
    command = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]
    return await run(command, home / "work", write_codex_home(running.url, home, listed))


@pytest.mark.long
@pytest.mark.parametrize("catalogue", [False, True])
async def test_codex_finishes_a_turn(start, codex, tmp_path, catalogue):
    running = await start(["Hello", 0.05, " there."], max_context=400_000, slots=2)
    code, out, err = await execute(codex, running, tmp_path / "codex-home", "say hi", catalogue)
    assert (code, out.strip()) == (0, "Hello there."), err
    assert ("Model metadata" in err) is not catalogue
    assert len(running.engine.requests) >= 1
    assert [reply for reply in running.replies if not 200 <= reply[2] < 300] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["json", "qwen3.8"])
async def test_codex_reads_edits_and_runs(start, tokenizer, codex, tmp_path, name):
    work = tmp_path / "codex-home" / "work"
    work.mkdir(parents=True)
    note = work / "note.txt"
    note.write_text('colour = "red"\nsize = 3\n')
    template = open_template({}, tokenizer, name)
    agent = Agent(tokenizer, template.dialect, "exec_command", [
        ("I read it.", "exec_command", {"cmd": "cat note.txt"}),
        ("", "apply_patch", {"input": PATCH}),
        ("Now I run it.", "exec_command", {"cmd": "cp note.txt copy.txt && wc -l < copy.txt"}),
    ], "All done.")
    running = await start(agent.answer, template=template, max_context=400_000, slots=4)
    code, out, err = await execute(codex, running, tmp_path / "codex-home", "make it blue", True)
    assert (code, out.strip()) == (0, "All done."), err
    wanted = 'colour = "<blue> & \\"green\\""\nsize = 3\n'
    assert (note.read_text(), (work / "copy.txt").read_text()) == (wanted, wanted)
    assert (work / "more.txt").read_text() == 'a \\ backslash, "quotes" and <parameter=x>\n'
    assert agent.num_turns == 4
    assert [reply for reply in running.replies if not 200 <= reply[2] < 300] == []
