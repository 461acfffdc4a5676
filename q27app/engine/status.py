"""What may be asked about the engine from any thread: plain values, ready for JSON, no text of anybody."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from q27app.engine.request import FinishReason, TokenEvent
from q27app.engine.sequence import Sequence
from q27app.errors import Q27Error


@dataclass
class Counters:
    """Totals since the engine was made. requests, refusals: taken, and turned away by a full queue. prompt_tokens: computed
    ones; cached, drafted and accepted tokens are added when a request ends."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    errors: int = 0
    cancels: int = 0
    refusals: int = 0
    loads: int = 0


class Rate:
    """Things a second over the last `window_s` seconds. Not thread-safe."""

    def __init__(self, window_s: float = 5.0) -> None:
        self.window_s = window_s
        self._entries: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """Entries closer than a fiftieth of the window are joined, so there are few."""
        if self._entries and now - self._entries[-1][0] < self.window_s / 50:
            since, before = self._entries.pop()
            self._entries.append((since, before + count))
        else:
            self._entries.append((now, count))
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        if not self._entries:
            return 0.0
        span = max(now - self._entries[0][0], self.window_s / 5)
        return sum(count for _, count in self._entries) / span

    def _forget(self, now: float) -> None:
        while self._entries and now - self._entries[0][0] > self.window_s:
            self._entries.popleft()


@dataclass(frozen=True)
class EngineStatus:
    """state: unloaded, loading, ready, failed, draining, closed. load_progress: 0 to 1. error: why it failed.

    running: one dict for each request that holds a slot (`Sequence.describe`). counters: `Counters`. rates: prefill and
    decode tokens a second lately. drafts: what was drafted and accepted by source and depth, and measured prices.
    heartbeat_age_s: since the engine thread last showed that it is alive."""

    state: str = "unloaded"
    load_progress: float = 0.0
    error: Q27Error | None = None
    model: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    running: list[dict[str, Any]] = field(default_factory=list)
    waiting: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    """The prefix cache: snapshots, hits by kind, misses by reason, tokens reused."""
    heartbeat_age_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same, for json.dumps: the error as its text."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"error": None if self.error is None else str(self.error)}


class Meter:
    """Counters and rates of an engine. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()
        self._prefill = Rate()
        self._decode = Rate()
        self._request_s = 0.0

    def count_request(self, is_refused: bool = False) -> None:
        with self._lock:
            self._counters.requests += not is_refused
            self._counters.refusals += is_refused

    def count_load(self) -> None:
        with self._lock:
            self._counters.loads += 1

    def count_pass(self, is_prefill: bool, num_rows: int) -> None:
        with self._lock:
            self._counters.steps += 1
            if is_prefill:
                self._counters.prompt_tokens += num_rows
                self._prefill.add(num_rows, time.monotonic())

    def count_event(self, sequence: Sequence, event: TokenEvent) -> None:
        if sequence.request.is_background or (not event.tokens and event.finish is None):
            return
        with self._lock:
            now, counters = time.monotonic(), self._counters
            if event.tokens:
                counters.generated_tokens += len(event.tokens)
                self._decode.add(len(event.tokens), now)
            if event.finish is not None:
                counters.cached_tokens += sequence.num_cached
                counters.drafted_tokens += sequence.num_drafted
                counters.accepted_tokens += sequence.num_accepted
                counters.errors += event.finish is FinishReason.ERROR
                counters.cancels += event.finish is FinishReason.CANCELLED
                seconds = now - sequence.submitted_at
                self._request_s = seconds if not self._request_s else 0.8 * self._request_s + 0.2 * seconds

    def request_seconds(self) -> float:
        """How long a request took lately, from submit to its end, smoothed."""
        with self._lock:
            return self._request_s

    def counters(self) -> dict[str, int]:
        with self._lock:
            return asdict(self._counters)

    def rates(self) -> dict[str, float]:
        with self._lock:
            now = time.monotonic()
            return {"prefill_tokens_per_s": round(self._prefill.per_second(now), 2),
                    "decode_tokens_per_s": round(self._decode.per_second(now), 2)}
