"""Whether the model is in memory: idle unload, waking it, and exchanging it for another while the daemon runs.

Owner: the loop. A model that was unloaded because nobody asked is asleep: the next request for an answer wakes it, one load for
all who wait. One that an operator unloaded stays away until an operator loads it. Nothing else wakes: not /health, /ready,
/status, /metrics, /v1/models, nor counting tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from q27app.errors import Overloaded, Q27Error

if TYPE_CHECKING:
    from q27app.daemon.daemon import Daemon
    from q27app.engine.loading import EngineConfig

log = logging.getLogger("q27app.daemon")

POLL_S = 0.05
IDLE_POLL_S = 1.0
AGAIN_S = 10.0
"""A load that failed is not tried again so soon; who asks meanwhile gets the same error."""
MAX_RETRY_S = 60


class Residence:
    """See the module. is_asleep: unloaded, or being unloaded, because nobody asked."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.is_asleep = False
        self._used_at = time.monotonic()
        self._arrival: asyncio.Task[None] | None = None
        self._failure: tuple[float, Q27Error] | None = None
        self._exchanges = asyncio.Lock()
        self._load_s = 5.0

    def touch(self) -> None:
        """Somebody got an answer just now."""
        self._used_at = time.monotonic()

    def order(self, kind: str) -> Future:
        """An operator's "load" or "unload"."""
        self.is_asleep, self._failure = False, None
        self.touch()
        engine = self._daemon.engine
        return engine.load() if kind == "load" else engine.unload()

    async def wanted(self) -> None:
        """Wait for a model that sleeps, loads or is being exchanged, at most server.load_wait_s seconds. Returns at once if it
        is there, or if waiting would not bring it. Raises Overloaded, or the error that loading ended with."""
        if not self._must_wait():
            return
        limit = self._daemon.config.server.load_wait_s
        if self.is_asleep and self._failure is not None and time.monotonic() - self._failure[0] < AGAIN_S:
            raise self._failure[1]
        if self._arrival is None or self._arrival.done():
            self._arrival = asyncio.create_task(self._arrive())
            self._arrival.add_done_callback(_retrieved)
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self._arrival)
        except TimeoutError:
            raise Overloaded("the model is still loading.", "Try again later; /ready says when.", self._retry_s()) from None

    def _must_wait(self) -> bool:
        return self.is_asleep or self._exchanges.locked() or self._daemon.engine.status().state == "loading"

    def _retry_s(self) -> int:
        """Seconds until the load has probably ended."""
        left = self._load_s * (1.0 - self._daemon.engine.status().load_progress)
        return min(MAX_RETRY_S, max(1, round(left)))

    async def _arrive(self) -> None:
        """Until the model is there; wakes it if it sleeps."""
        started, engine = time.monotonic(), self._daemon.engine
        if self.is_asleep:
            log.info("a request wakes the model")
            try:
                await asyncio.wrap_future(engine.load())
            except Q27Error as error:
                self._failure = (time.monotonic(), error)
                raise
            self.is_asleep, self._failure, self._load_s = False, None, time.monotonic() - started
            self.touch()
        while self._exchanges.locked() or engine.status().state == "loading":
            await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        """Unload the model whenever nobody has asked for model.idle_unload seconds. Runs until it is cancelled."""
        while True:
            limit = self._daemon.config.model.idle_unload
            await asyncio.sleep(min(IDLE_POLL_S, limit / 4) if limit else IDLE_POLL_S)
            limit = self._daemon.config.model.idle_unload
            if self._daemon.active or self._daemon.engine.status().state != "ready":
                self.touch()
            elif limit and time.monotonic() - self._used_at >= limit and not self._exchanges.locked():
                log.info("nobody has asked for %.0f s: the model is unloaded; the next request loads it again", limit)
                self.is_asleep = True
                await asyncio.wrap_future(self._daemon.engine.unload())

    async def exchange(self, settings: EngineConfig, install: Callable[[], None]) -> None:
        """Load what `settings` say in place of what is loaded, once the running answers have ended; requests wait meanwhile.

        install: called when the new model is there, before anybody is let in. If it cannot be loaded, the old one is loaded again
        and the error raised. A model that is not in memory is only exchanged in name: its next load takes the settings.
        """
        engine = self._daemon.engine
        async with self._exchanges:
            before = engine.config
            if self.is_asleep or engine.status().state not in ("ready", "loading"):
                engine.reconfigure(settings)
                install()
                return
            await asyncio.wrap_future(engine.unload())
            engine.reconfigure(settings)
            try:
                await asyncio.wrap_future(engine.load())
            except Q27Error:
                engine.reconfigure(before)
                await asyncio.wrap_future(engine.load())
                raise
            install()


def _retrieved(task: asyncio.Task[None]) -> None:
    """Whoever waited has the error; nobody need have."""
    if not task.cancelled():
        task.exception()
