"""The real Claude Code command line finishes turns against the daemon, scripted and real."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

import pytest

from q27app.chat.template import open_template
from q27app.daemon.parts import open_parts
from q27app.daemon.serve import hosting

from .agent_script import Agent
from .real_clients import claude_environment, install, run


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
"""A picture of one point, PNG."""


@pytest.fixture(scope="module")
def claude_code(tmp_path_factory) -> str:
    """The program, installed from npm at a pinned version."""
    return install("@anthropic-ai/claude-code", tmp_path_factory.mktemp("claude-code"))


async def ask(program: str, url: str, home: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of `claude -p` in an empty home with nothing but the address set."""
    (home / "work").mkdir(parents=True, exist_ok=True)
    return await run([program, "-p", *arguments], home / "work", claude_environment(url, home))


@pytest.mark.long
async def test_claude_code_finishes_a_turn(start, claude_code, tmp_path):
    running = await start(["Hello", 0.05, " there."], max_context=400_000)
    code, out, err = await ask(claude_code, running.url, tmp_path / "claude-home", "say hi")
    assert (code, out.strip()) == (0, "Hello there."), err
    assert len(running.engine.requests) >= 1
    assert 'outcome="error"' not in running.daemon.metrics.text().decode()


@pytest.mark.long
@pytest.mark.parametrize("name", ["json", "qwen3.8"])
async def test_claude_code_reads_edits_and_runs(start, tokenizer, claude_code, tmp_path, name):
    work = tmp_path / "claude-home" / "work"
    work.mkdir(parents=True)
    note = work / "note.txt"
    note.write_text('colour = "red"\nsize = 3\n')
    template = open_template({}, tokenizer, name)
    edit = {"file_path": str(note), "old_string": 'colour = "red"', "new_string": 'colour = "<blue> & \\"green\\""'}
    agent = Agent(tokenizer, template.dialect, "Read", [
        ("I read it.", "Read", {"file_path": str(note)}),
        ("", "Edit", edit),
        ("Now I run it.", "Bash", {"command": "cp note.txt copy.txt && wc -l < copy.txt", "description": "copies"}),
    ], "All done.")
    running = await start(agent.answer, template=template, max_context=400_000, slots=4)
    code, out, err = await ask(
        claude_code, running.url, tmp_path / "claude-home", "make it blue", "--allowedTools", "Read", "Edit", "Bash"
    )
    assert (code, out.strip()) == (0, "All done."), err
    wanted = 'colour = "<blue> & \\"green\\""\nsize = 3\n'
    assert (note.read_text(), (work / "copy.txt").read_text()) == (wanted, wanted)
    assert agent.num_turns == 4
    assert [reply for reply in running.replies if reply[0] == "POST" and not 200 <= reply[2] < 300] == []


@pytest.mark.long
async def test_claude_code_goes_on_after_it_has_looked_at_a_picture(start, tokenizer, claude_code, tmp_path):
    """It sends what it saw with every later turn."""
    work = tmp_path / "claude-home" / "work"
    work.mkdir(parents=True)
    (work / "dot.png").write_bytes(base64.b64decode(DOT))
    template = open_template({}, tokenizer, "qwen3.8")
    agent = Agent(tokenizer, template.dialect, "Read", [
        ("I look at it.", "Read", {"file_path": str(work / "dot.png")}),
        ("I cannot see it; I copy it.", "Bash", {"command": "cp dot.png copy.png", "description": "copies"}),
    ], "Copied, unseen.")
    running = await start(agent.answer, template=template, max_context=400_000, slots=4)
    code, out, err = await ask(
        claude_code, running.url, tmp_path / "claude-home", "look at dot.png and copy it", "--allowedTools", "Read", "Bash"
    )
    assert (code, out.strip()) == (0, "Copied, unseen."), err
    assert (work / "copy.png").read_bytes() == (work / "dot.png").read_bytes()
    assert all("an image that this model cannot see" in prompt for prompt in agent.prompts[1:]) and agent.num_turns == 3
    assert [reply for reply in running.replies if reply[0] == "POST" and not 200 <= reply[2] < 300] == []


@pytest.mark.long
async def test_claude_code_finishes_a_turn_with_the_bundled_model(config, claude_code, tmp_path):
    config = replace(config, model=replace(config.model, path="demo", backend="numpy"))
    engine, tokenizer, template = open_parts(config)
    async with hosting(engine, tokenizer, template, config) as (url, _):
        async with asyncio.timeout(60):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
        code, out, err = await ask(claude_code, url, tmp_path / "claude-home", "say hi")
    assert code == 0, err
    assert out.strip()  # so long a prompt is beyond what the bundled model was trained on: it answers, not always to the point
