"""Every answer ends, and is told how, whatever happens around it; nothing that an operator or a client does half way stays half done."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from q27app.daemon.inbox import Bell
from q27app.daemon.serve import Notifier, _drain, _Signals
from tests.daemon.test_streaming import open_stream, until

TWO = {"n": 2, "messages": [{"role": "user", "content": "hi"}]}
SLOW = ["a"] + [0.05, "b"] * 3000


async def test_all_answers_of_a_request_end_when_the_daemon_stops(start):
    running = await start(SLOW, slots=2)
    text = asyncio.create_task(running.stream("/v1/chat/completions", {**TWO, "max_tokens": 900}))
    await until(lambda: running.engine.num_running == 2)
    stop = _Signals()
    stop.at_once.set()
    await _drain(running.app, stop, 5.0, Notifier())
    told = await asyncio.wait_for(text, 60)
    assert '"overloaded_error"' in told and "is shutting down. Try again" in told and "operator" not in told
    await running.quiet()
    assert len(running.engine.cancels) == 2 == len(set(running.engine.cancels))


def held_back(monkeypatch) -> asyncio.Event:
    """Requests are prepared when it is set, and get no further before."""
    from q27app.daemon import generate

    go_on, inner = asyncio.Event(), generate.prepare

    async def waits(*args):
        await go_on.wait()
        return await inner(*args)

    monkeypatch.setattr(generate, "prepare", waits)
    return go_on


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_request_that_is_not_in_the_engine_when_the_daemon_stops_never_gets_there(start, monkeypatch, path):
    """Who asked while it was still there and who comes too late are told the same."""
    running, go_on = await start(), held_back(monkeypatch)
    monkeypatch.setattr("q27app.daemon.serve.CANCEL_GRACE_S", 0.1)
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "x", "stream": True}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    asked = asyncio.create_task(whole(running, path, body))
    await until(lambda: bool(running.daemon.active))
    stop = _Signals()
    stop.at_once.set()
    await _drain(running.app, stop, 5.0, Notifier())
    late = await whole(running, path, body)
    go_on.set()
    early = await asyncio.wait_for(asked, 60)
    assert early == late and early[0] == 503 and early[1] == "10"
    assert early[2]["type"] == "overloaded_error" and early[2]["message"] == "the daemon is shutting down. Try again when it is back."
    await running.quiet()
    assert not running.engine.requests


async def whole(running, path: str, body: dict) -> tuple:
    """(status, Retry-After, error) of a refusal."""
    async with running.session.post(running.url + path, json=body) as reply:
        return reply.status, reply.headers.get("Retry-After"), (await reply.json())["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_request_that_is_not_in_the_engine_yet_can_be_cancelled(start, path, monkeypatch):
    running, go_on = await start(), held_back(monkeypatch)
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "input": "hi", "stream": True}
    asked = asyncio.create_task(running.post(path, body))
    await until(lambda: bool(running.daemon.active))
    (name,) = running.daemon.active
    assert (await running.post(f"/admin/cancel/{name}", {}))[0] == 200
    go_on.set()
    status, reply = await asked
    assert status == 503 and "cancelled by the operator" in str(reply)
    await running.quiet()
    assert not running.engine.requests
    assert (await running.post(f"/admin/cancel/{name}", {}))[0] == 404


@pytest.mark.parametrize("who", ["daemon", "operator"])
async def test_a_request_that_waits_for_the_model_is_told_at_once_that_it_was_cancelled(start, with_server, who):
    running = await start(config=with_server(load_wait_s=600.0))
    running.engine.state.state = "loading"
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    asked = asyncio.create_task(whole(running, "/v1/messages", body))
    await until(lambda: [record.phase for record in running.daemon.active.values()] == ["waiting"])
    if who == "daemon":
        stop = _Signals()
        stop.at_once.set()
        await _drain(running.app, stop, 5.0, Notifier())
    else:
        (name,) = running.daemon.active
        assert (await running.post(f"/admin/cancel/{name}", {}))[0] == 200
    status, _, error = await asyncio.wait_for(asked, 60)
    assert status == 503 and ("shutting down" if who == "daemon" else "by the operator") in error["message"]
    await running.quiet()


@pytest.mark.parametrize("where", ["cancel", "cancel one"])
async def test_an_operator_ends_a_request_with_all_its_answers(start, where):
    running = await start(SLOW, slots=2)
    text = asyncio.create_task(running.stream("/v1/chat/completions", {**TWO, "max_tokens": 900}))
    await until(lambda: running.engine.num_running == 2)
    (name,) = running.daemon.active
    name = name if where == "cancel" else f"{name}_1"
    assert (await running.post(f"/admin/cancel/{name}", {}))[0] == 200
    assert "cancelled by the operator" in await asyncio.wait_for(text, 60)
    await running.quiet()
    assert len(running.engine.cancels) == 2


async def test_what_cannot_be_told_of_an_answer_does_not_spoil_it(start, caplog):
    running = await start(["fine"])

    def fails(record):
        raise RuntimeError("no more room for figures")

    running.daemon._count = fails
    for stream in (False, True):
        async with running.session.post(running.url + "/v1/completions", json={"prompt": "x", "max_tokens": 9, "stream": stream}) as reply:
            text = await reply.text()
            assert reply.status == 200 and "fine" in text and "HTTP/1.1" not in text
    assert not running.daemon.active and "not all of that could be told" in caplog.text
    assert running.daemon.metrics.text()


async def test_a_client_that_leaves_a_reload_leaves_no_half_of_it(start, monkeypatch):
    running = await start()
    daemon, gone, ordered = running.daemon, Future(), []
    daemon.reread = lambda: replace(daemon.config, model=replace(daemon.config.model, context=4096))
    monkeypatch.setattr("q27app.daemon.parts.open_text", lambda config: (daemon.tokenizer, daemon.template))
    monkeypatch.setattr("q27app.daemon.parts.engine_settings", lambda config: replace(running.engine.config, context=4096))

    def order(kind, future):
        ordered.append(kind)
        return future

    done: Future = Future()
    done.set_result(None)
    running.engine.unload, running.engine.load = (lambda: order("unload", gone)), (lambda: order("load", done))
    _, writer = await open_stream(running, "/admin/reload", {})
    await until(lambda: ordered == ["unload"])
    writer.close()
    await asyncio.sleep(0.2)
    assert gone.set_running_or_notify_cancel(), "the order was taken back"
    gone.set_result(None)
    await until(lambda: daemon.last_reload is not None)
    assert ordered == ["unload", "load"] and daemon.config.model.context == 4096 == running.engine.config.context


async def test_a_receiver_that_fails_keeps_nobody_else_waiting(caplog):
    bell, told = Bell(), []

    def fails():
        raise ValueError("of its own")

    for call in (fails, lambda: told.append(1)):
        bell.ring(call)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == [1] and "receiver failed" in caplog.text


async def test_an_error_of_ours_in_the_middle_of_a_stream_is_told_in_it_and_frees_the_slot(start, monkeypatch):
    from q27app.daemon.answer import Translation

    running = await start(SLOW)
    inner = Translation.feed

    def feed(self, event):
        if self.num_generated > 3:
            raise KeyError("a mistake of ours")
        return inner(self, event)

    monkeypatch.setattr(Translation, "feed", feed)
    for path, mark in (("/v1/chat/completions", '"error"'), ("/v1/messages", "event: error"), ("/v1/responses", "response.failed")):
        body = {"max_tokens": 900, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
        text = await asyncio.wait_for(running.stream(path, body), 60)
        assert mark in text and "internal error" in text and "mistake" not in text
        await running.quiet()
    assert len(running.engine.cancels) == 3
