"""Recurrent-state slots: one for each running sequence, and for each snapshot on the device.

Owned by the engine thread. A slot has at most one owner.
"""

from __future__ import annotations

from collections.abc import Iterable


class SlotPool:
    """num_slots slots, numbered from 0; the lowest free one goes first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A free slot, None if there is none. What it holds is whatever its last owner left."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give back a slot that `allocate` gave."""
        assert 0 <= slot < self.num_slots and slot not in self._free, f"slot {slot} was released without being in use"
        self._free.append(slot)
        self._free.sort(reverse=True)

    def check(self, owned: Iterable[int]) -> None:
        """AssertionError unless exactly the slots of `owned` are in use, each once."""
        used = sorted(owned)
        expected = sorted(set(range(self.num_slots)) - set(self._free))
        assert used == expected, f"slots {expected} are in use, their owners hold {used}"
