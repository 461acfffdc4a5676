"""Large arrays to the device through page-locked memory: one half of it is filled, by several threads, while the other is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

THREADS = 4
SHARE = 1 << 20
"""Bytes that are worth a thread."""


class Sends(Protocol):
    """What is asked of `launch.Device`."""

    def upload_pinned(self, address: int, data: np.ndarray) -> None: ...
    def mark(self) -> Any: ...
    def wait(self, event: Any) -> None: ...


class Staging:
    """memory: page-locked, uint8, nobody else's while an upload runs. Owned by the engine thread."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self._pool: ThreadPoolExecutor | None = None

    def upload(self, device: Sends, address: int, data: np.ndarray) -> None:
        """data: uint8 [n], contiguous. Returns when it is there."""
        half = len(self.memory) // 2
        marks: list[Any] = [None, None]
        for index, start in enumerate(range(0, len(data), half)):
            turn, piece = index % 2, data[start:start + half]
            if marks[turn] is not None:
                device.wait(marks[turn])
            place = self.memory[turn * half:turn * half + len(piece)]
            self._fill(place, piece)
            device.upload_pinned(address + start, place)
            marks[turn] = device.mark()
        for mark in marks:
            if mark is not None:
                device.wait(mark)

    def _fill(self, place: np.ndarray, piece: np.ndarray) -> None:
        count = min(THREADS, len(piece) // SHARE)
        if count < 2:
            place[:] = piece
            return
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "q27app-staging")
        edges = [len(piece) * index // count for index in range(count + 1)]
        list(self._pool.map(lambda start, stop: np.copyto(place[start:stop], piece[start:stop]), edges, edges[1:]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.memory = np.empty(0, np.uint8)
