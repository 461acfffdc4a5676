"""Who an answer is: what every dialect puts at the head of its reply."""

from __future__ import annotations

from dataclasses import dataclass, field

from q27app.chat.types import ChatRequest


@dataclass(frozen=True)
class Identity:
    """id: unique across restarts, without the dialect's prefix. model: the name that the client asked for.
    created: Unix seconds. include_usage: whether an OpenAI stream ends with a usage chunk. chat: what was asked."""

    id: str
    model: str
    created: int
    include_usage: bool = False
    chat: ChatRequest = field(default_factory=ChatRequest)
