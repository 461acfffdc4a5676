"""The real Claude Code command line finishes a turn against the daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

import pytest

VERSION = "2.1.197"
INSTALL_LIMIT_S = 240
RUN_LIMIT_S = 120


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


@pytest.mark.long
async def test_claude_code_finishes_a_turn(start, claude_code, tmp_path):
    running = await start(["Hello", 0.05, " there."], max_context=400_000)
    home = tmp_path / "claude-home"
    (home / "work").mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": running.url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }
    process = await asyncio.create_subprocess_exec(
        claude_code,
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
    assert process.returncode == 0, (out, err)
    assert "Hello there." in out.decode()
    assert len(running.engine.requests) >= 1
    text = running.daemon.metrics.text().decode()
    assert 'outcome="error"' not in text
