"""Asks the daemon for its state once an interval and listens to its events; keeps two minutes of history.

Owner: the app's loop. A failed question never loses what is known: `snapshot` stays, `failure` says why and `age_s` how old it
is, and the next question comes after 1, 2, 4, then every 5 seconds. Answers never queue up: one question is out at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from q27app.errors import Forbidden, NotFound, Q27Error, Unauthorized
from q27app.tui.snapshot import Snapshot, clean, count, number

INTERVAL_S = 1.0
BACKOFF_S = (1.0, 2.0, 4.0, 5.0)
HISTORY_LENGTH = 120
MAX_EVENTS = 500


class Trends:
    """The last HISTORY_LENGTH figures of each kind, one a second; None where there was none."""

    NAMES = ("decode", "prefill", "load", "power", "memory")

    def __init__(self) -> None:
        self._figures: dict[str, deque[float | None]] = {name: deque(maxlen=HISTORY_LENGTH) for name in self.NAMES}

    def __getitem__(self, name: str) -> list[float | None]:
        return list(self._figures[name])

    def add(self, snapshot: Snapshot) -> None:
        card: Mapping[str, Any] = snapshot.cards[0] if snapshot.cards else {}
        values = {
            "decode": number(snapshot.rates, "decode_tokens_per_s"),
            "prefill": number(snapshot.rates, "prefill_tokens_per_s"),
            "load": number(card, "utilization_percent") if card else number(snapshot.host, "cpu_percent"),
            "power": number(card, "power_w"),
            "memory": number(card, "memory_used"),
        }
        for name, value in values.items():
            self._figures[name].append(value)


class Poller:
    """client: an open `Client`. on_change: called on the loop after every answer, failure and event."""

    def __init__(self, client: Any, on_change: Callable[[], None], interval_s: float = INTERVAL_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._on_change, self._interval_s, self._clock = client, on_change, interval_s, clock
        self._wake = asyncio.Event()
        self._asked_at = clock()
        self.snapshot: Snapshot | None = None
        self.received_at = 0.0
        self.failure = ""
        self.events_failure = ""
        self.num_failures = 0
        self.trends = Trends()
        self.log: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._last_place = (0, 0.0)
        """(number, time) of the last event: a new connection tells old events again, a new daemon counts from 1."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the last answer; None if there was none."""
        return None if self.snapshot is None else self._clock() - self.received_at

    def ask_now(self) -> None:
        """Don't wait for the interval."""
        self._wake.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_events())
            while True:
                await self.ask()
                delay = self._interval_s
                if self.num_failures:
                    delay = BACKOFF_S[min(self.num_failures, len(BACKOFF_S)) - 1]
                self._wake.clear()
                try:
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def ask(self) -> None:
        """One question."""
        try:
            raw = await self._client.status()
        except Q27Error as error:
            self.failure = clean(error.message, 400)
            self.num_failures += 1
        else:
            self.snapshot, self.received_at = Snapshot(raw), self._clock()
            self.failure, self.num_failures = "", 0
            self.trends.add(self.snapshot)
        self._on_change()

    async def _follow_events(self) -> None:
        while True:
            try:
                async for event in self._client.events():
                    self.events_failure = ""
                    self.take_event(event)
            except (Unauthorized, Forbidden, NotFound) as error:
                self.events_failure = clean(error.message, 400)
                self._on_change()
                await asyncio.sleep(30.0)
            except Q27Error as error:
                self.events_failure = clean(error.message, 400)
            await asyncio.sleep(BACKOFF_S[-1] if self.num_failures else BACKOFF_S[0])

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Keep an event, unless it is one that a new connection tells again."""
        place = count(event, "number"), number(event, "time") or 0.0
        if place[0] <= self._last_place[0] and place[1] <= self._last_place[1]:
            return
        self._last_place = place
        kind = event.get("event")
        if kind == "request":
            self.recent.append(dict(event))
        elif kind == "log":
            self.log.append(dict(event))
        elif kind == "lost":
            self.log.append({"time": event.get("time"), "level": "warning",
                             "message": f"{count(event, 'count')} events were lost: this listener was too slow."})
        self._on_change()
