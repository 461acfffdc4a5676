"""The real Claude Code command line finishes a turn against the daemon, scripted and real."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from q27app.daemon.serve import hosting, open_parts

VERSION = "2.1.197"
INSTALL_LIMIT_S = 240
RUN_LIMIT_S = 280


@pytest.fixture(scope="module")
def claude_code(tmp_path_factory) -> str:
    """The program, installed from npm at a pinned version."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Claude Code: npm is not installed")
    folder = tmp_path_factory.mktemp("claude-code")
    command = [
        npm,
        "install",
        "--no-fund",
        "--no-audit",
        "--prefix",
        str(folder),
        f"@anthropic-ai/claude-code@{VERSION}",
    ]
    environment = {**os.environ, "npm_config_cache": str(folder / "cache")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"Claude Code: npm did not install version {VERSION} within {INSTALL_LIMIT_S} s")
    program = folder / "node_modules" / ".bin" / "claude"
    if done.returncode != 0 or not program.exists():
        pytest.skip(f"Claude Code: version {VERSION} cannot be installed: {done.stderr[-300:]}")
    return str(program)


async def say_hi(program: str, url: str, home: Path) -> tuple[int, str, str]:
    """(exit code, output, errors) of one turn in an empty home with nothing but the address set."""
    (home / "work").mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }
    process = await asyncio.create_subprocess_exec(
        program,
        "-p",
        "say hi",
        cwd=home / "work",
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    return process.returncode, out.decode(), err.decode()


@pytest.mark.long
async def test_claude_code_finishes_a_turn(start, claude_code, tmp_path):
    running = await start(["Hello", 0.05, " there."], max_context=400_000)
    code, out, err = await say_hi(claude_code, running.url, tmp_path / "claude-home")
    assert (code, out.strip()) == (0, "Hello there."), err
    assert len(running.engine.requests) >= 1
    assert 'outcome="error"' not in running.daemon.metrics.text().decode()


@pytest.mark.long
async def test_claude_code_finishes_a_turn_with_the_bundled_model(config, claude_code, tmp_path):
    config = replace(config, model=replace(config.model, path="demo", backend="numpy"))
    engine, tokenizer, template = open_parts(config)
    async with hosting(engine, tokenizer, template, config) as (url, _):
        async with asyncio.timeout(60):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
        code, out, err = await say_hi(claude_code, url, tmp_path / "claude-home")
    assert code == 0, err
    assert "demo model" in out
