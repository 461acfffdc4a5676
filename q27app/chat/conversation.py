"""What a request's messages mean to any template: leading system text, then turns in order.

Clients send orders of messages that the official templates refuse. They are settled here, so that no client can make
a template fail: leading system messages become one system text, later ones stay in place and are marked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from q27app.chat.types import (
    ChatRequest, Message, ReasoningPart, TextPart, Tool, ToolCall, ToolCallPart, ToolChoice, ToolResultPart,
)

log = logging.getLogger("q27app.chat")

BILLING_HEADER = "x-anthropic-billing-header:"
_BILLING_REACH = 160
_BILLING_STAMP = re.compile(r"cch=([^;]{1,16});")
_BILLING_VERSION = re.compile(r"cc_version=((?:[^.;]*\.){3})([^;]*);")


@dataclass(frozen=True)
class Turn:
    """One message as the official templates know them: a user message with tool results becomes several.

    reasoning: None if the message carried none. is_query: a user turn in which a person asks something, as opposed to
    text that a client put beside tool results.
    """

    role: str
    text: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    is_query: bool = True


def offered_tools(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that the model is told of and may call."""
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in tools if not choice.names or tool.name in choice.names)


def is_tool_forced(request: ChatRequest) -> bool:
    """True if the answer must begin with a call; reasoning is off then."""
    return request.tool_choice.mode == "required" and bool(offered_tools(request.tools, request.tool_choice))


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def reasoning_of(message: Message) -> str | None:
    parts = [part.text for part in message.parts if isinstance(part, ReasoningPart)]
    return "".join(parts) if parts else None


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(part.call for part in message.parts if isinstance(part, ToolCallPart))


def split_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The leading system messages as one text (None if there are none) and the messages after them."""
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    if not count:
        return None, messages
    texts = [text_of(message) for message in messages[:count]]
    return normalize_billing_header("\n\n".join(text for text in texts if text)), messages[count:]


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The messages after the system text as turns."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(Turn("assistant", text_of(message), reasoning_of(message), calls_of(message)))
        elif any(isinstance(part, ToolResultPart) for part in message.parts):
            turns.extend(_result_turns(message))
        else:
            turns.append(Turn(message.role, text_of(message)))
    return turns


def _result_turns(message: Message) -> list[Turn]:
    """A message with tool results: one tool turn each, other text in place as a user turn that asks nothing."""
    turns: list[Turn] = []
    texts: list[str] = []

    def flush() -> None:
        text = "".join(texts)
        texts.clear()
        if text.strip():
            turns.append(Turn("user", text, is_query=False))

    for part in message.parts:
        if isinstance(part, ToolResultPart):
            flush()
            turns.append(Turn("tool", part.text))
        elif isinstance(part, TextPart):
            texts.append(part.text)
    flush()
    return turns


def mark_late_system(text: str) -> str:
    """System text from the middle of a conversation, as a user turn's text that says what it is."""
    return f"<system-reminder>\n{text.strip()}\n</system-reminder>"


def normalize_billing_header(text: str) -> str:
    """Makes the stamps of Claude Code's first system line constant, length unchanged.

    They differ from request to request and stand before everything else, so no prompt would ever begin like another.
    Text that does not begin with the header is returned as it is.
    """
    if not text.startswith(BILLING_HEADER):
        return text
    stamp = _BILLING_STAMP.search(text, 0, _BILLING_REACH + 32)
    if stamp and stamp.start() <= _BILLING_REACH:
        text = f"{text[: stamp.start(1)]}{'f' * len(stamp.group(1))}{text[stamp.end(1) :]}"
    version = _BILLING_VERSION.search(text, 0, _BILLING_REACH + 96)
    has_version = version is not None and version.start() <= _BILLING_REACH and len(version[1] + version[2]) <= 64
    if has_version:
        text = f"{text[: version.start(2)]}{'f' * len(version.group(2))}{text[version.end(2) :]}"
    if not (stamp or has_version):
        log.warning("the billing header has no stamp of a known form; prompts may not share a prefix")
    return text
