"""Every error in the shape that the client's dialect knows, before and after the headers."""

from __future__ import annotations

import asyncio
import gzip
import json
import re

import aiohttp
import pytest

from q27app.errors import EngineDied, GpuError

PATHS = {
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


def kind_of(path: str, reply: dict) -> str:
    """The error's type; checks the envelope."""
    if path == "/v1/messages":
        assert (
            set(reply) == {"type", "error"}
            and reply["type"] == "error"
            and set(reply["error"]) == {"type", "message"}
        )
    else:
        assert set(reply) == {"error"} and set(reply["error"]) == {"message", "type", "param", "code"}
    return reply["error"]["type"]


@EVERY_PATH
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)
async def test_a_body_that_is_no_json_object_is_400(start, path, raw):
    running = await start()
    async with running.session.post(
        running.url + path, data=raw, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 400
        assert kind_of(path, await response.json()) == "invalid_request_error"


@EVERY_PATH
async def test_a_prompt_over_the_window_is_refused_in_the_words_that_clients_know(start, path):
    running = await start(max_context=100)
    text = "x" * 200
    bodies = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    body = bodies.get(path, {"messages": [{"role": "user", "content": text}]})
    for stream in (False, True):
        status, reply = await running.post(path, {**body, "max_tokens": 5, "stream": stream})
        assert status == 400 and kind_of(path, reply) == "invalid_request_error"
        message = reply["error"]["message"]
        words = message.split()
        assert message == f"prompt is too long: {words[4]} tokens > 99 maximum" and int(words[4]) >= 200
        if path != "/v1/messages":
            assert reply["error"]["code"] == "context_length_exceeded"
    assert running.engine.requests == []


@EVERY_PATH
async def test_max_tokens_is_cut_to_the_window(start, path):
    running = await start(max_context=400)
    status, _ = await running.post(path, {**PATHS[path], "max_tokens": 100_000})
    request = running.engine.requests[0]
    assert status == 200 and request.params.max_tokens == 400 - len(request.prompt)


@EVERY_PATH
async def test_a_full_queue_is_503_with_a_time_to_try_again(start, path):
    running = await start(max_queue=0)
    for stream in (False, True):
        async with running.session.post(running.url + path, json={**PATHS[path], "stream": stream}) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) > 0
            assert kind_of(path, await response.json()) == "overloaded_error"


@EVERY_PATH
async def test_too_many_requests_in_flight_are_503(start, path, monkeypatch):
    from q27app.daemon import daemon

    monkeypatch.setattr(daemon, "EXTRA_ACTIVE", -64)
    running = await start()
    status, reply = await running.post(path, PATHS[path])
    assert status == 503 and kind_of(path, reply) == "overloaded_error"


async def test_a_body_that_does_not_arrive_is_408(start, monkeypatch):
    from q27app.daemon import access

    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.1)
    running = await start()

    async def stalling():
        yield b"{"
        await asyncio.sleep(600)

    async with running.session.post(
        running.url + "/v1/messages", data=stalling(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 408
        assert kind_of("/v1/messages", await response.json()) == "invalid_request_error"


@EVERY_PATH
@pytest.mark.parametrize("state", ["unloaded", "loading"])
async def test_without_a_model_it_is_503_with_a_time_to_try_again(start, path, state):
    running = await start()
    running.engine.state.state = state
    async with running.session.post(running.url + path, json=PATHS[path]) as response:
        assert response.status == 503 and "Retry-After" in response.headers
        assert state in (await response.json())["error"]["message"]


@EVERY_PATH
async def test_a_dead_engine_is_503_with_the_cause(start, path):
    running = await start()
    running.engine.state.state, running.engine.state.error = "failed", EngineDied("the card fell off the bus.")
    status, reply = await running.post(path, PATHS[path])
    assert status == 503
    assert "fell off the bus" in reply["error"]["message"]


@EVERY_PATH
async def test_a_failure_before_the_first_token_is_an_error_reply(start, path):
    running = await start([GpuError("illegal address.")])
    status, reply = await running.post(path, PATHS[path])
    assert status == 503 and kind_of(path, reply) == "api_error"
    assert "illegal address" in reply["error"]["message"]


@EVERY_PATH
async def test_a_failure_after_the_headers_is_an_error_event_and_the_end(start, path):
    running = await start(["a", "b", "c", EngineDied("the engine died of a test.")])
    text = await running.stream(path, PATHS[path])
    assert "message_stop" not in text and "[DONE]" not in text
    block = text.strip().split("\n\n")[-1].split("\n")
    names = {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}
    assert block[0] == names[path] if path in names else len(block) == 1
    error = json.loads(block[-1].removeprefix("data: "))
    if path == "/v1/responses":
        error = error["response"]
    else:
        kind_of(path, error)
    assert "died of a test" in error["error"]["message"]
    assert "".join(re.findall(r'"(?:text|content|delta)":"([abc]+)"', text)) == "abc"
    await running.quiet()


async def test_an_unforeseen_failure_gives_nothing_away(start, caplog):
    running = await start(lambda request: ["ok"])
    running.daemon.template = None
    status, reply = await running.post("/v1/chat/completions", PATHS["/v1/chat/completions"])
    assert status == 500
    assert reply["error"]["message"].startswith("internal error.") and "NoneType" not in json.dumps(reply)
    assert "AttributeError" in caplog.text


async def test_an_unforeseen_failure_inside_a_stream_cancels_the_request(start, monkeypatch):
    running = await start(["a", 600.0, "b"])
    from q27app.daemon import openai_chat

    async def broken(identity, deltas):
        async for delta in deltas:
            if delta.kind == "text":
                raise RuntimeError("secret")
            yield b": x\n\n"

    monkeypatch.setattr(openai_chat, "events", broken)
    text = await running.stream("/v1/chat/completions", PATHS["/v1/chat/completions"])
    assert "internal error" in text and "secret" not in text
    await running.quiet()
    assert len(running.engine.cancels) == 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/messages"), ("DELETE", "/v1/models"), ("POST", "/health")])
async def test_a_wrong_method_is_405_and_names_the_right_one(start, method, path):
    running = await start()
    async with running.session.request(method, running.url + path, json={}) as response:
        assert response.status == 405 and response.headers["Allow"]
        assert "error" in await response.json()


@pytest.mark.parametrize("path", ["/chat/completions", "/v2/messages", "/v1/messages/nothing"])
async def test_404_names_the_base_url(start, path):
    running = await start()
    status, reply = await running.post(path, {})
    assert status == 404
    assert f"{running.url}/v1" in reply["error"]["message"]


async def test_a_body_of_3_mib_is_taken_and_one_of_70_is_not(start):
    running = await start()
    status, reply = await running.post("/v1/messages", {**PATHS["/v1/messages"], "metadata": "x" * (3 << 20)})
    assert status == 200, reply
    async with running.session.post(
        running.url + "/v1/messages", data=b" " * (70 << 20), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413
        assert kind_of("/v1/messages", await response.json()) == "request_too_large"
    status, _ = await running.post("/v1/messages", PATHS["/v1/messages"])
    assert status == 200


async def test_a_chunked_body_over_the_limit_is_413(start, with_server):
    running = await start(config=with_server(body_limit_mb=1))

    async def pieces():
        for _ in range(3):
            yield b" " * (1 << 19)

    for path, kind in (("/v1/messages", "request_too_large"), ("/v1/completions", "invalid_request_error")):
        async with running.session.post(
            running.url + path, data=pieces(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413
            assert kind_of(path, await response.json()) == kind


PACKED = {"rubbish": b"no gzip at all", "cut": None, "bomb": gzip.compress(b" " * (5 << 20))}


@EVERY_PATH
@pytest.mark.parametrize("what", PACKED)
async def test_a_packed_body_that_cannot_be_read_is_told_and_costs_the_next_request_nothing(start, with_server, path, what):
    """What follows it on its connection cannot be told, so nobody may send anything there."""
    running = await start(config=with_server(body_limit_mb=4))
    packed = PACKED[what] or gzip.compress(json.dumps(PATHS[path]).encode())[:-12]
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with running.session.post(running.url + path, data=packed, headers=headers) as response:
        told = await response.json()
        assert response.status == (413 if what == "bomb" else 400)
        assert what == "cut" or response.headers["Connection"] == "close"
        assert kind_of(path, told) == ("request_too_large" if (path, what) == ("/v1/messages", "bomb") else "invalid_request_error")
    assert (await running.post(path, PATHS[path]))[0] == 200
    whole = gzip.compress(json.dumps(PATHS[path]).encode())
    async with running.session.post(running.url + path, data=whole, headers=headers) as response:
        assert response.status == 200


@EVERY_PATH
async def test_a_body_with_a_mark_of_its_encoding_in_front_is_read(start, path):
    """Files that some shells write begin with one."""
    running = await start()
    raw = b"\xef\xbb\xbf" + json.dumps(PATHS[path]).encode()
    async with running.session.post(running.url + path, data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 200


async def test_ids_are_in_the_headers(start):
    running = await start()
    for body in (PATHS["/v1/completions"], {**PATHS["/v1/completions"], "stream": True}, {}):
        async with running.session.post(running.url + "/v1/completions", json=body) as response:
            assert response.headers["request-id"] == response.headers["x-request-id"] != ""
            await response.read()


async def test_a_dead_connection_leaves_no_trace(start):
    running = await start(["x"])
    async with aiohttp.ClientSession() as session:
        await (await session.get(running.url + "/")).read()
    await running.quiet()
