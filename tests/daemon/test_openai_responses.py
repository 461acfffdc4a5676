"""The Responses dialect over a socket: event order, tools of every kind, replays, the catalogue, errors."""

from __future__ import annotations

import json
import threading

import pytest

from .responses_order import Checker, read

PATH = "/v1/responses"
BODY = {"model": "gpt-x", "input": "hi", "max_output_tokens": 900}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "looks",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
SPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close", "parameters": {}}]}
ALL_KINDS = [LOOK, PATCH, SPACE, {"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
PATCH_TEXT = '*** Begin Patch\n*** Update File: a "b".py\n-x = "\\n"\n+x = \'\\\\\'\n*** End Patch'
THINK = {"reasoning": {"effort": "medium", "enabled": True}}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CASES = {
    "text": (["Hel", 0.01, "lo"], {}, ["message"], "completed"),
    "nothing": ([], {}, ["message"], "completed"),
    "reasoning and text": (["why", 0.01, " so", "</think>\n\n", "so"], THINK, ["reasoning", "message"], "completed"),
    "function": ([call("look", path="a")], {}, ["function_call"], "completed"),
    "text and two functions": (
        ["I look. ", call("look", path="a"), call("look", path="b")],
        {},
        ["message", "function_call", "function_call"],
        "completed",
    ),
    "reasoning and function": (
        ["why</think>\n\n", call("look", path="a")],
        THINK,
        ["reasoning", "function_call"],
        "completed",
    ),
    "custom": ([call("apply_patch", input=PATCH_TEXT)], {}, ["custom_tool_call"], "completed"),
    "namespace": ([call("agents__close")], {}, ["function_call"], "completed"),
    "cut text": (["abcdef"], {"max_output_tokens": 3}, ["message"], "incomplete"),
    "cut reasoning": (["abcdef"], {"max_output_tokens": 3, **THINK, "budget_tokens": -1}, ["reasoning"], "incomplete"),
    "cut call": ([call("look", path="a")], {"max_output_tokens": 30}, [], "incomplete"),
    "failed": (["ab", 0.01, RuntimeError("boom")], {}, None, "failed"),
    "failed in a call": ([call("look", path="a"), 0.01, RuntimeError("boom")], {}, ["function_call"], "failed"),
}


@pytest.mark.parametrize("case", CASES)
async def test_every_stream_keeps_to_the_order(start, case):
    script, change, kinds, status = CASES[case]
    running = await start(script)
    body = {**BODY, "tools": ALL_KINDS, **change}
    response = Checker().check(await running.stream(PATH, body))
    assert response["status"] == status
    if kinds is not None:
        wanted = kinds or ["message"]
        assert [item["type"] for item in response["output"]] == wanted
    if status != "failed":
        _, whole = await running.post(PATH, body)
        assert [without_ids(item) for item in whole["output"]] == [without_ids(item) for item in response["output"]]
        assert whole["status"] == status


def without_ids(item: dict) -> dict:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


async def test_a_cancelled_answer_ends_in_failed(start):
    running = await start(["a"] + [0.1, "b"] * 500)
    seen = b""
    async with running.session.post(running.url + PATH, json={**BODY, "stream": True}) as response:
        async for piece in response.content.iter_any():
            seen += piece
            if b"output_text.delta" in seen and not running.engine.cancels:
                running.engine.cancel(running.engine.requests[0].id)
    result = Checker().check(seen.decode())
    assert result["status"] == "failed" and result["error"]["code"] == "cancelled"


async def test_silence_is_filled_with_keepalive_events(start):
    prefill_ends = threading.Event()
    running = await start(["x"], prefill_s=prefill_ends)
    stream = await running.stream(PATH, BODY, {"keepalive": prefill_ends})
    Checker().check(stream)
    assert [event["type"] for event in read(stream)].count("keepalive") >= 1


async def test_a_free_text_tool_comes_back_as_it_was_written_and_its_result_is_accepted(start):
    running = await start([call("apply_patch", input=PATCH_TEXT)])
    stream = await running.stream(PATH, {**BODY, "tools": [PATCH]})
    item = Checker().check(stream)["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH_TEXT)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    status, _ = await running.post(PATH, {**BODY, "tools": [PATCH], "input": [user, item, output]})
    assert status == 200


async def test_a_namespaced_function_keeps_its_names(start, tokenizer):
    running = await start([call("agents__close", target="1")])
    _, reply = await running.post(PATH, {**BODY, "tools": [SPACE]})
    item = reply["output"][0]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == ("agents", "close", {"target": "1"})
    history = ["hi", item, {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}]
    history[0] = {"role": "user", "content": "hi"}
    await running.post(PATH, {**BODY, "tools": [SPACE], "input": history})
    first, second = (tokenizer.decode(request.prompt) for request in running.engine.requests)
    assert '"agents__close"' in first and '"name": "agents__close"' in second


async def test_tools_that_mean_nothing_here_are_skipped_with_one_line(start, tokenizer, caplog):
    running = await start()
    with caplog.at_level("INFO", "q27app.daemon"):
        status, _ = await running.post(PATH, {**BODY, "tools": ALL_KINDS, "tool_choice": {"type": "web_search"}})
    assert status == 200
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert lines == ["tools of kinds that no local model can use are skipped: web_search, image_generation"]
    text = tokenizer.decode(running.engine.requests[0].prompt)
    assert '"look"' in text and '"apply_patch"' in text and "start: /.+/s" in text and "web_search" not in text


async def test_every_kind_of_item_can_be_replayed(start, tokenizer):
    running = await start()
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": "question"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "secret thought"}],
         "encrypted_content": None},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me look"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "p1"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "result one"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "result two"}, {"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "patch text"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": {"content": "result three", "success": True}},
        {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c4", "output": None},
        {"type": "web_search_call", "status": "completed"},
        {"type": "item_reference", "id": "x"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "something_new"},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    status, reply = await running.post(PATH, {**BODY, "instructions": "be kind", "input": items, "tools": ALL_KINDS})
    assert status == 200, reply
    text = tokenizer.decode(running.engine.requests[0].prompt)
    places = [text.index(word) for word in ("be kind", "rules", "question", "secret thought", "let me look", "p1",
                                            "result one", "{broken", "result two", "patch text", "result three",
                                            "go on")]
    assert places == sorted(places)
    assert "an image that this model cannot see" in text


async def test_a_replayed_turn_begins_like_the_turn_that_was_generated(start, tokenizer):
    """The prefix that a cache can reuse reaches over the whole generated turn."""
    generated = '<tool_call>\n{"name": "look", "arguments": {"path":"a"}}\n</tool_call>'
    running = await start([generated])
    first = {"role": "user", "content": "hi"}
    _, reply = await running.post(PATH, {**BODY, "tools": [LOOK], "input": [first]})
    result = {"type": "function_call_output", "call_id": reply["output"][0]["call_id"], "output": "seen"}
    await running.post(PATH, {**BODY, "tools": [LOOK], "input": [first, *reply["output"], result]})
    before, after = (tokenizer.decode(request.prompt) for request in running.engine.requests)
    assert after.startswith(before + generated)


async def test_the_models_list_serves_both_kinds_of_clients(start):
    running = await start()
    _, listed = await running.get("/v1/models")
    assert listed["data"][0]["id"] == listed["models"][0]["slug"] == "tiny-1"
    entry = listed["models"][0]
    shape = {
        "display_name": str, "supported_reasoning_levels": list, "shell_type": str, "visibility": str,
        "supported_in_api": bool, "priority": int, "base_instructions": str, "support_verbosity": bool,
        "truncation_policy": dict, "supports_parallel_tool_calls": bool, "context_window": int,
        "experimental_supported_tools": list, "input_modalities": list,
    }
    assert {key: type(entry[key]) for key in shape} == shape
    assert entry["apply_patch_tool_type"] == "freeform" and entry["context_window"] == running.engine.max_context


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "oracle", "content": "x"}]}, "oracle"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input_image"),
        ({"tools": [{"type": 7}]}, "tools[0].type must be a string"),
        ({"tools": [{"type": "custom", "name": 7}]}, "tools[0].name must be a string"),
        ({"tools": [LOOK, LOOK]}, "look"),
        ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "nothing"}}, "nothing"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom", "name": "look"}}, "look"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_a_bad_request_names_the_field(start, change, blamed):
    running = await start()
    for stream in (False, True):
        status, reply = await running.post(PATH, {**BODY, **change, "stream": stream})
        assert status == 400
        assert set(reply["error"]) == {"message", "type", "param", "code"} and blamed in reply["error"]["message"]
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("choice", "offered", "required"),
    [
        ("auto", ["look", "apply_patch"], False),
        ("none", [], False),
        ({"type": "function", "name": "look"}, ["look"], True),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}, ["look"], False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "name":
          "apply_patch"}, {"type": "web_search"}]}}, ["apply_patch"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, [], False),
    ],
)
async def test_a_tool_choice_decides_what_is_offered(start, tokenizer, choice, offered, required):
    running = await start([call("look", path="a")[len("<tool_call>\n") if required else 0 :]])
    await running.post(PATH, {**BODY, "tools": ALL_KINDS[:2], "tool_choice": choice})
    text = tokenizer.decode(running.engine.requests[0].prompt)
    assert [name for name in ("look", "apply_patch") if f'"{name}"' in text] == offered


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_codex_knows(start):
    running = await start(max_context=100)
    status, reply = await running.post(PATH, {**BODY, "input": "x" * 500, "stream": True})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


async def test_logprobs_come_when_they_are_included(start):
    running = await start(["ab"])
    body = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    _, reply = await running.post(PATH, body)
    entries = reply["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"] and entries[0]["logprob"] == -0.25
    assert Checker().check(await running.stream(PATH, body))["output"][0]["content"][0]["logprobs"] == entries
