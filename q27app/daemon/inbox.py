"""The one-way street from the engine thread to the loop: a bounded queue of one request's events.

The engine thread never waits. Events that arrive while the loop is busy are taken together at the next wake-up;
progress events replace each other. A reader that falls more than `MAX_BACKLOG` tokens behind is given up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from q27app.engine.request import TokenEvent

MAX_BACKLOG = 32_768
"""Tokens that may wait for a slow reader."""


class Inbox:
    """Made on the loop; `deliver` belongs to the engine thread, everything else to the loop.

    on_overflow: called once, on the loop, when the reader is given up.
    """

    def __init__(self, max_backlog: int = MAX_BACKLOG, on_overflow: Callable[[], None] = lambda: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []
        self._num_tokens = 0
        self._max_backlog = max_backlog
        self._on_overflow = on_overflow
        self.has_overflowed = False

    def deliver(self, event: TokenEvent) -> None:
        """Engine thread. Bounded time, never blocks on the loop."""
        with self._lock:
            was_empty = not self._events
            overflows = not self.has_overflowed and self._num_tokens + len(event.tokens) > self._max_backlog
            self.has_overflowed |= overflows
            if self._is_progress(event) and self._events and self._is_progress(self._events[-1]):
                self._events[-1] = event
            elif not self.has_overflowed or event.finish is not None:
                self._events.append(event)
                self._num_tokens += len(event.tokens)
        try:
            if was_empty:
                self._loop.call_soon_threadsafe(self._wake.set)
            if overflows:
                self._loop.call_soon_threadsafe(self._on_overflow)
        except RuntimeError:
            return  # the loop has closed: nobody waits any more

    async def take(self, timeout_s: float) -> list[TokenEvent]:
        """Everything that has arrived, after waiting for something; [] after `timeout_s`. 0 or less: does not wait."""
        if not self._events and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        with self._lock:
            events, self._events = self._events, []
            self._num_tokens = 0
            self._wake.clear()
        return events

    @staticmethod
    def _is_progress(event: TokenEvent) -> bool:
        return event.finish is None and not event.tokens
