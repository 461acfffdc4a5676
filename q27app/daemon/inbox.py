"""The one-way street from the engine thread to the loop: a bounded queue of one request's events.

The engine thread never waits. Events that arrive while the loop is busy are taken together at the next wake-up;
progress events replace each other. A reader that falls more than `MAX_BACKLOG` tokens behind is given up. One step of the
engine brings events for many requests: one `Bell` wakes the loop once for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from q27app.engine.request import TokenEvent

log = logging.getLogger("q27app.daemon")

MAX_BACKLOG = 32_768
"""Tokens that may wait for a slow reader."""


class Bell:
    """Made on the loop that it rings. `ring` belongs to any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._due: list[Callable[[], None]] = []

    def ring(self, call: Callable[[], None]) -> None:
        """Have `call` called on the loop, soon. After the loop's end: nothing happens, nobody waits any more."""
        with self._lock:
            is_first = not self._due
            self._due.append(call)
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return

    def _answer(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for call in due:
            try:
                call()
            except Exception:   # the others wait too
                log.exception("an answer's receiver failed")


class Inbox:
    """Made on the loop; `deliver` belongs to the engine thread, everything else to the loop.

    on_overflow: called once, on the loop, when the reader is given up. bell: shared by the inboxes of a loop; None: its
    own.
    """

    def __init__(
        self, max_backlog: int = MAX_BACKLOG, on_overflow: Callable[[], None] = lambda: None, bell: Bell | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell = bell or Bell()
        self._waiter: asyncio.Future[None] | None = None
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
        if was_empty and self._waiter is not None:
            self._bell.ring(self._wake)
        if overflows:
            self._bell.ring(self._on_overflow)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float) -> list[TokenEvent]:
        """Everything that has arrived, after waiting for something; [] after `timeout_s`. 0 or less: does not wait."""
        if timeout_s > 0 and not self._events:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                if not self._events:  # none has come while nobody was known to wait
                    await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        with self._lock:
            events, self._events = self._events, []
            self._num_tokens = 0
        return events

    @staticmethod
    def _is_progress(event: TokenEvent) -> bool:
        return event.finish is None and not event.tokens


def joined(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """The same with the tokens of several steps in one event, as if one step had brought them. Order is kept for each
    request; an event that ends one stays by itself."""
    result: list[TokenEvent] = []
    runs: dict[str, list[TokenEvent]] = {}
    for event in events:
        run = runs.setdefault(event.request_id, [])
        if event.tokens and event.finish is None and event.prompt_logits is None:
            run.append(event)
            continue
        result += _one(runs.pop(event.request_id))
        result.append(event)
    return [*result, *(event for run in runs.values() for event in _one(run))]


def _one(run: list[TokenEvent]) -> list[TokenEvent]:
    if len(run) < 2:
        return run
    tokens = tuple(token for event in run for token in event.tokens)
    logprobs = tuple(entry for event in run for entry in event.logprobs)
    forced = tuple(flag for event in run for flag in (*event.forced, *[False] * (len(event.tokens) - len(event.forced))))
    return [replace(run[-1], tokens=tokens, forced=forced, logprobs=logprobs)]
