"""A toy slot on its way to host memory; a slot that is written too soon is noticed."""

from __future__ import annotations

from typing import Any

import numpy as np


class ToyExport:
    """Leaves at the third time of asking; the slot must be then what it was."""

    def __init__(self, state: Any, slot: int, value: tuple[int, int]) -> None:
        self.state, self.slot, self.value, self.num_asked = state, slot, value, 0
        self.read: np.ndarray | None = None

    def has_left(self) -> bool:
        self.num_asked += 1
        if self.num_asked > 2:
            self.leave()
        return self.read is not None

    def leave(self) -> None:
        if self.read is None:
            self.read = np.array(self.state.get_slot(self.slot), np.uint64).view(np.uint8)
            self.is_whole = self.state.get_slot(self.slot) == self.value

    def data(self) -> np.ndarray:
        self.leave()
        assert self.is_whole, "the slot was written while its state was on its way"
        self.state.take_memory()
        return self.read
