"""The Anthropic Messages dialect: POST /v1/messages and /v1/messages/count_tokens.

Block order in a stream: indices 0, 1, 2... without gaps; start, deltas, stop for each; a thinking block ends with a
signature; a call's arguments come only as input_json_delta; an answer without anything has one empty text block.
"""

from __future__ import annotations

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
from q27app.daemon.sse import event
from q27app.errors import BadRequest

NAME = "messages"
SIGNATURE = "q27app-local"
"""Thinking blocks carry it because clients drop those without one; any signature is accepted back."""
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
}
_IMAGES = ("image", "document", "audio", "video", "file")


def parse(body: fields.Object) -> ChatRequest:
    """The request in a body. Raises BadRequest naming the field. Unknown fields and betas are ignored."""
    messages = _system(body.get("system"))
    for index, raw in enumerate(fields.messages_of(body)):
        message = _message(raw, f"messages[{index}]")
        if message is not None:
            messages.append(message)
    tools = tuple(_tools(body))
    return ChatRequest(
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        thinking=fields.thinking(body),
        sampling=fields.sampling(body, fields.integer(body, "max_tokens")),
        stop=fields.stop_strings(body, "stop_sequences"),
        stream=fields.boolean(body, "stream") or False,
        include_usage=True,
        model=fields.string(body, "model") or "",
        answer_schema=fields.answer_schema(
            body.get("output_format") or fields.mapping(body, "output_config").get("format"), "output_format"
        ),
        dialect=NAME,
    )


def _system(system: Any) -> list[Message]:
    if isinstance(system, str):
        text = system
    elif isinstance(system, list):
        text = "".join(_parts_text(system, "system"))
    else:
        return []
    return [Message("system", (TextPart(text),))] if text else []


def _message(raw: Any, where: str) -> Message | None:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where}: expected an object, found {fields.kind_of(raw)}.", param=where)
    role = raw.get("role")
    role = "user" if role is None else "system" if role == "developer" else role
    if role not in ("user", "assistant", "system"):
        raise BadRequest(
            f"{where}.role: {_short(role)} is not a role; expected user, assistant or system.", param=f"{where}.role"
        )
    content = raw.get("content")
    if isinstance(content, list):
        parts = [
            part
            for index, item in enumerate(content)
            if (part := _part(item, f"{where}.content[{index}]")) is not None
        ]
    else:
        parts = [TextPart(content if isinstance(content, str) else "")]
    return Message(role, tuple(parts))


def _part(item: Any, where: str) -> Part | None:
    if isinstance(item, str):
        return TextPart(item)
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    text = _text_of(item)
    if text is not None:
        return TextPart(text)
    if kind in _IMAGES:
        raise fields.not_text(kind, where)
    if kind == "thinking":
        return ReasoningPart(fields.string(item, "thinking") or "")
    if kind == "tool_use":
        arguments = item.get("input")
        call = ToolCall(
            fields.string(item, "id") or "",
            fields.string(item, "name") or "",
            arguments if isinstance(arguments, (dict, str)) else {},
        )
        return ToolCallPart(call)
    if kind == "tool_result":
        return ToolResultPart(
            _result(item.get("content")), fields.string(item, "tool_use_id") or "", fields.boolean(item, "is_error") or False
        )
    return None


def _text_of(block: fields.Object) -> str | None:
    """The text of a block that has one: text, a document given as text, a found passage, the name of a found tool."""
    kind = block.get("type")
    if kind == "text":
        return fields.string(block, "text") or ""
    if kind == "tool_reference":
        return fields.string(block, "tool_name") or ""
    if kind == "search_result":
        return "\n".join(filter(None, (fields.string(block, "title"), fields.string(block, "source"), _result(block.get("content")))))
    source = fields.mapping(block, "source")
    if kind == "document" and source.get("type") in ("text", "content"):
        text = fields.string(source, "data") or _result(source.get("content"))
        return "\n".join(filter(None, (fields.string(block, "title"), fields.string(block, "context"), text)))
    return None


def _result(content: Any) -> str:
    """What a tool has found: a string, or blocks. What is not text becomes a note."""
    if isinstance(content, str):
        return content
    blocks = [{"type": "text", "text": block} if isinstance(block, str) else block for block in (content if isinstance(content, list) else [])]
    found = [(block.get("type"), _text_of(block)) for block in blocks if isinstance(block, dict)]
    texts = [fields.unseen(kind) if text is None else text for kind, text in found if text is not None or kind in _IMAGES]
    return ("" if all(kind == "text" for kind, _ in found) else "\n").join(texts)


def _parts_text(items: list[Any], where: str) -> list[str]:
    parts = (_part(item, f"{where}[{index}]") for index, item in enumerate(items))
    return [part.text for part in parts if isinstance(part, TextPart)]


def _tools(body: fields.Object) -> list[Tool]:
    tools = []
    for index, raw in enumerate(fields.declared_tools(body)):
        name = fields.string(raw, "name") if isinstance(raw, dict) else None
        if name:
            description, parameters = (
                fields.string(raw, "description") or "",
                dict(fields.mapping(raw, "input_schema")),
            )
            fields.check_schema(parameters, f"tools[{index}].input_schema")
            function = {"name": name, "description": description, "parameters": parameters}
            tools.append(Tool(name, description, parameters, {"type": "function", "function": function}))
    return tools


def _tool_choice(body: fields.Object, tools: tuple[Tool, ...]) -> ToolChoice:
    raw = body.get("tool_choice")
    if raw is None:
        return ToolChoice()
    kind = raw.get("type") if isinstance(raw, dict) else None
    serial = raw.get("disable_parallel_tool_use") if isinstance(raw, dict) else None
    if kind not in ("auto", "none", "any", "tool") or not isinstance(serial, (bool, type(None))):
        raise BadRequest(
            "tool_choice: expected an object with type auto, none, any or tool, and a boolean "
            "disable_parallel_tool_use if any.",
            param="tool_choice",
        )
    if kind in ("auto", "none"):
        return ToolChoice(kind, parallel=not serial)
    names = (fields.string(raw, "name") or "",) if kind == "tool" else ()
    if not tools or names and names[0] not in {tool.name for tool in tools}:
        wanted = f"the tool {_short(names[0])}" if names else "a tool"
        raise BadRequest(f"tool_choice: {wanted} is required, but tools declares no such tool.", param="tool_choice")
    return ToolChoice("required", names, parallel=not serial)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def usage_of(usage: Usage) -> dict[str, int]:
    """The three input fields sum to the prompt."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
    }


def _message_object(
    identity: Identity,
    content: list[dict[str, Any]],
    usage: Usage,
    stop_reason: str | None,
    stop_sequence: str | None,
) -> dict[str, Any]:
    return {
        "id": f"msg_{identity.id}",
        "type": "message",
        "role": "assistant",
        "model": identity.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage_of(usage),
    }


def render(identity: Identity, answer: Answer) -> dict[str, Any]:
    """The reply to a request without stream."""
    content: list[dict[str, Any]] = []
    if answer.reasoning.strip():
        content.append({"type": "thinking", "thinking": answer.reasoning.strip(), "signature": SIGNATURE})
    for block in answer.blocks:
        if isinstance(block, CallBlock):
            arguments = block.parsed if isinstance(block.parsed, dict) else {}
            content.append({"type": "tool_use", "id": block.id, "name": block.name, "input": arguments})
        elif block.strip():
            content.append({"type": "text", "text": block})
    if not content:
        content.append({"type": "text", "text": answer.text})
    reply = _message_object(identity, content, answer.usage, STOP_REASONS[answer.finish], answer.stop_sequence)
    reply["usage"]["reasoning_tokens"] = answer.usage.num_reasoning
    return reply


async def events(identity: Identity, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
    """The stream, event by event."""
    blocks = _Blocks()
    async for delta in deltas:
        if delta.kind == "start":
            message = _message_object(identity, [], delta.usage or Usage(), None, None)
            yield event("message_start", {"type": "message_start", "message": message})
        elif delta.kind == "ping":
            yield event("ping", {"type": "ping"})
        elif delta.kind == "finish":
            usage = {**usage_of(delta.usage or Usage()), "reasoning_tokens": (delta.usage or Usage()).num_reasoning}
            reason = {"stop_reason": STOP_REASONS[delta.finish or "stop"], "stop_sequence": delta.stop_sequence}
            last = event("message_delta", {"type": "message_delta", "delta": reason, "usage": usage})
            yield blocks.end() + last + event("message_stop", {"type": "message_stop"})
        else:
            chunk = blocks.feed(delta)
            if chunk:
                yield chunk


class _Blocks:
    """Which content block is open. Methods return the bytes to send."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""
        self._has_arguments = False
        self._blank = ""
        """Blank text held back: a block of nothing but blanks is not opened between two others."""

    def feed(self, delta: Delta) -> bytes:
        if delta.kind == "reasoning":
            return self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""}) + self._delta(
                {"type": "thinking_delta", "thinking": delta.text}
            )
        if delta.kind == "text":
            return self._text(delta.text)
        call = delta.call
        assert call is not None
        if delta.kind == "tool_start":
            self._has_arguments = False
            return self._close() + self._open(
                "tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
        if delta.kind == "tool_args":
            self._has_arguments = True
            return self._delta({"type": "input_json_delta", "partial_json": delta.text})
        text = "" if self._has_arguments else CallBlock(call.id, call.name, parsed=call.arguments).arguments
        arguments = self._delta({"type": "input_json_delta", "partial_json": text}) if text else b""
        return arguments + self._close()

    def _text(self, text: str) -> bytes:
        if self._kind != "text":
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return b""
        return self._switch("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})

    def end(self) -> bytes:
        """Close what is open; an answer without any block gets an empty text."""
        if self._index >= 0:
            return self._close()
        blank = self._blank
        opening = self._open("text", {"type": "text", "text": ""})
        return opening + (self._delta({"type": "text_delta", "text": blank}) if blank else b"") + self._close()

    def _switch(self, kind: str, block: dict[str, Any]) -> bytes:
        return b"" if self._kind == kind else self._close() + self._open(kind, block)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._kind, self._blank = kind, ""
        return event(
            "content_block_start", {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signature = (
            self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._kind == "thinking" else b""
        )
        self._kind = ""
        return signature + event("content_block_stop", {"type": "content_block_stop", "index": self._index})
