"""The monitor in every state and size, as text; and what its keys do.

`golden/SCENE_WIDTHxHEIGHT.txt` holds the text. After a wanted change run with GOLDEN=write and look at each difference.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from q27app.errors import OutOfMemory
from q27app.tui.app import Q27App

@pytest.mark.parametrize("scene", ["idle", "loading", "busy", "queue", "sensorless", "disconnected", "failed"])
async def test_every_state_is_readable_at_every_size(scene, daemon_of, open_screens, clock, same_at_all_sizes):
    async with daemon_of(scene) as daemon, open_screens(daemon, clock=clock) as screens:
        if scene == "disconnected":
            await daemon.close()
            clock.now += 12
            await screens.app.poller.ask()
        await same_at_all_sizes(screens, scene)


async def test_ascii_draws_nothing_above_seven_bits(daemon_of, open_screens, same_text):
    async with daemon_of("busy") as daemon, open_screens(daemon, (120, 40), is_ascii=True) as screens:
        same_text("ascii_120x40", screens.text)
        assert screens.text.isascii()


async def test_without_any_answer_the_reason_is_shown(daemon_of, open_screens):
    async with daemon_of("idle") as daemon:
        daemon.status = None
        async with open_screens(daemon) as screens:
            await screens.shows("no status.")
            assert "no answer" in screens.text


async def test_a_tiny_terminal_gets_one_line(daemon_of, open_screens):
    async with daemon_of("busy") as daemon, open_screens(daemon, (39, 11)) as screens:
        lines = screens.text.splitlines()
        assert "ready" in lines[0] and not any(lines[1:])


async def test_a_lost_connection_keeps_the_data_and_comes_back(daemon_of, open_screens, clock):
    async with daemon_of("busy") as daemon, open_screens(daemon, clock=clock) as screens:
        working, daemon.status = daemon.status, None
        clock.now += 7
        await screens.app.poller.ask()
        await screens.shows("disconnected")
        assert "data 7.0 s old" in screens.text and "claude-cli" in screens.text
        daemon.status = working
        await screens.app.poller.ask()
        await screens.shows("live")


async def test_cancel_asks_first_and_then_orders_it(daemon_of, open_screens):
    async with daemon_of("queue") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("down", "x")
        await screens.shows("Cancel the request r2")
        await screens.pilot.press("n")
        assert daemon.orders == []
        await screens.pilot.press("x", "y")
        await screens.until(lambda: daemon.orders)
        assert daemon.orders == ["cancel/r2"]


async def test_unload_asks_first(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("u", "y")
        await screens.until(lambda: daemon.orders == ["unload"])
        await screens.pilot.press("l")
        await screens.until(lambda: daemon.orders == ["unload", "load"])


async def test_a_filter_hides_other_requests(daemon_of, open_screens):
    async with daemon_of("queue") as daemon, open_screens(daemon, (120, 40)) as screens:
        await screens.pilot.press("slash", *"codex", "enter")
        await screens.until(lambda: "claude-cli" not in screens.text)
        assert "codex@127.0.0.1" in screens.text
        await screens.pilot.press("escape")
        await screens.shows("claude-cli")


async def test_frozen_keeps_what_was_shown(daemon_of, open_screens, scenes):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("space")
        daemon.status = scenes.SCENES["busy"]
        await screens.app.poller.ask()
        await screens.shows("frozen")
        assert "nothing runs" in screens.text
        await screens.pilot.press("space")
        await screens.shows("claude-cli")


async def test_number_keys_hide_and_show_panels(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("1")
        await screens.until(lambda: "1 card" not in screens.text)
        await screens.pilot.press("1")
        await screens.shows("1 card")


async def test_enter_shows_a_requests_figures(daemon_of, open_screens):
    async with daemon_of("busy") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("enter")
        await screens.shows("num_prefilled")
        await screens.pilot.press("escape")
        await screens.pilot.press("tab", "enter")
        await screens.shows("9f3a3")


async def test_export_writes_what_is_shown(daemon_of, open_screens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with daemon_of("busy") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("e")
        (path,) = tmp_path.glob("q27app-status-*.json")
        written = json.loads(path.read_text())
        assert written["status"] == daemon.status and len(written["recent"]) == 4


async def test_screens_take_turns(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        for key, wanted in (("m", "on this machine"), ("escape", "1 card"), ("g", "newest first"), ("escape", "1 card"),
                            ("d", "finding"), ("escape", "1 card"),
                            ("s", "memory of the card"), ("escape", "1 card"), ("c", "Ask something"), ("escape", "1 card"),
                            ("question_mark", "export")):
            await screens.pilot.press(key)
            await screens.shows(wanted)


async def test_hostile_values_do_not_reach_the_terminal(daemon_of, open_screens, scenes):
    async with daemon_of("idle") as daemon:
        evil = "\x1b]0;title\x07\x1b[2J[red]x"
        daemon.status = scenes.status(
            model=evil, gpus=[{"name": evil, "memory_used": "many", "power_w": 1e400}, 7], host=3, uptime_s=None,
            requests=[{"id": 5, "client": evil, "phase": None, "num_prompt": -4, "age_s": float("nan")}, None],
            engine={"running": "none", "counters": [], "rates": None, "model": {"name": evil}, "plan": {"weights": 10**40},
                    "drafts": {"sources": {"a": 1, "b": {"drafted": [True, "x"], "accepted": 9}, evil: {"drafted": [2], "accepted": [-1]}}},
                    "cache": {"hits": {evil: 3, "disk": "many"}, "misses": ["new"]}})
        async with open_screens(daemon, (120, 40)) as screens:
            assert "\x1b" not in screens.text and "\x07" not in screens.text
            assert "[red]x" in screens.text


async def test_without_a_daemon_the_starter_makes_one(daemon_of, open_screens):
    stopped = []

    async with daemon_of("idle") as daemon:
        @asynccontextmanager
        async def starter():
            try:
                yield daemon.url
            finally:
                stopped.append(True)

        class Nowhere:
            url, port, events = "http://127.0.0.1:1", daemon.port, daemon.events

        async with open_screens(Nowhere, starter=starter) as screens:
            assert screens.app.is_hosting and "ready" in screens.text
            await screens.pilot.press("q")
            await screens.shows("stops with it")
        await screens.until(lambda: stopped)


async def test_a_starter_that_fails_says_why(open_screens):
    @asynccontextmanager
    async def starter():
        raise OutOfMemory("17.2 GB are needed, 9.1 GB are free.")
        yield

    app = Q27App("http://127.0.0.1:1", starter=starter)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        while not app.failure:
            await pilot.pause(0.01)
        assert "17.2 GB" in app.failure
