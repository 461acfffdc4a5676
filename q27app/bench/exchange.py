"""One streamed answer by the client's clock, whoever gives it.

What a server does not say stays None: prompt and cached tokens need `usage` in the stream, and a server without it has
its tokens counted as pieces of text (`is_counted` False), which is right for servers that send one token a piece.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from q27app.client import pieces

if TYPE_CHECKING:
    from q27app.client import Client

SAME_MOMENT_S = 0.0005
"""Pieces closer than this were sent together."""
MOST_A_MOMENT = 16
"""Tokens of one step at most: one and its drafts."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Exchange:
    """started: by time.perf_counter. arrivals: seconds after it at which text, reasoning or a call came."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    total_s: float = 0.0
    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    """index -> {"id", "name", "arguments"}"""
    finish: str = ""
    num_prompt: int | None = None
    num_cached: int | None = None
    num_tokens: int = 0
    is_counted: bool = False
    num_drafted: int | None = None
    num_accepted: int | None = None

    @property
    def first_s(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def decode_per_s(self) -> float | None:
        """Tokens a second between the first piece and the end of the stream, which may be later than the last piece: a call
        that was begun and not finished is generated and never shown. None with fewer than two tokens, or where they came at
        so few moments that the first piece does not tell when the first token was there (a call that is shown when whole)."""
        if self.num_tokens < 2 or not self.arrivals or self.total_s <= self.arrivals[0]:
            return None
        moments = 1 + sum(gap > SAME_MOMENT_S for gap in self.gaps)
        if self.num_tokens > MOST_A_MOMENT * moments:
            return None
        return (self.num_tokens - 1) / (self.total_s - self.arrivals[0])

    @property
    def prefill_per_s(self) -> float | None:
        """Computed prompt tokens a second until the first token; None where the server does not count its prompt."""
        if self.num_prompt is None or not self.first_s:
            return None
        return (self.num_prompt - (self.num_cached or 0)) / self.first_s

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def is_empty(self) -> bool:
        """It ended well and said nothing."""
        return not (self.text.strip() or self.reasoning.strip() or self.calls)

    def figures(self) -> dict[str, Any]:
        """What a journal keeps."""
        return {
            "first_s": _rounded(self.first_s), "total_s": _rounded(self.total_s), "num_prompt": self.num_prompt,
            "num_cached": self.num_cached, "num_tokens": self.num_tokens, "is_counted": self.is_counted,
            "decode_per_s": _rounded(self.decode_per_s), "prefill_per_s": _rounded(self.prefill_per_s), "finish": self.finish,
            "num_drafted": self.num_drafted, "num_accepted": self.num_accepted,
        }

    def take(self, chunk: dict[str, Any]) -> None:
        """One object of the stream."""
        now = time.perf_counter() - self.started
        for choice in chunk.get("choices") or []:
            spoken = choice.get("text") or ""
            self.text += spoken
            found = pieces(choice.get("delta") or {})
            for piece in found:
                self._add(piece)
            if spoken or found:
                self.arrivals.append(now)
            self.finish = choice.get("finish_reason") or self.finish
        self._read_usage(chunk.get("usage"))
        self._read_timings(chunk.get("timings"))

    def _add(self, piece: Any) -> None:
        if piece.kind == "text":
            self.text += piece.text
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        else:
            entry = self.calls.setdefault(piece.call["index"], {"id": "", "name": "", "arguments": ""})
            for name in entry:
                entry[name] += piece.call[name] or ""

    def _read_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        if isinstance(usage.get("prompt_tokens"), int):
            self.num_prompt = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.num_cached = details["cached_tokens"]
        if isinstance(usage.get("completion_tokens"), int):
            self.num_tokens, self.is_counted = usage["completion_tokens"], True

    def _read_timings(self, timings: Any) -> None:
        """What llama-server adds to its last object."""
        if not isinstance(timings, dict):
            return
        for name, key in (("num_cached", "cache_n"), ("num_drafted", "draft_n"), ("num_accepted", "draft_n_accepted")):
            if isinstance(timings.get(key), int):
                setattr(self, name, timings[key])

    def end(self) -> None:
        self.total_s = time.perf_counter() - self.started
        if not self.is_counted:
            self.num_tokens = len(self.arrivals)


async def ask(client: Client, body: dict[str, Any], path: str = CHAT) -> Exchange:
    """Stream an answer and time it. Raises Q27Error."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    exchange = Exchange(time.perf_counter())
    async for chunk in client.chunks(path, body):
        exchange.take(chunk)
    exchange.end()
    return exchange


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
