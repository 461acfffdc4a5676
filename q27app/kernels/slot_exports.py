"""Slots on their way to host memory, beside the passes: a copy on a stream of its own into page-locked memory, then a thread's
copy from there. The card goes on computing, and the slot is free as soon as the first copy is done.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

PLACES = 2
"""States that may be on their way."""


class SlotExport:
    """One state on its way. Owned by the engine thread."""

    def __init__(self, owner: SlotExports, place: np.ndarray, event: Any) -> None:
        self._owner, self._place, self._event = owner, place, event
        self._copied: Future[np.ndarray] | None = None

    def has_left(self) -> bool:
        """The slot may be written again."""
        if self._copied is None and self._owner.device.is_done(self._event):
            self.leave()
        return self._copied is not None

    def leave(self) -> None:
        """Wait until the slot may be written again."""
        if self._copied is None:
            self._owner.device.wait(self._event)
            self._copied = self._owner.copy(self._place)

    def data(self) -> np.ndarray:
        """uint8 [slot_bytes]; waits. Raises MemoryError if the system gave no memory for it."""
        self.leave()
        assert self._copied is not None
        return self._copied.result()


class SlotExports:
    """Owned by a state; holds PLACES times slot_bytes of page-locked memory."""

    def __init__(self, device: Any, slot_bytes: int) -> None:
        self.device = device
        self._free = [device.pinned(slot_bytes) for _ in range(PLACES)]
        self._thread = ThreadPoolExecutor(1, "q27app-slots")
        self._thread.submit(int)   # it is there from now on, so that no state's copy can fail for want of a thread

    def begin(self, address: int) -> SlotExport | None:
        """None while as many as possible are on their way."""
        try:
            place = self._free.pop()
        except IndexError:
            return None
        return SlotExport(self, place, self.device.download_beside(place, address))

    def copy(self, place: np.ndarray) -> Future[np.ndarray]:
        return self._thread.submit(self._copy, place)

    def _copy(self, place: np.ndarray) -> np.ndarray:
        try:
            return place.copy()
        finally:
            self._free.append(place)

    def close(self) -> None:
        self._thread.shutdown()
        self._free.clear()
