"""What a stream does over time: the first byte, pings, disconnects in each phase, slow readers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time

import pytest

from q27app.daemon.generate import PACE_S, pause_s

MESSAGES = {"max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "hi", "max_tokens": 900},
    "/v1/responses": {"input": "hi", "max_output_tokens": 900},
}
LONG_TEXT = "".join(random.Random(7).choices("abcdefghij", k=800))
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


async def open_stream(running, path: str, body: dict, stream: bool = True):
    """A raw connection that has sent the request: (reader, writer)."""
    raw = json.dumps({**body, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 12)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost:{running.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    await writer.drain()
    return reader, writer


async def until(condition, timeout_s: float = 60.0) -> None:
    """Returns as soon as `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@EVERY_PATH
async def test_headers_and_a_first_event_come_before_a_slot_is_free(start, path):
    running = await start([600.0, "late"])
    _, blocker = await open_stream(running, path, PATHS[path])
    await until(lambda: running.engine.num_running == 1)
    reader, writer = await open_stream(running, path, PATHS[path])
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        first = await reader.readuntil(b"\n\n")
    assert b"200 OK" in head and b"text/event-stream" in head and b"no-cache" in head
    if path == "/v1/messages":
        assert b"message_start" in first and b'"input_tokens":0' not in first
    for each in (blocker, writer):
        each.close()
    await running.quiet()


@EVERY_PATH
async def test_pings_fill_the_silence_of_a_long_prefill(start, path):
    names = {"/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n', "/v1/responses": b"event: keepalive\n"}
    mark = names.get(path, b": ping\n\n")
    prefill_ends = threading.Event()
    running = await start(["done"], prefill_s=prefill_ends)
    started, text = time.monotonic(), b""
    async with running.session.post(running.url + path, json={**PATHS[path], "stream": True}) as response:
        async for chunk in response.content.iter_any():
            text += chunk
            if text.count(mark) >= 5:
                prefill_ends.set()
    assert b"done" in text
    intervals = (time.monotonic() - started) / running.daemon.config.server.ping_interval_s
    assert 5 <= text.count(mark) <= intervals + 1, "one a silent interval, however slow the machine is"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_cancels_its_request_once(start, phase, stream):
    running = await start(["a"] + [0.1, "b"] * 890, prefill_s=600.0 if phase == "prefill" else 0.0)
    others = []
    if phase == "queued":
        others.append((await open_stream(running, "/v1/messages", MESSAGES))[1])
        await until(lambda: running.engine.num_running == 1)
    _, writer = await open_stream(running, "/v1/messages", MESSAGES, stream)
    await until(
        lambda: (
            [record.phase for record in running.daemon.active.values()].count(phase) == 1
            and len(running.engine.requests) == len(others) + 1
        )
    )
    name = running.engine.requests[-1].id
    writer.close()
    await until(lambda: name not in running.daemon.active and running.engine.cancels == [name])
    for other in others:
        other.close()
    await running.quiet()
    assert running.engine.cancels.count(name) == 1
    metric = f'q27app_disconnects_total{{phase="{phase}"}} 1.0'
    await until(lambda: metric in running.daemon.metrics.text().decode() or phase == "decode" or bool(others))


async def test_a_client_that_leaves_while_its_prompt_is_rendered_starts_nothing(start):
    running = await start()
    original, go_on, rendered = running.daemon.template, threading.Event(), threading.Event()

    class Slow:
        dialect = original.dialect

        def render(self, *args):
            go_on.wait(60)
            found = original.render(*args)
            rendered.set()
            return found

    running.daemon.template = Slow()
    body = {"messages": [{"role": "user", "content": "x" * 20_000}]}
    _, writer = await open_stream(running, "/v1/messages", body)
    await until(lambda: [record.phase for record in running.daemon.active.values()] == ["rendering"])
    writer.close()
    await until(lambda: not running.daemon.active)
    go_on.set()
    await until(rendered.is_set)
    await asyncio.sleep(0.1)
    assert running.engine.requests == []


async def test_an_identical_resend_leaves_one_request_running(start):
    running = await start(["x"], prefill_s=600.0, slots=2)
    _, first = await open_stream(running, "/v1/messages", MESSAGES)
    await until(lambda: running.engine.num_running == 1)
    first.close()
    _, second = await open_stream(running, "/v1/messages", MESSAGES)
    await until(
        lambda: (
            len(running.engine.cancels) == 1 and running.engine.num_running == 1 and len(running.engine.requests) == 2
        )
    )
    second.close()
    await running.quiet()


async def test_a_slow_reader_does_not_stall_others(start):
    """The text is aperiodic, or the guide would end it as a loop."""

    def script(request):
        return [LONG_TEXT, 0.01] * 30 if request.params.logprobs is not None else ["quick"]

    running = await start(script, slots=2)
    running.shrink_buffers()
    raw = json.dumps({**MESSAGES, "max_tokens": 30_000, "stream": True, "logprobs": True}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await until(lambda: running.engine.said == 24_000 and running.engine.is_idle)
        async with asyncio.timeout(60):
            status, reply = await running.post("/v1/completions", {"prompt": "hi", "max_tokens": 10})
        assert (status, reply["choices"][0]["text"]) == (200, "quick")
        assert len(running.daemon.active) == 1, "the slow reader should still have most of its answer to read"
    await running.quiet()
    assert running.engine.cancels == []


async def test_a_reader_that_falls_too_far_behind_is_given_up():
    from q27app.daemon.inbox import Inbox
    from q27app.engine.request import FinishReason, TokenEvent

    given_up = []
    inbox = Inbox(max_backlog=10, on_overflow=lambda: given_up.append(1))
    for _ in range(100):
        inbox.deliver(TokenEvent("a", tokens=(1, 2, 3), forced=(False,) * 3))
    inbox.deliver(TokenEvent("a", finish=FinishReason.STOP))
    events = await inbox.take(1.0)
    await asyncio.sleep(0)
    assert inbox.has_overflowed and given_up == [1]
    assert sum(len(event.tokens) for event in events) <= 10 and events[-1].finish is FinishReason.STOP


async def test_a_reader_that_is_given_up_is_cancelled_at_once_and_told(start, monkeypatch):
    from q27app.daemon import generate, inbox

    monkeypatch.setattr(generate, "Inbox", lambda on_overflow, bell: inbox.Inbox(100, on_overflow, bell))
    running = await start([LONG_TEXT, 60.0])
    text = await running.stream("/v1/chat/completions", {**MESSAGES, "max_tokens": 2000})
    assert "reads too slowly" in text and "[DONE]" not in text
    await running.quiet()
    assert len(running.engine.cancels) == 1


async def test_progress_events_replace_each_other():
    from q27app.daemon.inbox import Inbox
    from q27app.engine.request import TokenEvent

    inbox = Inbox()
    for count in range(1000):
        inbox.deliver(TokenEvent("a", prefilled=count))
    assert [event.prefilled for event in await inbox.take(1.0)] == [999]
    assert await inbox.take(0.01) == []


async def test_tokens_of_one_wake_up_make_one_write(start):
    running = await start(["a"] * 500)
    text = await running.stream("/v1/chat/completions", PATHS["/v1/chat/completions"])
    assert text.count("chat.completion.chunk") < 250
    assert (
        sum(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "").count("a")
            for line in text.split("\n")
            if line.startswith("data: {")
        )
        == 500
    )


async def test_an_operator_can_end_a_request(start):
    running = await start(["a", 30.0, "b"])
    reader, writer = await open_stream(running, "/v1/messages", MESSAGES)
    await until(lambda: running.engine.said == 1)
    name = running.engine.requests[0].id
    status, reply = await running.post(f"/admin/cancel/{name}", {})
    assert (status, reply) == (200, {"id": name, "cancelled": True})
    text = (await reader.read()).decode() if reader.at_eof() else (await reader.readuntil(b"event: error")).decode()
    assert "message_stop" not in text
    writer.close()
    await running.quiet()
    assert running.engine.cancels == [name]
    assert (await running.post("/admin/cancel/none_such", {}))[0] == 404


async def test_one_step_for_many_requests_wakes_the_loop_once(monkeypatch):
    from q27app.daemon.inbox import Bell, Inbox
    from q27app.engine.request import TokenEvent

    loop, rings = asyncio.get_running_loop(), []
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: (rings.append(1), loop.call_soon(call)))
    bell = Bell()
    inboxes = [Inbox(bell=bell) for _ in range(50)]
    waiting = [asyncio.create_task(inbox.take(10.0)) for inbox in inboxes]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.deliver(TokenEvent("a", tokens=(1,), forced=(False,)))
    assert [len(events) for events in await asyncio.gather(*waiting)] == [1] * 50 and len(rings) == 1
    assert await inboxes[0].take(0.01) == []


def test_steps_are_joined_in_the_order_of_each_request():
    from q27app.daemon.inbox import joined
    from q27app.engine.request import FinishReason, TokenEvent

    events = [TokenEvent("a", (1,), (False,)), TokenEvent("b", (7,)), TokenEvent("a", (2, 3), (False, True)),
              TokenEvent("a", finish=FinishReason.STOP), TokenEvent("b", (8,), (True,))]
    assert joined(events) == [TokenEvent("a", (1, 2, 3), (False, False, True)), TokenEvent("a", finish=FinishReason.STOP),
                              TokenEvent("b", (7, 8), (False, True))]


@pytest.mark.parametrize(("num_active", "is_paced"), [(1, False), (32, False), (33, True), (200, True)])
def test_up_to_32_answers_at_once_are_written_as_they_come(num_active, is_paced):
    pause = pause_s(num_active)
    assert (pause > 0) is is_paced and pause <= 1.5 * PACE_S * num_active
