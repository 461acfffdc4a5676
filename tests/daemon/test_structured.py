"""Forms of an answer over a socket: JSON by schema, required calls, several answers. The engine's double wants to say
something else and says what the request's guide leaves it."""

from __future__ import annotations

import json

import pytest

from .test_openai_chat import chunks_of

pytest.importorskip("llguidance", reason="llguidance is in the extra json")

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": PARAMETERS}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
CHAT, PROSE = "/v1/chat/completions", "I would rather write prose { than JSON."


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("thinking", [{}, THINK])
@pytest.mark.parametrize("stream", [False, True])
async def test_content_is_json_of_the_schema(start, stubborn_engine, step, thinking, stream):
    text = "let me { think</think>\n\n" + PROSE if thinking else PROSE
    running = await start(engine=stubborn_engine(text, step))
    body = {"messages": MESSAGES, "response_format": FORM, "max_tokens": 300, **thinking}
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(await running.stream(CHAT, body))]
        content = "".join(delta.get("content") or "" for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    else:
        status, reply = await running.post(CHAT, body)
        assert status == 200, reply
        content = reply["choices"][0]["message"]["content"]
        reasoning = reply["choices"][0]["message"].get("reasoning_content", "")
        assert reply["choices"][0]["finish_reason"] == "stop"
    assert json.loads(content) == {"answer": 1}
    assert reasoning == ("let me { think" if thinking else "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 300, "output_format":
                          {"type": "json_schema", "schema": SCHEMA}}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 300, "output_config": {"format":
                          {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 300, "response_format": FORM}),
    ],
)
async def test_every_dialect_has_its_own_spelling(start, stubborn_engine, path, body):
    running = await start(engine=stubborn_engine(PROSE))
    status, reply = await running.post(path, body)
    assert status == 200, reply
    text = {
        "/v1/responses": lambda: reply["output"][0]["content"][0]["text"],
        "/v1/messages": lambda: reply["content"][0]["text"],
        "/v1/completions": lambda: reply["choices"][0]["text"],
    }[path]()
    assert json.loads(text) == {"answer": 1}


async def test_any_object_will_do_for_json_object(start, stubborn_engine):
    running = await start(engine=stubborn_engine(PROSE))
    _, reply = await running.post(
        CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 300}
    )
    assert isinstance(json.loads(reply["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "called"),
    [("required", ["look", "wait"]), ({"type": "function", "function": {"name": "wait"}}, ["wait"]), ("none", []),
     ("auto", [])],
)
async def test_a_tool_choice_is_kept_whatever_the_model_wants(start, stubborn_engine, choice, called, stream):
    running = await start(engine=stubborn_engine(PROSE))
    body = {"messages": MESSAGES, "tools": [LOOK, WAIT], "tool_choice": choice, "max_tokens": 300,
            "parallel_tool_calls": False}
    if stream:
        chunks = chunks_of(await running.stream(CHAT, body))
        entries = [entry for chunk in chunks for entry in chunk["choices"][0]["delta"].get("tool_calls", [])]
        names = [entry["function"]["name"] for entry in entries if "name" in entry["function"]]
        arguments = "".join(entry["function"]["arguments"] for entry in entries)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        _, reply = await running.post(CHAT, body)
        calls = reply["choices"][0]["message"].get("tool_calls", [])
        names = [call["function"]["name"] for call in calls]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        finish = reply["choices"][0]["finish_reason"]
    assert len(names) == (1 if called else 0) and set(names) <= set(called)
    assert finish == ("tool_calls" if called else "stop")
    if called:
        assert isinstance(json.loads(arguments)["deep"], bool)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "description": "x" * 70_000}}},
        {"type": "json_schema", "json_schema": {"schema": json.loads('{"items":' * 70 + "{}" + "}" * 70)}},
    ],
)
async def test_a_form_that_cannot_be_enforced_is_refused(start, form):
    running = await start()
    status, reply = await running.post(CHAT, {"messages": MESSAGES, "response_format": form})
    assert status == 400 and reply["error"]["param"] == "response_format"
    assert running.engine.requests == []


async def test_a_tool_schema_without_bounds_is_refused_in_every_dialect(start):
    running = await start()
    deep = json.loads('{"items":' * 70 + "{}" + "}" * 70)
    tools = {
        CHAT: {"type": "function", "function": {"name": "look", "parameters": deep}},
        "/v1/messages": {"name": "look", "input_schema": deep},
        "/v1/responses": {"type": "function", "name": "look", "parameters": deep},
    }
    for path, tool in tools.items():
        status, reply = await running.post(path, {"messages": MESSAGES, "input": "hi", "tools": [tool]})
        assert status == 400 and "64 levels" in reply["error"]["message"]


async def test_without_the_library_a_form_is_refused_clearly(start, monkeypatch):
    from q27app.chat import grammar

    monkeypatch.setattr(grammar, "is_available", lambda: False)
    running = await start()
    status, reply = await running.post(CHAT, {"messages": MESSAGES, "response_format": FORM})
    assert status == 400 and "q27app[json]" in reply["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "hi"})])
async def test_several_answers_to_one_request(start, path, body):
    running = await start(lambda request: [f"answer {request.params.seed}", 0.02, "!"], slots=2)
    body = {**body, "n": 3, "temperature": 1, "seed": 40, "stream_options": {"include_usage": True}}
    _, reply = await running.post(path, {key: value for key, value in body.items() if key != "stream_options"})
    texts = [choice.get("text") or choice["message"]["content"] for choice in reply["choices"]]
    assert texts == ["answer 40!", "answer 41!", "answer 42!"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 30
    chunks = chunks_of(await running.stream(path, body))
    said = ["", "", ""]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        said[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert said == texts and chunks[-1]["usage"]["completion_tokens"] == 30
    await running.quiet()


async def test_leaving_cancels_every_answer(start):
    running = await start(["a"] + [0.02, "b"] * 500, slots=3)
    async with running.session.post(
        running.url + CHAT, json={"messages": MESSAGES, "n": 3, "stream": True, "max_tokens": 900}
    ) as response:
        await response.content.readany()
        while len(running.engine.requests) < 3 or running.engine.num_running < 3:
            await response.content.readany()
    await running.quiet()
    assert sorted(running.engine.cancels) == sorted(request.id for request in running.engine.requests)


async def test_a_queue_that_takes_only_some_answers_takes_none(start):
    running = await start([30.0], slots=1, max_queue=1)
    status, _ = await running.post(CHAT, {"messages": MESSAGES, "n": 3})
    assert status == 503
    await running.quiet()
