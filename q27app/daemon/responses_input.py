"""Input items of a Responses request as messages. What a client replays comes back as the turn that it was.

Reasoning, text and calls that follow each other are one assistant turn; every output of a tool is a tool turn. Items of
kinds that mean nothing to a local model (searches, references, compactions) are skipped with one log line: a refusal
would end the client's session.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from q27app.chat.types import (
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
)
from q27app.daemon import fields
from q27app.daemon.responses_tools import INPUT, joined_name
from q27app.errors import BadRequest

log = logging.getLogger("q27app.daemon")

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output")


def messages_of(body: fields.Object, tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    """`instructions` and `input` as messages. Raises BadRequest naming the item."""
    reader = _Reader(tools)
    instructions = fields.string(body, "instructions")
    if instructions:
        reader.add(Message("system", (TextPart(instructions),)))
    raw = body.get("input")
    if isinstance(raw, str):
        reader.add(Message("user", (TextPart(raw),)))
    elif isinstance(raw, list):
        if len(raw) > fields.MAX_MESSAGES:
            raise BadRequest(f"input: {len(raw)} items, at most {fields.MAX_MESSAGES} are allowed.", param="input")
        for index, item in enumerate(raw):
            reader.read(item, f"input[{index}]")
    elif raw is None and not instructions:
        raise BadRequest("input: Field required", param="input")
    elif raw is not None:
        raise BadRequest(f"input: expected a string or an array, found {fields.kind_of(raw)}.", param="input")
    messages = reader.finish()
    if not messages:
        raise BadRequest("input: nothing in it is a message.", param="input")
    return messages


class _Reader:
    """Collects messages; neighbouring parts of an assistant turn are gathered until something else comes."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self._names = {tool.wire[1:]: tool.name for tool in tools if tool.wire}
        self._messages: list[Message] = []
        self._turn: list[Part] = []
        self._skipped: list[str] = []

    def add(self, message: Message) -> None:
        if message.role == "assistant":
            self._turn += message.parts
            return
        self._flush()
        self._messages.append(message)

    def finish(self) -> tuple[Message, ...]:
        self._flush()
        if self._skipped:
            log.info("input items of these kinds are skipped: %s", ", ".join(sorted(set(self._skipped))[:16]))
        return tuple(self._messages)

    def _flush(self) -> None:
        if self._turn:
            self._messages.append(Message("assistant", tuple(self._turn)))
            self._turn = []

    def read(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: expected an object, found {fields.kind_of(item)}.", param=where)
        kind = fields.string(item, "type") or "message"
        if kind == "message":
            self.add(_message(item, where))
        elif kind == "reasoning":
            text = _reasoning(item)
            if text:
                self.add(Message("assistant", (ReasoningPart(text),)))
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self.add(Message("assistant", (ToolCallPart(self._call(kind, item)),)))
        elif kind in _OUTPUTS:
            text = _output(item.get("output"))
            self.add(Message("tool", (ToolResultPart(text, fields.string(item, "call_id") or ""),)))
        else:
            self._skipped.append(kind[:40])

    def _call(self, kind: str, item: fields.Object) -> ToolCall:
        name, namespace = fields.string(item, "name") or "", fields.string(item, "namespace") or ""
        call_id = fields.string(item, "call_id") or fields.string(item, "id") or ""
        if kind == "custom_tool_call":
            return ToolCall(call_id, self._shown(name, namespace), {INPUT: fields.string(item, "input") or ""})
        if kind == "local_shell_call":
            return ToolCall(call_id, "local_shell", dict(fields.mapping(item, "action")))
        raw = item.get("arguments")
        arguments: dict[str, Any] | str = raw if isinstance(raw, (dict, str)) else {}
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
                arguments = parsed if isinstance(parsed, dict) else arguments
            except (ValueError, RecursionError):
                pass  # the template prints the text as it is, so that no turn is lost
        return ToolCall(call_id, self._shown(name, namespace), arguments)

    def _shown(self, name: str, namespace: str) -> str:
        return self._names.get((name, namespace)) or joined_name(namespace, name)


def _message(item: fields.Object, where: str) -> Message:
    name = item.get("role")
    role = "user" if name is None else _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRequest(
            f"{where}.role: {str(name)[:80]!r} is not a role; expected user, assistant, system or developer.",
            param=f"{where}.role",
        )
    return Message(role, (TextPart(fields.content_text(item.get("content"), f"{where}.content", _TEXT)),))  # type: ignore[arg-type]


def _reasoning(item: fields.Object) -> str:
    """The text of a reasoning item: as we gave it (summary), else as others give it (content)."""
    for key in ("summary", "content"):
        parts = item.get(key)
        texts = [fields.string(part, "text") or "" for part in (parts if isinstance(parts, list) else [])
                 if isinstance(part, dict)]
        if any(texts):
            return "\n\n".join(texts)
    return ""


def _output(output: Any) -> str:
    """A tool's result: a string, a list of parts, or an object with `content`. An image or a file in it becomes a note."""
    if isinstance(output, dict) and isinstance(output.get("content"), (str, list)):
        output = output["content"]
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        texts = []
        for part in output:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict):
                kind = part.get("type", "text")
                texts.append(fields.string(part, "text") or "" if kind in _TEXT else fields.unseen(kind))
        return "\n".join(texts)
    return "" if output is None else json.dumps(output, ensure_ascii=False)
