"""The cards and the host as /status and /metrics show them: read in a worker thread, at most once a second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor

MAX_AGE_S = 1.0


class Machine:
    """Owner of the latest snapshot. `latest` is what `snapshot` gave last: {"gpus": [...], "host": {...}}."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = asyncio.Lock()
        self._read_at = -MAX_AGE_S
        self.latest: dict[str, Any] = {"gpus": [], "host": {}}

    async def snapshot(self) -> dict[str, Any]:
        """A snapshot that is at most MAX_AGE_S old; several callers share one reading."""
        async with self._lock:
            if time.monotonic() - self._read_at >= MAX_AGE_S:
                self.latest = await asyncio.get_running_loop().run_in_executor(self._executor, _read)
                self._read_at = time.monotonic()
        return self.latest


def _read() -> dict[str, Any]:
    from q27app.gpu import read_gpus, read_host

    return {"gpus": [asdict(card) for card in read_gpus()], "host": asdict(read_host())}
