"""Page-locked memory on the way to the device and back: slates for the small arrays of each pass, and a staging area for large
arrays, one half of which is filled or emptied, by several threads, while the other is on its way.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

THREADS = 4
SHARE = 1 << 20
"""Bytes that are worth a thread."""


class Sends(Protocol):
    """What is asked of `launch.Device`."""

    def upload_pinned(self, address: int, data: np.ndarray) -> None: ...
    def download_pinned(self, data: np.ndarray, address: int) -> None: ...
    def mark(self) -> Any: ...
    def wait(self, event: Any) -> None: ...


class Slate:
    """Page-locked memory whose contents are sent without waiting, and which is written again only when they have been."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._device, self._memory = device, device.pinned(nbytes)
        self._moment: int | None = None

    def open(self) -> np.ndarray:
        """The memory, uint8 [nbytes], to be written. What is recorded is not waited for."""
        device = self._device
        if self._moment is not None and not device.is_recording and not device.has_passed(self._moment):
            device.synchronize()
        return self._memory

    def sent(self) -> None:
        """What it holds has been sent."""
        self._moment = self._device.moment()


class Slates:
    """Two slates in turn, so that the host may prepare a pass while the one before has not begun. A recording that sends one sends that
    one whenever it is replayed: from then on there is no other, and it sends what was written last.

    It also remembers what lies on the device, so that nobody sends it twice."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._device, self._slates = device, [Slate(device, nbytes), Slate(device, nbytes)]
        self._is_recorded = False
        self._content: Hashable = None

    def holds(self, content: Hashable) -> bool:
        """Whether what was sent last was told to be this, and lies there still: a replay sends again without a word."""
        self._is_recorded = self._is_recorded or self._device.is_recording
        return not self._is_recorded and content is not None and self._content == content

    def open(self) -> np.ndarray:
        """See `Slate.open`."""
        if not self._is_recorded:
            self._slates.reverse()
        self._is_recorded, self._content = self._is_recorded or self._device.is_recording, None
        return self._slates[0].open()

    def sent(self, content: Hashable = None) -> None:
        """What it holds has been sent. content: says what lies there from now on; None: it will be changed by others."""
        self._slates[0].sent()
        self._content = content


class Copier:
    """Copies within the host's memory by several threads: one alone is slower than the way to the device."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, place: np.ndarray, piece: np.ndarray) -> None:
        """Both: uint8 [n], contiguous. Returns when it is done."""
        count = min(self._threads, len(piece) // SHARE)
        if count < 2:
            place[:] = piece
            return
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "q27app-staging")
        edges = [len(piece) * index // count for index in range(count + 1)]
        try:
            list(self._pool.map(lambda start, stop: np.copyto(place[start:stop], piece[start:stop]), edges, edges[1:]))
        except RuntimeError:   # the system gives no thread
            self._pool.shutdown(cancel_futures=True)   # nobody may write there later
            self._pool, self._threads = None, 1
            place[:] = piece

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Staging:
    """memory: page-locked, uint8, nobody else's while a copy runs. Owned by the engine thread."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self._copier = Copier()

    def upload(self, device: Sends, address: int, data: np.ndarray) -> None:
        """data: uint8 [n], contiguous. Returns when it is there."""
        half = len(self.memory) // 2
        marks: list[Any] = [None, None]
        for index, start in enumerate(range(0, len(data), half)):
            turn, piece = index % 2, data[start:start + half]
            if marks[turn] is not None:
                device.wait(marks[turn])
            place = self.memory[turn * half:turn * half + len(piece)]
            self._copier.copy(place, piece)
            device.upload_pinned(address + start, place)
            marks[turn] = device.mark()
        for mark in marks:
            if mark is not None:
                device.wait(mark)

    def download(self, device: Sends, address: int, out: np.ndarray) -> None:
        """out: uint8 [n], contiguous. Returns when it is there."""
        half = len(self.memory) // 2
        under_way: tuple[Any, np.ndarray, np.ndarray] | None = None
        for index, start in enumerate(range(0, len(out), half)):
            piece = out[start:start + half]
            place = self.memory[index % 2 * half:index % 2 * half + len(piece)]
            device.download_pinned(place, address + start)
            before, under_way = under_way, (device.mark(), piece, place)
            self._arrive(device, before)
        self._arrive(device, under_way)

    def _arrive(self, device: Sends, copy: tuple[Any, np.ndarray, np.ndarray] | None) -> None:
        if copy is not None:
            mark, piece, place = copy
            device.wait(mark)
            self._copier.copy(piece, place)

    def close(self) -> None:
        self._copier.close()
        self.memory = np.empty(0, np.uint8)
