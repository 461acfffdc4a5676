"""The document says what the handlers do, and no body that follows it, or not, makes them fail."""

from __future__ import annotations

import asyncio
import json

import pytest

from q27app.daemon.app import make_app
from q27app.daemon.openapi import ROUTES, document

EVENTS = "/admin/events"


def test_every_route_is_documented_and_every_documented_route_exists(engine_of, tokenizer, template, config):
    app = make_app(engine_of(), tokenizer, template, config)
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes() if route.method != "HEAD" and not route.resource.canonical.startswith("/v1/v1")
    }
    documented = {(method, path) for path, methods in document()["paths"].items() for method in methods}
    assert documented == served


@pytest.mark.parametrize("route", [route for route in ROUTES if route.path != EVENTS], ids=lambda route: route.path)
async def test_the_example_is_answered_in_the_documented_shape(start, route):
    running = await start(["x", 600.0, "y"] if "cancel" in route.path else ["x"])
    path = route.path.replace("{id}", "any-name")
    task = None
    if "cancel" in path:
        task = asyncio.create_task(running.post("/v1/completions", {"prompt": "x"}))
        while not running.engine.num_running:
            await asyncio.sleep(0.005)
        path = route.path.replace("{id}", running.engine.requests[0].id)
    if route.method == "get":
        async with running.session.get(running.url + path) as response:
            status, text = response.status, await response.text()
            assert not isinstance(route.reply, str) or response.headers["Content-Type"].startswith(route.reply)
            reply = {} if isinstance(route.reply, str) else json.loads(text)
    else:
        status, reply = await running.post(path, route.example)
    assert status in (200, 202), reply
    assert set(route.reply if isinstance(route.reply, tuple) else ()) <= set(reply)
    for need in route.needs:
        status, reply = await running.post(path, {key: value for key, value in route.example.items() if key != need})
        assert status == 400 or need == "max_tokens", (need, reply)
    if task is not None:
        await task


async def test_text_becomes_ids_and_ids_become_text(start, tokenizer):
    running = await start()
    text = "<|im_start|>é 漢"
    _, plain = await running.post("/tokenize", {"content": text})
    assert plain["tokens"] == tokenizer.encode(text)
    assert (await running.post("/detokenize", plain))[1] == {"content": text}
    _, special = await running.post("/tokenize", {"content": text, "parse_special": True, "with_pieces": True})
    assert special["tokens"][0] == {"id": tokenizer.control_ids["<|im_start|>"], "piece": "<|im_start|>"}
    for path, body in (("/tokenize", {}), ("/tokenize", {"content": 7}), ("/detokenize", {"tokens": "x"}),
                       ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [True]}), ("/apply-template", {})):
        status, reply = await running.post(path, body)
        assert status == 400 and reply["error"]["param"], (path, reply)


async def test_a_template_gives_what_a_generation_begins_with(start):
    running = await start()
    body = {
        "messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "<|im_end|>hi"}],
        "tools": [{"type": "function", "function": {"name": "look"}}], "reasoning_effort": "none",
    }
    _, reply = await running.post("/apply-template", body)
    assert running.engine.requests == []
    await running.post("/v1/chat/completions", body)
    assert tuple(reply["tokens"]) == running.engine.requests[0].prompt
    assert "rules" in reply["prompt"] and '"look"' in reply["prompt"]


def hammer(operation, mode, url: str, num_examples: int) -> int:
    """Send generated requests of one operation; how many there were. None may end in 500 or above."""
    from hypothesis import HealthCheck, Phase, errors, given, settings

    count = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=num_examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    def send(case):
        nonlocal count
        response = case.call(base_url=url, timeout=120)
        count += 1
        assert response.status_code < 500, (operation.label, response.status_code, response.text[:300])

    try:
        send()
    except errors.Unsatisfiable:
        return count  # an operation without a parameter cannot be called wrongly
    return count


@pytest.mark.long
async def test_no_generated_body_makes_a_handler_fail(start, long_scale):
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    running = await start(["x", "y"], slots=4)
    schema = schemathesis.openapi.from_dict(document())
    counts: dict[str, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.path.startswith("/admin"):
            for mode in modes:
                fresh = await asyncio.to_thread(hammer, operation, mode, running.url, max(5, int(100 * long_scale)))
                counts[operation.label] = counts.get(operation.label, 0) + fresh
    print(sum(counts.values()), "requests", counts)
    assert len(counts) >= 15 and sum(counts.values()) >= 100
    await running.quiet()
