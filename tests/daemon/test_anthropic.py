"""The Messages dialect over a socket: shapes, order, usage, errors."""

from __future__ import annotations

import json
import threading

import pytest

BODY = {"model": "claude-x", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
LOOK = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a b"}}\n</tool_call>'


def events_of(text: str) -> list[tuple[str, dict]]:
    """(name, data) of each event; pings left out."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in blocks]
    assert all(name == data["type"] for name, data in events)
    return [event for event in events if event[0] != "ping"]


async def test_a_reply_without_stream_has_the_messages_shape(start):
    running = await start(["Hel", "lo"])
    status, reply = await running.post("/v1/messages?beta=true", BODY)
    assert status == 200
    usage = reply.pop("usage")
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "content": [{"type": "text", "text": "Hello"}],
    }
    assert usage["input_tokens"] == len(running.engine.requests[0].prompt)
    assert usage["output_tokens"] == 5
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


async def test_a_stream_has_the_events_in_order(start):
    go_on = threading.Event()
    running = await start(["Hel", 0.3, go_on, "lo"])   # pings are no events of the answer
    events = events_of(await running.stream("/v1/messages", BODY, {"Hel": go_on}))
    names = [name for name, _ in events]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == len(running.engine.requests[0].prompt)
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 5


async def test_cached_tokens_are_taken_out_of_input_tokens(start):
    running = await start(["x"])
    usages = []
    for _ in range(2):
        _, reply = await running.post("/v1/messages", BODY)
        usages.append(reply["usage"])
    totals = {
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        for usage in usages
    }
    assert totals == {len(running.engine.requests[0].prompt)}
    assert usages[1]["cache_read_input_tokens"] == len(running.engine.requests[0].prompt) - 1


async def test_a_changing_stamp_in_the_system_prompt_keeps_the_prefix(start):
    running = await start(["x"])
    stamps = (
        "cc_version=9.9.9.aaa; cc_entrypoint=cli; cch=11111;",
        "cc_version=9.9.9.bbb; cc_entrypoint=cli; cch=22222;",
    )
    for stamp in stamps:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: {stamp}"},
            {"type": "text", "text": "Rules."},
        ]
        _, reply = await running.post("/v1/messages", {**BODY, "system": system})
    assert reply["usage"]["input_tokens"] == 1


async def test_reasoning_is_a_signed_thinking_block(start):
    running = await start(["why", "</think>\n\n", "so"])
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1000}}
    events = events_of(await running.stream("/v1/messages", body))
    kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert kinds == ["thinking", "text"]
    first = [data for _, data in events if data.get("index") == 0]
    assert first[-2]["delta"]["type"] == "signature_delta" and first[-2]["delta"]["signature"]
    assert first[-1]["type"] == "content_block_stop"
    _, reply = await running.post("/v1/messages", body)
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][0]["thinking"] == "why" and reply["content"][0]["signature"]
    assert reply["usage"]["reasoning_tokens"] > 0


async def test_calls_stream_as_tool_use_blocks_without_gaps(start):
    running = await start(["I look. ", CALL, CALL])
    body = {**BODY, "max_tokens": 500, "tools": [LOOK]}
    events = events_of(await running.stream("/v1/messages", body))
    starts = [(data["index"], data["content_block"]) for name, data in events if name == "content_block_start"]
    assert [index for index, _ in starts] == [0, 1, 2]
    assert [block["type"] for _, block in starts] == ["text", "tool_use", "tool_use"]
    assert starts[1][1]["input"] == {} and starts[1][1]["name"] == "look"
    assert starts[1][1]["id"] != starts[2][1]["id"]
    arguments = "".join(
        data["delta"]["partial_json"] for name, data in events if name == "content_block_delta" and data["index"] == 1
    )
    assert json.loads(arguments) == {"path": "a b"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_calls_without_stream_are_tool_use_blocks(start):
    running = await start([CALL])
    _, reply = await running.post("/v1/messages", {**BODY, "max_tokens": 500, "tools": [LOOK]})
    block = reply["content"][0]
    assert block["id"].startswith("toolu_")
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {"path": "a b"})
    assert reply["stop_reason"] == "tool_use"


async def test_an_empty_answer_has_one_empty_text_block(start):
    running = await start([])
    _, reply = await running.post("/v1/messages", BODY)
    assert reply["content"] == [{"type": "text", "text": ""}]
    events = events_of(await running.stream("/v1/messages", BODY))
    assert [name for name, _ in events[1:3]] == ["content_block_start", "content_block_stop"]


async def test_stop_sequences_cut_and_are_named(start):
    running = await start(["one ", "ST", "OP two"])
    body = {**BODY, "stop_sequences": ["STOP"]}
    _, reply = await running.post("/v1/messages", body)
    assert reply["content"][0]["text"] == "one "
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    events = events_of(await running.stream("/v1/messages", body))
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


async def test_max_tokens_is_the_stop_reason_at_the_limit(start):
    running = await start(["abcdef"])
    _, reply = await running.post("/v1/messages", {**BODY, "max_tokens": 3})
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][0]["text"] == "abc"


async def test_everything_that_coding_agents_send_is_accepted(start):
    running = await start()
    body = {
        **BODY,
        "stream": False,
        "metadata": {"user_id": "u"},
        "future_field": {"a": 1},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "reasoning_effort": "high",
        "context_management": {"edits": [{"type": "clear_thinking", "keep": "all"}]},
        "temperature": None,
        "enable_thinking": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1.5; cc_entrypoint=cli;"},
            {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "foreign"},
                    {"type": "thinking", "thinking": "y"},
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "text", "text": None},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"path": "p"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seen"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "again", "is_error": True},
                    {"type": "text", "text": "go"},
                ],
            },
            {"role": None, "content": None},
        ],
        "tools": [LOOK, {"type": "web_search_20250305", "name": "web_search"}, {"no": "name"}, None],
    }
    status, reply = await running.post(
        "/v1/messages?beta=true",
        body,
        headers={"anthropic-beta": "made-up-2099-01-01", "anthropic-version": "2023-06-01"},
    )
    assert status == 200, reply


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ({"messages": None}, "messages: Field required"),
        ({"messages": "hi"}, "messages: expected an array"),
        ({"messages": []}, "at least one message"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "'oracle'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]: image content is not supported; this model reads text only. Go back to before it",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}]}]},
            "messages[0].content[0]: document",
        ),
        ({"tool_choice": {"type": "tool", "name": "none_such"}}, "none_such"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ],
)
async def test_a_bad_request_names_the_field(start, change, blamed):
    running = await start()
    for stream in (False, True):
        status, reply = await running.post("/v1/messages", {**BODY, **change, "stream": stream})
        assert status == 400
        assert reply["type"] == "error" and reply["error"]["type"] == "invalid_request_error"
        assert blamed in reply["error"]["message"]
    assert running.engine.requests == []


PASSAGE = {"type": "search_result", "title": "Notes", "source": "notes.md", "content": [{"type": "text", "text": "by the sea"}]}
PAPER = {"type": "document", "title": "Paper", "source": {"type": "text", "media_type": "text/plain", "data": "all of it"}}


@pytest.mark.parametrize(("content", "shown"), [
    ([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}], "[an image that this model cannot see]"),
    ([{"type": "text", "text": "page 1"}, {"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}],
     "page 1\n[a file that this model cannot read]"),
    ([PAPER, PASSAGE], "Paper\nall of it\nNotes\nnotes.md\nby the sea"),
    ([{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a part"}]}}], "a part"),
    ([{"type": "tool_reference", "tool_name": "Edit"}, {"type": "tool_reference", "tool_name": "Write"}], "Edit\nWrite"),
    ([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}], "one two"),
    ([{"type": "of_the_future"}, 7, "three"], "three"),
    (None, ""),
])
async def test_a_tools_result_that_is_not_text_is_told_and_ends_no_session(start, content, shown):
    """An agent that has read a picture sends it again with each turn."""
    running = await start(["x"])
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    asked = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [call]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}]}]
    status, reply = await running.post("/v1/messages", {**BODY, "messages": asked, "tools": [LOOK]})
    assert status == 200, reply
    text = running.daemon.tokenizer.decode(running.engine.requests[-1].prompt)
    assert f"<tool_response>\n{shown}\n</tool_response>" in text


async def test_what_a_person_sends_as_a_document_of_text_is_read(start):
    running = await start(["x"])
    asked = [{"role": "user", "content": [PAPER, PASSAGE, {"type": "text", "text": "Sum it up."}]}]
    assert (await running.post("/v1/messages", {**BODY, "messages": asked}))[0] == 200
    text = running.daemon.tokenizer.decode(running.engine.requests[-1].prompt)
    assert "all of it" in text and "by the sea" in text and "Sum it up." in text


async def test_count_tokens_equals_what_a_generation_prefills(start):
    running = await start(["x"])
    body = {**BODY, "system": "Rules.", "tools": [LOOK], "thinking": {"type": "enabled", "budget_tokens": 99}}
    status, count = await running.post("/v1/messages/count_tokens?beta=true", body)
    assert status == 200
    _, reply = await running.post("/v1/messages", {**body, "max_tokens": 1})
    assert count == {"input_tokens": reply["usage"]["input_tokens"]}
    status, reply = await running.post("/v1/messages/count_tokens", {"model": "x"})
    assert (status, reply["error"]["message"]) == (400, "messages: Field required")


async def test_a_forced_call_that_does_not_come_is_an_error(start):
    running = await start(["no"])
    body = {**BODY, "tools": [LOOK], "tool_choice": {"type": "any"}}
    status, reply = await running.post("/v1/messages", body)
    assert (status, reply["error"]["type"]) == (500, "api_error")
    text = await running.stream("/v1/messages", body)
    assert "event: error" in text and "message_stop" not in text


async def test_a_forced_call_begins_inside_the_call(start):
    running = await start(['{"name": "look", "arguments": {"path": "p"}}\n</tool_call>'])
    body = {
        **BODY,
        "max_tokens": 500,
        "tools": [LOOK],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    _, reply = await running.post("/v1/messages", body)
    assert [block["type"] for block in reply["content"]] == ["tool_use"]
