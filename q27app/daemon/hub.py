"""What happens in the daemon, told to whoever listens on /admin/events: log lines and request milestones.

Owner: the loop. `publish` may be called from any thread. Listeners have bounded queues; one that reads too slowly loses
the oldest events and learns how many. No event carries text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

QUEUE_LENGTH = 1_000
HISTORY_LENGTH = 200
MAX_LISTENERS = 32
MAX_LINE = 4_000


class Hub:
    """Publishes events to listeners and keeps the latest for those who come later."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)
        self._listeners: set[_Listener] = set()
        self._count = 0

    def open(self) -> None:
        """Bind to the running loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every listener's iteration."""
        for listener in list(self._listeners):
            listener.end()
        self._loop = None

    @property
    def is_full(self) -> bool:
        return len(self._listeners) >= MAX_LISTENERS

    def publish(self, event: str, **fields: Any) -> None:
        """Any thread. Before `open` and after `close` events are dropped."""
        loop, record = self._loop, {"event": event, "time": time.time(), **fields}
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._deliver, record)
            except RuntimeError:
                return  # the loop has closed: nobody is left to listen

    def _deliver(self, record: dict[str, Any]) -> None:
        self._count += 1
        record["number"] = self._count
        self._history.append(record)
        for listener in self._listeners:
            listener.put(record)

    async def listen(self, interval_s: float) -> AsyncIterator[dict[str, Any] | None]:
        """History first, then events as they come; None after `interval_s` of silence."""
        listener = _Listener(self._history)
        self._listeners.add(listener)
        try:
            async for record in listener.iterate(interval_s):
                yield record
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self, history: deque[dict[str, Any]]) -> None:
        self._queue: deque[dict[str, Any]] = deque(history)
        self._wake = asyncio.Event()
        self._num_lost = 0
        self._is_ended = False

    def put(self, record: dict[str, Any]) -> None:
        if len(self._queue) >= QUEUE_LENGTH:
            self._queue.popleft()
            self._num_lost += 1
        self._queue.append(record)
        self._wake.set()

    def end(self) -> None:
        self._is_ended = True
        self._wake.set()

    async def iterate(self, interval_s: float) -> AsyncIterator[dict[str, Any] | None]:
        while True:
            while self._queue:
                if self._num_lost:
                    lost, self._num_lost = self._num_lost, 0
                    yield {"event": "lost", "time": time.time(), "count": lost}
                yield self._queue.popleft()
            if self._is_ended:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            except TimeoutError:
                yield None


class HubHandler(logging.Handler):
    """Passes log records of the package on as events of kind "log"."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(logging.INFO)
        self._hub = hub

    def emit(self, record: logging.LogRecord) -> None:
        self._hub.publish(
            "log", level=record.levelname.lower(), logger=record.name, message=record.getMessage()[:MAX_LINE]
        )
