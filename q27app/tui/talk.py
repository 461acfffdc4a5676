"""One answer as it streams: what has come so far, and its figures. No screen, no history: `Answer` only takes pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from q27app.tui.history import Message
from q27app.tui.snapshot import clean, count, mapping

MAX_CALLS = 100
MAX_ARGUMENTS = 20_000


class Answer:
    """Takes the pieces of `Client.chat`. new_text and new_reasoning give what has come since they were asked last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.started_at = clock()
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.reasoning_ended_at: float | None = None
        self.calls: list[dict[str, str]] = []
        self.stats: dict[str, Any] = {}
        self.state = "streaming"
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._num_given = [0, 0]

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def is_empty(self) -> bool:
        return not (self._text or self._reasoning or self.calls)

    @property
    def reasoning_s(self) -> float | None:
        """How long it has thought, or did."""
        if self.first_at is None or not self._reasoning:
            return None
        return (self.reasoning_ended_at or self._clock()) - self.first_at

    @property
    def is_thinking(self) -> bool:
        return self.state == "streaming" and bool(self._reasoning) and self.reasoning_ended_at is None

    def take(self, piece: Any) -> None:
        """A `Piece`."""
        if piece.kind == "ping":
            return
        if piece.kind == "finish":
            self._end(piece)
            return
        now = self._clock()
        self.first_at = self.first_at or now
        self.last_at = now
        if piece.kind == "reasoning":
            self._reasoning.append(piece.text)
            return
        if self._reasoning and self.reasoning_ended_at is None:
            self.reasoning_ended_at = now
        if piece.kind == "text":
            self._text.append(piece.text)
        elif piece.kind == "call":
            self._take_call(piece.call or {})

    def _take_call(self, part: Mapping[str, Any]) -> None:
        index = count(part, "index")
        while len(self.calls) <= min(index, MAX_CALLS - 1):
            self.calls.append({"id": "", "name": "", "arguments": ""})
        if index < MAX_CALLS:
            call = self.calls[index]
            call["id"] = call["id"] or str(part.get("id") or "")
            call["name"] = call["name"] or str(part.get("name") or "")
            call["arguments"] += str(part.get("arguments") or "")

    def _end(self, piece: Any) -> None:
        usage = piece.usage
        num_generated = count(usage, "completion_tokens")
        span = (self.last_at or 0) - (self.first_at or 0)
        self.stats = {
            "num_prompt": count(usage, "prompt_tokens"),
            "num_generated": num_generated,
            "num_cached": count(mapping(usage, "prompt_tokens_details"), "cached_tokens"),
            "num_reasoning": count(mapping(usage, "completion_tokens_details"), "reasoning_tokens"),
            "first_token_ms": round((self.first_at - self.started_at) * 1e3) if self.first_at else None,
            "tokens_per_s": round((num_generated - 1) / span, 1) if span > 0 and num_generated > 1 else None,
            "finish": piece.finish,
        }
        self.close("done")

    def close(self, state: str, error: str = "") -> None:
        """It has ended: done, stopped or failed."""
        if self.state == "streaming":
            self.state = state
            if self.reasoning_s is not None:
                self.reasoning_ended_at = self.reasoning_ended_at or self._clock()
                self.stats["reasoning_s"] = round(self.reasoning_s, 1)
            if error:
                self.stats["error"] = error

    def news(self) -> tuple[str, str]:
        """(reasoning, text) since the last call."""
        parts = []
        for index, pieces in enumerate((self._reasoning, self._text)):
            parts.append("".join(pieces[self._num_given[index] :]))
            self._num_given[index] = len(pieces)
        return parts[0], parts[1]


def request_messages(branch: Sequence[Message], system: str) -> list[dict[str, Any]]:
    """A branch as the daemon takes it. Answers that broke off are sent as far as they came; empty ones are left out."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in branch:
        if message.role == "assistant" and message.text:
            entry: dict[str, Any] = {"role": "assistant", "content": message.text}
            if message.reasoning:
                entry["reasoning_content"] = message.reasoning
            messages.append(entry)
        elif message.role != "assistant":
            messages.append({"role": message.role, "content": message.text})
    return messages


def title_of(text: str) -> str:
    """The first words of a question."""
    line = " ".join(text.split())
    return line if len(line) <= 48 else line[:47].rsplit(" ", 1)[0] + "..."


def call_text(call: Mapping[str, Any]) -> str:
    """A tool call to read: the name, then an argument a line."""
    arguments = str(call.get("arguments") or "")[:MAX_ARGUMENTS]
    lines = [f"call {clean(call.get('name'), 80)}"]
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return "\n".join([*lines, "  " + arguments])
    if not isinstance(value, dict):
        return "\n".join([*lines, "  " + arguments])
    for name, argument in value.items():
        text = argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)
        lines.append(f"  {clean(name, 80)}: " + text.replace("\n", "\n      "))
    return "\n".join(lines)
