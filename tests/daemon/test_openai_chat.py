"""The Chat Completions and Completions dialects over a socket: shapes, order, usage, errors."""

from __future__ import annotations

import json
import threading

import pytest

BODY = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}]}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a b"}}\n</tool_call>'
PATH = "/v1/chat/completions"


def chunks_of(text: str) -> list[dict]:
    """The chunks of a stream that ends properly."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_reply_without_stream_has_the_chat_shape(start):
    running = await start(["Hel", "lo"])
    status, reply = await running.post(PATH, BODY)
    assert status == 200
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion" and reply["model"] == "gpt-x"
    assert reply["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop", "logprobs": None}
    ]
    prompt = len(running.engine.requests[0].prompt)
    assert reply["usage"]["prompt_tokens"] == prompt
    assert reply["usage"]["completion_tokens"] == 5 and reply["usage"]["total_tokens"] == prompt + 5
    _, again = await running.post(PATH, BODY)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt - 1}
    assert again["id"] != reply["id"]


async def test_a_stream_begins_with_the_role_and_ends_with_done(start):
    go_on = threading.Event()
    running = await start(["Hel", go_on, "lo"])
    chunks = chunks_of(await running.stream(PATH, BODY, {"Hel": go_on}))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_usage_is_not_sent_unasked(start, options):
    running = await start()
    chunks = chunks_of(await running.stream(PATH, {**BODY, "stream_options": options}))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_when_asked_for(start):
    running = await start(["x"])
    chunks = chunks_of(await running.stream(PATH, {**BODY, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_reasoning_is_reasoning_content(start):
    running = await start(["why", "</think>\n\n", "so"])
    body = {**BODY, "chat_template_kwargs": {"enable_thinking": True}}
    _, reply = await running.post(PATH, body)
    assert reply["choices"][0]["message"]["reasoning_content"].strip() == "why"
    assert reply["choices"][0]["message"]["content"].strip() == "so"
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = chunks_of(await running.stream(PATH, body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "why"
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "so"


async def test_calls_are_tool_calls_with_index_and_arguments_as_text(start):
    running = await start(["I look. ", CALL, CALL])
    body = {**BODY, "max_tokens": 500, "tools": [LOOK]}
    _, reply = await running.post(PATH, body)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["look", "look"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"path": "a b"}] * 2
    assert len({call["id"] for call in calls}) == 2 and calls[0]["id"].startswith("call_")
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    chunks = chunks_of(await running.stream(PATH, body))
    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["delta"].get("tool_calls", [])]
    arguments = {
        index: "".join(entry["function"]["arguments"] for entry in entries if entry["index"] == index)
        for index in (0, 1)
    }
    assert {index: json.loads(text) for index, text in arguments.items()} == {0: {"path": "a b"}, 1: {"path": "a b"}}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_content_is_null_beside_a_bare_call(start):
    running = await start([CALL])
    _, reply = await running.post(PATH, {**BODY, "max_tokens": 500, "tools": [LOOK]})
    assert reply["choices"][0]["message"]["content"] is None


async def test_tool_choice_none_renders_and_parses_no_tool(start):
    running = await start([CALL])
    body = {**BODY, "max_tokens": 500, "tools": [LOOK]}
    _, reply = await running.post(PATH, {**body, "tool_choice": "none"})
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    await running.post(PATH, body)
    first, second = (len(request.prompt) for request in running.engine.requests)
    assert first < second


async def test_only_the_allowed_tools_are_rendered(start, tokenizer):
    running = await start()
    other = {"type": "function", "function": {"name": "listen"}}
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "listen"}}]},
    }
    await running.post(PATH, {**BODY, "tools": [LOOK, other], "tool_choice": choice})
    text = tokenizer.decode(running.engine.requests[0].prompt)
    assert '"listen"' in text and '"look"' not in text


async def test_every_legal_message_is_accepted(start):
    running = await start()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "p"}'}},
                {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "system", "content": "late"},
        {"role": None, "content": None},
        {"content": "no role"},
    ]
    status, reply = await running.post(
        PATH,
        {
            **BODY,
            "messages": messages,
            "future": {"a": 1},
            "max_tokens": None,
            "temperature": "hot",
            "stop": None,
            "n": None,
            "logit_bias": {},
        },
    )
    assert status == 200, reply
    assert "seen[an image that this model cannot see]" in running.daemon.tokenizer.decode(running.engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "oracle"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "image_url",
        ),
        ({"n": 17}, "n:"),
        ({"n": 0}, "n:"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "lark"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": 3}, "stream_options"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none_such"}}}, "none_such"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_a_bad_request_names_the_field(start, change, blamed):
    running = await start()
    for stream in (False, True):
        status, reply = await running.post(PATH, {**BODY, **change, "stream": stream})
        assert status == 400
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert reply["error"]["type"] == "invalid_request_error"
        assert blamed in reply["error"]["message"]
    assert running.engine.requests == []


async def test_sampling_fields_reach_the_engine_and_null_is_absent(start, config):
    running = await start()
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "seed": 2**63 + 5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "max_completion_tokens": 17,
        "max_tokens": 99,
    }
    await running.post(PATH, {**BODY, **given})
    await running.post(PATH, {**BODY, **dict.fromkeys(given)})
    params, default = (request.params for request in running.engine.requests)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 20, 0.05)
    assert (params.seed, params.presence_penalty, params.frequency_penalty) == (2**63 + 5, 0.5, -0.5)
    assert params.max_tokens == 17
    assert default.temperature == config.sampling.temperature and default.max_tokens == config.sampling.max_tokens


async def test_a_sampled_request_without_seed_draws_one(start):
    running = await start()
    for _ in range(2):
        await running.post(PATH, {**BODY, "temperature": 1})
    first, second = (request.params.seed for request in running.engine.requests)
    assert first != second


async def test_stop_strings_cut_the_text(start):
    running = await start(["one ST", "OP two"])
    for stop in ("STOP", ["", "STOP"]):
        _, reply = await running.post(PATH, {**BODY, "stop": stop})
        assert reply["choices"][0]["message"]["content"] == "one "
        assert reply["choices"][0]["finish_reason"] == "stop"


async def test_logprobs_name_each_token_of_the_text(start):
    running = await start(["ab", 0.02, "c"])
    body = {**BODY, "logprobs": True, "top_logprobs": 1}
    _, reply = await running.post(PATH, body)
    content = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "abc"
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
    }
    chunks = chunks_of(await running.stream(PATH, body))
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == "abc"


async def test_text_completions_take_text_and_ids(start, tokenizer):
    running = await start(["ab"])
    status, reply = await running.post("/v1/completions", {"prompt": "<|im_start|>x", "logprobs": 1})
    assert status == 200
    assert reply["object"] == "text_completion" and reply["choices"][0]["text"] == "ab"
    assert reply["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert running.engine.requests[0].prompt == (tokenizer.control_ids["<|im_start|>"], *tokenizer.encode("x"))
    await running.post("/v1/completions", {"prompt": [[5, 6]]})
    assert running.engine.requests[1].prompt == (5, 6)
    chunks = chunks_of(
        await running.stream("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == "ab"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "empty_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": ["a", ""]}, "empty_prompt"),
        ({"prompt": [10**9]}, "invalid_request"),
        ({"prompt": "x", "echo": True}, "invalid_request"),
        ({"prompt": "x", "best_of": 2}, "invalid_request"),
    ],
)
async def test_a_bad_prompt_is_refused(start, body, code):
    running = await start()
    status, reply = await running.post("/v1/completions", body)
    assert (status, reply["error"]["code"]) == (400, code)


async def test_a_forced_call_that_does_not_come_is_an_error(start):
    running = await start(["no"])
    body = {**BODY, "tools": [LOOK], "tool_choice": "required"}
    status, reply = await running.post(PATH, body)
    assert (status, reply["error"]["type"]) == (500, "api_error")
    text = await running.stream(PATH, body)
    assert '"error"' in text and "[DONE]" not in text
