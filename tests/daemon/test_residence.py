"""A model that sleeps when nobody asks, wakes for whoever does, and is exchanged while streams go on; configuration read again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import fields, replace

import pytest

from q27app.config import SECTIONS
from q27app.daemon.reload import KEY_KINDS, kind_of, reload_config
from q27app.daemon.serve import Notifier, run
from q27app.errors import OutOfMemory, UsageError
from tests.daemon.test_streaming import until

BODY = {"prompt": "hi", "max_tokens": 50}
POLLS = ("/health", "/ready", "/status", "/metrics", "/v1/models")


class Slow:
    """Loads and unloads of a scripted engine that take a moment, counted. may_end: an unload waits for it."""

    def __init__(self, engine, load_s: float = 0.2) -> None:
        self.engine, self.load_s, self.orders, self.failure = engine, load_s, [], None
        self.may_end = asyncio.Event()
        self.may_end.set()
        engine.load, engine.unload = self.load, self.unload

    def load(self) -> Future:
        self.orders.append("load")
        self.engine.state.state = "loading"
        return self._after("ready", self.load_s)

    def unload(self) -> Future:
        self.orders.append("unload")
        self.engine.state.state = "draining"
        return self._after("unloaded", 0.02)

    def _after(self, state: str, seconds: float) -> Future:
        future: Future = Future()

        async def arrive() -> None:
            await asyncio.sleep(seconds)
            while state == "unloaded" and not (self.engine.is_idle and self.may_end.is_set()):
                await asyncio.sleep(0.005)
            failure = self.failure if state == "ready" else None
            self.failure = None if failure else self.failure
            self.engine.state.state = "unloaded" if failure else state
            future.set_exception(failure) if failure else future.set_result(None)

        self.task = asyncio.get_running_loop().create_task(arrive())
        return future


@pytest.fixture
async def sleepy(start, config):
    """sleepy(...) -> (running, Slow) with an idle limit of a moment."""

    async def make(script=("Hello",), idle=0.1, wait=60.0, **server):
        changed = replace(config, model=replace(config.model, idle_unload=idle), server=replace(config.server, load_wait_s=wait, **server))
        running = await start(script, config=changed, slots=4)
        return running, Slow(running.engine)

    return make


def stay_awake(running) -> None:
    """From now on the model stays, however long nobody asks."""
    running.daemon.config = replace(running.daemon.config, model=replace(running.daemon.config.model, idle_unload=0.0))


async def test_polls_let_it_sleep_and_many_requests_wake_it_with_one_load(sleepy):
    running, slow = await sleepy()
    await until(lambda: running.engine.state.state == "unloaded")
    stay_awake(running)
    for path in POLLS:
        async with running.session.get(running.url + path) as reply:
            assert reply.status == 200, path
    status, count = await running.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})
    assert status == 200 and slow.orders == ["unload"]
    assert (await running.get("/status"))[1]["is_asleep"] is True and (await running.get("/ready"))[1]["is_asleep"] is True
    replies = await asyncio.gather(*(running.post("/v1/completions", BODY) for _ in range(12)))
    assert [status for status, _ in replies] == [200] * 12
    assert slow.orders == ["unload", "load"]


async def test_it_does_not_sleep_while_somebody_asks(sleepy):
    go_on = threading.Event()
    running, slow = await sleepy(["a", go_on, "b"])
    asked = asyncio.create_task(running.post("/v1/completions", BODY))
    await until(lambda: running.engine.said)
    slow.orders.clear()   # if it fell asleep before anybody asked
    await asyncio.sleep(0.5)
    assert slow.orders == []
    go_on.set()
    status, reply = await asked
    assert status == 200 and reply["choices"][0]["text"] == "ab"


async def test_a_request_that_comes_while_it_falls_asleep_is_served(sleepy):
    running, slow = await sleepy()
    slow.may_end.clear()
    await until(lambda: running.engine.state.state == "draining")
    asked = asyncio.create_task(running.post("/v1/completions", BODY))
    await until(lambda: running.daemon.active)
    slow.may_end.set()
    assert (await asked)[0] == 200 and slow.orders[:2] == ["unload", "load"]


async def test_what_an_operator_unloaded_stays_away(sleepy):
    running, slow = await sleepy(idle=0.0)
    await running.post("/admin/unload", {"wait": True})
    async with running.session.post(running.url + "/v1/completions", json=BODY) as reply:
        assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0
    assert slow.orders == ["unload"] and (await running.get("/ready"))[0] == 503
    await running.post("/admin/load", {"wait": True})
    assert (await running.post("/v1/completions", BODY))[0] == 200


async def test_waiting_for_a_load_has_a_bound(sleepy):
    running, slow = await sleepy(idle=0.0, wait=0.05)
    slow.load_s = 600.0
    running.engine.load()
    async with running.session.post(running.url + "/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}) as reply:
        assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0 and "still loading" in (await reply.text())
    slow.task.cancel()


async def test_a_load_that_fails_is_told_to_all_who_wait_and_not_tried_again_at_once(sleepy):
    running, slow = await sleepy()
    await until(lambda: running.engine.state.state == "unloaded")
    slow.failure = OutOfMemory("11 GB are free, 20 GB are needed.")
    replies = await asyncio.gather(*(running.post("/v1/completions", BODY) for _ in range(5)))
    replies.append(await running.post("/v1/completions", BODY))
    assert {status for status, _ in replies} == {503} and "11 GB" in str(replies[-1])
    assert slow.orders == ["unload", "load"]
    await running.post("/admin/load", {"wait": True})
    assert (await running.post("/v1/completions", BODY))[0] == 200


def test_every_key_has_a_kind():
    keys = {f"{section}.{item.name}" for section, kind in SECTIONS.items() for item in fields(kind)}
    assert {kind_of(key) for key in keys} == {"live", "model", "restart"} and set(KEY_KINDS) <= keys


async def reloaded(running, section="", **changes):
    old = running.daemon.config
    running.daemon.reread = lambda: replace(old, **{section: replace(getattr(old, section), **changes)}) if section else old
    return await reload_config(running.daemon)


async def test_live_keys_count_for_the_next_request(start, with_server):
    running = await start()
    result = await reloaded(running, "server", api_keys=("k",), port=9)
    assert result.live == ("server.api_keys",) and result.refused == ("server.port",) and not result.error
    assert (await running.get("/v1/models"))[0] == 401 and running.daemon.config.server.port == 0
    result = await reloaded(running, "server", max_queue=1)
    assert running.engine.config.max_queue == 1
    assert (await reloaded(running)).to_dict() == {"live": [], "model": [], "refused": [], "error": ""}


async def test_what_cannot_be_read_changes_nothing(start):
    running = await start()

    def broken():
        raise UsageError("config.toml:3: no.")

    before, running.daemon.reread = running.daemon.config, broken
    assert "config.toml:3" in (await reload_config(running.daemon)).error and running.daemon.config is before
    result = await reloaded(running, "model", path="/no/such.q27")
    assert "/no/such.q27" in result.error and running.daemon.config is before
    result = await reloaded(running, "server", api_key_file="/no/such/key")
    assert "key file" in result.error and running.daemon.keys.api == ()


async def test_a_model_is_exchanged_after_its_streams_and_the_next_requests_wait(sleepy, monkeypatch):
    go_on = threading.Event()
    running, slow = await sleepy(["a", go_on] + ["b"] * 10, idle=0.0)
    monkeypatch.setattr("q27app.daemon.parts.open_text", lambda config: (running.daemon.tokenizer, running.daemon.template))
    monkeypatch.setattr("q27app.daemon.parts.engine_settings", lambda config: replace(running.engine.config, context=config.model.context))
    stream = asyncio.create_task(running.stream("/v1/completions", BODY))
    await until(lambda: running.engine.said)
    work = asyncio.create_task(reloaded(running, "model", context=4096))
    await until(lambda: "unload" in slow.orders)
    late = asyncio.create_task(running.post("/v1/completions", BODY))
    await until(lambda: len(running.daemon.active) == 2)
    go_on.set()
    assert "[DONE]" in await stream and "error" not in await stream
    assert (await work).model == ("model.context",) and (await late)[0] == 200
    assert slow.orders == ["unload", "load"] and running.engine.config.context == 4096 == running.daemon.config.model.context


async def test_a_model_that_cannot_be_loaded_brings_the_old_one_back(sleepy, monkeypatch):
    running, slow = await sleepy(idle=0.0)
    monkeypatch.setattr("q27app.daemon.parts.open_text", lambda config: (None, None))
    monkeypatch.setattr("q27app.daemon.parts.engine_settings", lambda config: replace(running.engine.config, slots=9))
    slow.failure, before = OutOfMemory("too much."), running.daemon.tokenizer
    work = asyncio.create_task(reloaded(running, "model", slots=9))
    result = await work
    assert "too much" in result.error and result.model == () and slow.orders == ["unload", "load", "load"]
    assert running.daemon.tokenizer is before and running.engine.config.slots is None
    status, reply = await running.post("/v1/completions", BODY)
    assert status == 200, reply


async def test_the_supervisor_sees_ready_reload_and_stop_in_order(engine_of, tokenizer, template, config, tmp_path):
    told: list[dict[str, str]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.setblocking(False)

        def listen() -> None:
            while True:
                try:
                    told.append(dict(line.split("=", 1) for line in channel.recv(4096).decode().splitlines()))
                except BlockingIOError:
                    return

        def count(name: str) -> int:
            listen()
            return sum(name in fields for fields in told)

        announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        work = run(engine_of(), tokenizer, template, config, announced.set_result, Notifier(str(tmp_path / "notify")), lambda: config)
        task = asyncio.create_task(work)
        await announced
        await until(lambda: count("WATCHDOG"))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: count("READY") == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 60) == 0
        listen()
    names = [next(name for name in fields if name in ("READY", "RELOADING", "STOPPING", "WATCHDOG")) for fields in told]
    assert [name for name in names if name != "WATCHDOG"] == ["READY", "RELOADING", "READY", "STOPPING"]
    reloading = next(fields for fields in told if "RELOADING" in fields)
    assert abs(int(reloading["MONOTONIC_USEC"]) / 1e6 - time.monotonic()) < 3600
