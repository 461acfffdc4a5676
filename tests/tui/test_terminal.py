"""The screens in a real terminal: tmux draws, a key is a key, a kill is a kill."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from q27app.client import Client
from q27app.paths import state_dir
from q27app.tui.history import History

REPOSITORY = Path(__file__).resolve().parents[2]
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of its own with one window that runs a shell."""

    def __init__(self, folder: str) -> None:
        self._environment = {**os.environ, "TMUX_TMPDIR": folder, "LC_ALL": "C.UTF-8", "PS1": "$ ", "TERM": "xterm-256color",
                             "PYTHONPATH": str(REPOSITORY)}
        self._environment.pop("TMUX", None)

    async def tmux(self, *arguments: str) -> str:
        program = await asyncio.create_subprocess_exec(
            "tmux", "-u", "-f", os.devnull, "-L", "q27", *arguments, env=self._environment, stdout=asyncio.subprocess.PIPE)
        return (await program.communicate())[0].decode()

    async def screen(self) -> str:
        return await self.tmux("capture-pane", "-p")

    async def shows(self, wanted: str, timeout_s: float = 120.0) -> str:
        deadline = time.monotonic() + timeout_s
        while wanted not in (text := await self.screen()):
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{text}"
            await asyncio.sleep(0.05)
        return text

    async def type(self, text: str, *keys: str) -> None:
        await self.tmux("send-keys", "-l", text)
        if keys:
            await self.tmux("send-keys", *keys)

    async def value(self, name: str) -> str:
        return (await self.tmux("display-message", "-p", f"#{{{name}}}")).strip()


async def until(condition, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


def kept() -> int:
    """Words of the newest answer in the history, read as a program beside it would."""
    with closing(sqlite3.connect(f"file:{state_dir() / 'history.db'}?mode=ro", uri=True)) as history:
        found = history.execute("SELECT text FROM messages WHERE role = 'assistant' ORDER BY id DESC LIMIT 1").fetchone()
    return len(found[0].split()) if found else 0


def children(process: str) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.fixture
async def terminal():
    folder = tempfile.mkdtemp(prefix="q27")  # a socket's path must be short
    opened = Terminal(folder)
    await opened.tmux("new-session", "-d", "-x", "80", "-y", "24", "sh")
    yield opened
    await opened.tmux("kill-server")
    shutil.rmtree(folder)


@needs_tmux
async def test_a_visit_in_tmux(terminal, daemon_of):
    async with daemon_of("queue") as daemon:
        await terminal.type(f"{sys.executable} -m q27app --connect {daemon.url}; echo code $?", "Enter")
        text = await terminal.shows("1-3 of 7")
        assert len(text.rstrip("\n").splitlines()) == 24 and "╭─ 1 card ─" in text
        await terminal.type("c")
        await terminal.shows("Ask something")
        await terminal.type("hello", "C-j")
        await terminal.type("again", "Enter")
        await terminal.shows("Hello there")
        assert daemon.asked[0]["messages"][0]["content"] == "hello\nagain"
        await terminal.tmux("set-buffer", "one\ntwo\n")
        await terminal.tmux("paste-buffer", "-p")
        await terminal.shows("two")
        assert len(daemon.asked) == 1
        await terminal.tmux("send-keys", "Escape")
        await terminal.shows("1 card")
        await terminal.type("d")
        await terminal.shows("PYTHON")
        await terminal.tmux("send-keys", "Escape")
        await terminal.shows("1 card")
        await terminal.type("s")
        await terminal.shows("leave, and fix that first")
        await terminal.tmux("send-keys", "Escape")
        await terminal.shows("1 card")
        await terminal.type("q")
        await terminal.shows("code 0")
        assert await terminal.value("alternate_on") == "0"


@needs_tmux
async def test_no_color_is_obeyed(terminal, daemon_of):
    async with daemon_of("failed") as daemon:
        await terminal.type(f"NO_COLOR=1 {sys.executable} -m q27app --ascii --connect {daemon.url}", "Enter")
        await terminal.shows("illegal memory")
        drawn = await terminal.tmux("capture-pane", "-p", "-e")
        assert "38;" in drawn and not [found for found in re.findall(r"\x1b\[([0-9;]*)m", drawn) if has_color(found)]
        assert drawn.isascii()


def has_color(codes: str) -> bool:
    """Whether a sequence sets a colour that is no gray, of 24 bits or of the palette."""
    grays = r"[34]8;2;(\d+);\1;\1(?!\d)|[34]8;5;(23[2-9]|24\d|25[0-5]|16|59|102|145|188|231)(?!\d)"
    return any(re.fullmatch(r"3[0-8]|4[0-8]|9\d|10\d", code) for code in re.sub(grays, "", codes).split(";"))


@needs_tmux
async def test_kill_9_in_an_answer_keeps_history_terminal_and_daemon(terminal, daemon_of):
    async with daemon_of("idle") as daemon:
        daemon.script = lambda body: [step for count in range(10_000) for step in (f"w{count} ", 0.02)]
        await terminal.type(f"{sys.executable} -m q27app --connect {daemon.url}; echo code $?", "Enter")
        await terminal.shows("ready ·")   # the daemon's word: there is a connection to ask through
        await terminal.type("c")
        await terminal.shows("Ask something")
        await terminal.type("go", "Enter")
        text = await terminal.shows("w60 ")
        assert await terminal.value("alternate_on") == "1"
        (guard,) = children(await terminal.value("pane_pid"))
        (screens,) = children(guard)
        seen = max(int(word[1:]) for word in text.split() if word[0] == "w" and word[1:].isdigit())
        await until(lambda: kept() >= seen)   # while the answer goes on, not at its end
        os.kill(int(screens), signal.SIGKILL)
        await terminal.shows("code 137")
        assert await terminal.value("alternate_on") == "0" and await terminal.value("mouse_any_flag") == "0"
        await terminal.type("stty -a | tr ' ;' '\\n\\n' | grep -x -e echo -e icanon -e isig | sort | tr '\\n' ' '", "Enter")
        await terminal.shows("echo icanon isig")
        with History(state_dir() / "history.db") as history:
            answer = history.branch(history.conversations()[0].id)[-1]
        words = [int(word[1:]) for word in answer.text.split()]
        assert words == list(range(len(words))) and len(words) >= seen
        daemon.script = lambda body: ["still here"]
        async with Client(daemon.url) as client:
            assert [piece.text async for piece in client.chat([])][0] == "still here"
        await until(lambda: daemon.num_broken_off == 1)


@pytest.mark.long
@needs_tmux
async def test_the_screens_leave_when_their_guard_is_killed(terminal, daemon_of):
    async with daemon_of("idle") as daemon:
        await terminal.type(f"{sys.executable} -m q27app --connect {daemon.url}; echo code $?", "Enter")
        await terminal.shows("live")
        (guard,) = children(await terminal.value("pane_pid"))
        (screens,) = children(guard)
        os.kill(int(guard), signal.SIGKILL)
        deadline = time.monotonic() + 120
        while Path(f"/proc/{screens}").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not Path(f"/proc/{screens}").exists()
