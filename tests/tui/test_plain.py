"""status and chat without a screen: what scripts, dumb terminals and screen readers get."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

from q27app.config import child_environment
from q27app.tui.plain import changed_lines, status_lines
from q27app.tui.snapshot import Snapshot

REPOSITORY = Path(__file__).resolve().parents[2]


async def q27app(*arguments: str, given: str | None = None) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the program; given: its standard input."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "q27app", *arguments, cwd=REPOSITORY, env=child_environment(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(program.communicate((given or "").encode()), 60)
    return program.returncode or 0, out.decode(), err.decode()


def test_status_names_everything_in_words(scenes):
    lines = status_lines(Snapshot(scenes.SCENES["queue"]), "http://x")
    text = "\n".join(lines)
    for wanted in ("state:           ready", "memory KV:       8.6 GB", "28.4 of 34.2 GB, load 97 %, 448 W of 575 W, 71 C",
                   "slot 0:          decode, claude-cli@127.0.0.1, 32,004 tokens", "waiting:         5", "queue:           queued", "hits:            settled 92, system 21, disk 4",
                   "misses:          new 14, diverged 5, not kept 1", "62% accepted, 1.9 a step"):
        assert wanted in text
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("scene", ["idle", "loading", "sensorless", "failed"])
def test_status_has_a_line_for_every_state(scenes, scene):
    lines = status_lines(Snapshot(scenes.SCENES[scene]), "http://x")
    wanted = {"idle": "ready", "loading": "loading, 43%", "sensorless": "- W of - W, - C", "failed": "illegal memory access"}[scene]
    assert wanted in "\n".join(lines)


def test_a_watching_screen_reader_hears_only_news():
    before = ["state: ready", "up: 1 s", "decode: 0"]
    assert changed_lines(before, ["state: ready", "up: 2 s", "decode: 5"]) == ["decode: 5"]
    assert changed_lines([], before) == ["state: ready", "decode: 0"]


async def test_status_as_a_program(daemon_of):
    async with daemon_of("busy") as daemon:
        plain, as_json = await asyncio.gather(q27app("status", "--connect", daemon.url), q27app("--connect", daemon.url, "status", "--json"))
        assert plain[0] == 0 and "RTX 5090" in plain[1] and "\x1b" not in plain[1]
        assert json.loads(as_json[1]) == daemon.status


async def test_without_a_daemon_the_exit_code_says_so():
    code, out, err = await q27app("status", "--connect", "127.0.0.1:1")
    assert (code, out) == (7, "") and "q27app serve" in err


async def test_chat_once_as_text_and_as_json(daemon_of):
    async with daemon_of("idle") as daemon:
        daemon.script = lambda body: [{"reasoning_content": "hm"}, "Hello ", "there"]
        text, as_json, piped = await asyncio.gather(
            q27app("chat", "hi", "--connect", daemon.url, "--system", "Be brief.", "--temperature", "0.5", "--think", "off"),
            q27app("chat", "hi", "--json", "--connect", daemon.url), q27app("chat", "--connect", daemon.url, given="from a pipe"))
        assert text[:2] == (0, "Hello there\n")
        answer = json.loads(as_json[1])
        assert (answer["text"], answer["reasoning"], answer["num_generated"], answer["finish"]) == ("Hello there", "hm", 2, "stop")
        assert piped[:2] == (0, "Hello there\n")
        bodies = {json.dumps(body["messages"]): body for body in daemon.asked}
        assert any("from a pipe" in messages for messages in bodies)
        body = next(body for body in bodies.values() if body["messages"][0]["role"] == "system")
        assert (body["temperature"], body["enable_thinking"]) == (0.5, False)


async def test_chat_tells_why_there_is_no_answer(daemon_of):
    async with daemon_of("idle") as daemon:
        daemon.script = lambda body: web.json_response({"error": {"message": "the queue of 64 is full."}}, status=503)
        code, out, err = await q27app("chat", "hi", "--connect", daemon.url)
        assert code == 1 and "the queue of 64 is full" in err


async def test_a_configured_key_goes_to_the_configured_address_only(tmp_path, monkeypatch):
    import click

    from q27app import cli_tui

    (tmp_path / "config.toml").write_text('[server]\nport = 1234\napi_keys = ["secret"]\n')
    (tmp_path / "key").write_text("# mine\n\n  from-file \n")
    monkeypatch.setenv("Q27APP_CONFIG", str(tmp_path / "config.toml"))
    with click.Context(click.Command("status")):
        assert cli_tui._where(None, None) == ("http://127.0.0.1:1234", "secret")
        assert cli_tui._where("other:99/", None) == ("http://other:99", "")
        assert cli_tui._where("https://other", f"@{tmp_path / 'key'}") == ("https://other", "from-file")
