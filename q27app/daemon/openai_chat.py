"""The OpenAI Chat Completions dialect: POST /v1/chat/completions.

A stream: a role delta first, then reasoning_content, content and tool_calls deltas in generation order, one chunk with
the finish reason, the usage chunk if it was asked for, [DONE].
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from q27app.chat.types import (
    ChatRequest,
    Delta,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    Usage,
)
from q27app.daemon import fields
from q27app.daemon.answer import Answer, CallBlock
from q27app.daemon.identity import Identity
from q27app.daemon.sse import COMMENT, DONE, data
from q27app.errors import BadRequest

NAME = "chat"
FINISH_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "stop_sequence": "stop"}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


def parse(body: fields.Object) -> ChatRequest:
    """The request in a body. Raises BadRequest naming the field. Unknown fields are ignored."""
    fields.refuse_unsupported(body)
    messages = tuple(_message(raw, f"messages[{index}]") for index, raw in enumerate(fields.messages_of(body)))
    tools = tuple(_tools(body))
    max_tokens = fields.integer(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer(body, "max_tokens")
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        thinking=fields.thinking(body),
        sampling=fields.sampling(body, max_tokens, _logprobs(body)),
        stop=fields.stop_strings(body, "stop"),
        stream=fields.boolean(body, "stream") or False,
        include_usage=wants_usage(body),
        model=fields.string(body, "model") or "",
        answer_schema=fields.answer_schema(body.get("response_format"), "response_format"),
        num_choices=fields.num_choices(body),
        dialect=NAME,
    )


def wants_usage(body: fields.Object) -> bool:
    """stream_options.include_usage: absent, null or a boolean inside an object."""
    options = body.get("stream_options")
    if options is None:
        return False
    wish = options.get("include_usage") if isinstance(options, dict) else 0
    if not isinstance(wish, (bool, type(None))):
        raise BadRequest("stream_options: expected an object with a boolean include_usage.", param="stream_options")
    return bool(wish)


def _logprobs(body: fields.Object) -> int | None:
    if not fields.boolean(body, "logprobs"):
        return None
    count = fields.integer(body, "top_logprobs") or 0
    if not 0 <= count <= fields.MAX_LOGPROBS:
        raise BadRequest(f"top_logprobs: {count} is outside 0 to {fields.MAX_LOGPROBS}.", param="top_logprobs")
    return count


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where}: expected an object, found {fields.kind_of(raw)}.", param=where)
    name = raw.get("role")
    role = "user" if name is None else _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRequest(
            f"{where}.role: {str(name)[:80]!r} is not a role; expected system, developer, user, assistant or tool.",
            param=f"{where}.role",
        )
    text = fields.content_text(raw.get("content"), f"{where}.content", _TEXT_PARTS, role == "tool")
    if role == "tool":
        return Message("tool", (ToolResultPart(text, fields.string(raw, "tool_call_id") or ""),))
    parts: list[Part] = []
    if role == "assistant":
        reasoning = raw.get("reasoning_content", raw.get("reasoning"))
        if reasoning:
            parts.append(ReasoningPart(fields.content_text(reasoning, f"{where}.reasoning_content", _TEXT_PARTS)))
        calls = raw.get("tool_calls")
        later = [ToolCallPart(call) for item in (calls if isinstance(calls, list) else []) if (call := _call(item))]
        parts += ([TextPart(text)] if text or not later else []) + later
    else:
        parts.append(TextPart(text))
    return Message(role, tuple(parts))  # type: ignore[arg-type]


def _call(item: Any) -> ToolCall | None:
    function = fields.mapping(item, "function") if isinstance(item, dict) else {}
    name = fields.string(function, "name")
    if not name:
        return None
    raw = function.get("arguments")
    arguments: dict[str, Any] | str = raw if isinstance(raw, (dict, str)) else {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (ValueError, RecursionError):
            pass  # the template prints the text as it is, so that no turn is lost
    return ToolCall(fields.string(item, "id") or "", name, arguments)


def _tools(body: fields.Object) -> list[Tool]:
    tools = []
    for index, raw in enumerate(fields.declared_tools(body)):
        function = fields.mapping(raw, "function") if isinstance(raw, dict) and raw.get("type") == "function" else {}
        name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
        is_sound = (
            isinstance(name, str)
            and name
            and isinstance(description, (str, type(None)))
            and isinstance(parameters, (dict, type(None)))
        )
        if is_sound:
            fields.check_schema(raw, f"tools[{index}]")
            tools.append(Tool(name, description or "", parameters or {}, raw))
    return tools


def _tool_choice(body: fields.Object, tools: tuple[Tool, ...]) -> ToolChoice:
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, (bool, type(None))):
        raise BadRequest("parallel_tool_calls: expected a boolean.", param="parallel_tool_calls")
    mode, names = _mode_and_names(body.get("tool_choice"))
    missing = [name for name in names if name not in {tool.name for tool in tools}]
    if missing:
        raise BadRequest(f"tool_choice: tools declares no function {missing[0][:80]!r}.", param="tool_choice")
    if mode == "required" and not tools:
        raise BadRequest("tool_choice: a call is required, but tools declares no function.", param="tool_choice")
    return ToolChoice(mode, names, parallel is not False)  # type: ignore[arg-type]


def _mode_and_names(raw: Any) -> tuple[str, tuple[str, ...]]:
    if raw is None or isinstance(raw, str):
        return (raw if raw in ("none", "required") else "auto"), ()
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind == "function":
        name = fields.string(fields.mapping(raw, "function"), "name")
        if name:
            return "required", (name,)
    if kind == "allowed_tools":
        allowed = fields.mapping(raw, "allowed_tools")
        entries = allowed.get("tools")
        names = [
            fields.string(fields.mapping(entry, "function"), "name") if isinstance(entry, dict) else None
            for entry in (entries if isinstance(entries, list) else [])
        ]
        if allowed.get("mode") in ("auto", "required") and names and all(names):
            return allowed["mode"], tuple(names)  # type: ignore[arg-type]
    raise BadRequest(
        "tool_choice: expected auto, none, required, a function with a name, or allowed_tools with a mode "
        "and a list.",
        param="tool_choice",
    )


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "reasoning_tokens": usage.num_reasoning,
    }


def _call_object(block: CallBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}


def render(identity: Identity, answer: Answer) -> dict[str, Any]:
    """The reply to a request without stream."""
    answers = [answer, *answer.others]
    return {
        "id": f"chatcmpl-{identity.id}",
        "object": "chat.completion",
        "created": identity.created,
        "model": identity.model,
        "choices": [_choice(index, each) for index, each in enumerate(answers)],
        "usage": usage_of(summed([each.usage for each in answers])),
    }


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    text, calls = answer.text, answer.calls
    message: dict[str, Any] = {"role": "assistant", "content": text if text.strip() or not calls else None}
    if calls:
        message["tool_calls"] = [_call_object(block) for block in calls]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {
        "index": index,
        "message": message,
        "finish_reason": FINISH_REASONS[answer.finish],
        "logprobs": {"content": answer.logprobs} if answer.logprobs else None,
    }


def summed(usages: list[Usage], num_choices: int | None = None) -> Usage:
    """Of all answers to a request, in order. num_choices: how many belong to each prompt; None: all to one.

    Each usage counts the prompts of the whole request; what was reused of a prompt counts once.
    """
    size = num_choices or len(usages)
    return Usage(
        usages[0].num_prompt,
        sum(max(usage.num_cached for usage in usages[at : at + size]) for at in range(0, len(usages), size)),
        sum(usage.num_generated for usage in usages),
        sum(usage.num_reasoning for usage in usages),
    )


async def events(identity: Identity, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
    """The stream, chunk by chunk. It ends when every answer has."""
    count = identity.chat.num_choices
    calls = [_Calls() for _ in range(count)]
    usages: list[Usage] = []
    async for delta in deltas:
        index = delta.index
        if delta.kind == "start":
            for each in range(count):
                yield _chunk(identity, each, {"role": "assistant", "content": ""})
        elif delta.kind == "ping":
            yield COMMENT
        elif delta.kind == "reasoning":
            yield _chunk(identity, index, {"reasoning_content": delta.text})
        elif delta.kind == "text":
            yield _chunk(identity, index, {"content": delta.text}, logprobs=delta.logprobs)
        elif delta.kind == "finish":
            yield _chunk(identity, index, {}, FINISH_REASONS[delta.finish or "stop"])
            usages.append(delta.usage or Usage())
        else:
            entry = calls[index].feed(delta)
            if entry is not None:
                yield _chunk(identity, index, {"tool_calls": [entry]})
        if len(usages) == count:
            if identity.include_usage:
                yield data({**_envelope(identity), "choices": [], "usage": usage_of(summed(usages))})
            yield DONE
            return


class _Calls:
    """Numbers the calls of a stream and turns their deltas into tool_calls entries."""

    def __init__(self) -> None:
        self._index = -1
        self._has_arguments = False

    def feed(self, delta: Delta) -> dict[str, Any] | None:
        call = delta.call
        assert call is not None
        if delta.kind == "tool_start":
            self._index, self._has_arguments = self._index + 1, False
            return {
                "index": self._index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": ""},
            }
        text = delta.text
        if delta.kind == "tool_args":
            self._has_arguments = True
        elif self._has_arguments:
            return None
        else:
            text = CallBlock(call.id, call.name, parsed=call.arguments).arguments
        return {"index": self._index, "function": {"arguments": text}}


def _envelope(identity: Identity) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{identity.id}",
        "object": "chat.completion.chunk",
        "created": identity.created,
        "model": identity.model,
    }


def _chunk(
    identity: Identity,
    index: int,
    delta: dict[str, Any],
    finish: str | None = None,
    logprobs: tuple[dict[str, Any], ...] = (),
) -> bytes:
    choice = {
        "index": index,
        "delta": delta,
        "finish_reason": finish,
        "logprobs": {"content": list(logprobs)} if logprobs else None,
    }
    chunk = {**_envelope(identity), "choices": [choice]}
    if identity.include_usage:
        chunk["usage"] = None
    return data(chunk)
