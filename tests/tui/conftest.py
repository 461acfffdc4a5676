"""The screens without a terminal, on a scripted daemon."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from q27app.tui.app import Q27App


def _load(name: str) -> Any:
    """Test folders are no packages."""
    full = f"q27app_tests_tui_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


scripted_daemon, scenes = _load("scripted_daemon"), _load("scenes")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screens:
    """An app that runs. text: what is on the screen."""

    def __init__(self, app: Q27App, pilot: Any, daemon: Any) -> None:
        self.app, self.pilot, self.daemon = app, pilot, daemon

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        text = "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
        return text.replace(str(self.daemon.port), "18027") + "\n"

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Wait for something; fails with the screen's text."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s; the screen:\n{self.text}")
            await asyncio.sleep(0.01)

    async def shows(self, wanted: str) -> None:
        """Wait until a text is on the screen."""
        await self.until(lambda: wanted in self.text)

    async def say(self, text: str) -> None:
        """Put a text into the prompt and press enter."""
        self.app.screen.prompt.put(text)
        await self.pilot.press("enter")


@pytest.fixture
def utc(monkeypatch):
    """Clock times do not depend on the machine."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def open_screens(tmp_path, utc):
    """open_screens(daemon, size=..., **options of Q27App): an async context manager that gives Screens, once data is there."""

    @asynccontextmanager
    async def make(daemon: Any, size: tuple[int, int] = (80, 24), **options: Any) -> AsyncIterator[Screens]:
        options = {"history_path": tmp_path / "history.db", "interval_s": 3600.0, "clock": Clock(), **options}
        app = Q27App(daemon.url, **options)
        async with app.run_test(size=size) as pilot:
            screens = Screens(app, pilot, daemon)
            await screens.until(lambda: app.client and app.poller and (app.snapshot or app.failure))
            await screens.until(lambda: len(app.recent) + len(app.log_events) == len(daemon.events))
            await pilot.pause()
            yield screens

    return make


@pytest.fixture(name="scenes")
def scenes_of_the_monitor() -> Any:
    """The scenes' own module."""
    return scenes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def daemon_of() -> Callable[[str], Any]:
    """daemon_of("busy") -> a scripted daemon in that state, with a log and recent requests."""
    return lambda scene: scripted_daemon.ScriptedDaemon(scenes.SCENES[scene], [*scenes.LOG, *scenes.RECENT])


GOLDEN = Path(__file__).with_name("golden")
IS_WRITING = os.environ.get("GOLDEN") == "write"


@pytest.fixture
def same_text() -> Callable[[str, str], None]:
    """same_text(name, text): golden/NAME.txt holds this text. With GOLDEN=write it does afterwards."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if IS_WRITING:
            path.write_text(text, encoding="utf-8")
        golden = path.read_text(encoding="utf-8")
        if "live\n" in golden:  # on a busy machine a poll may come late, which is another test's matter
            text = re.sub(r"data [0-9.]+ s old$", lambda found: "live".rjust(len(found.group())), text, flags=re.MULTILINE)
        difference = "\n".join(difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "screen", lineterm=""))
        assert not difference, f"{path.name}:\n{difference}"

    return compare


@pytest.fixture
def same_at_all_sizes(same_text) -> Callable[..., Any]:
    """await same_at_all_sizes(screens, name): the screen has its golden text at each of the sizes."""

    async def compare(screens: Screens, name: str) -> None:
        for width, height in scenes.SIZES:
            await screens.pilot.resize_terminal(width, height)
            await screens.until(lambda size=(width, height): screens.app.screen.size == size)
            for _ in range(3):
                await screens.pilot.pause(0.02)
            golden = GOLDEN / f"{name}_{width}x{height}.txt"
            deadline = time.monotonic() + (0.0 if IS_WRITING else 60.0)  # a busy machine takes longer to draw
            while time.monotonic() < deadline and screens.text != golden.read_text(encoding="utf-8"):
                await screens.pilot.pause(0.05)
            assert max(map(len, screens.text.splitlines())) <= width
            same_text(f"{name}_{width}x{height}", screens.text)

    return compare
