"""Reference-counted KV blocks. A block is 64 positions; sequences and snapshots that share a prefix share its blocks.

Owned by the engine thread. A block is free exactly if its count is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS


def blocks_of(num_positions: int) -> int:
    """Blocks that hold this many positions."""
    return -(-num_positions // BLOCK_POSITIONS)


class BlockPool:
    """num_blocks blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._counts = np.zeros(num_blocks, np.int32)

    def allocate(self, count: int) -> np.ndarray | None:
        """int32 [count] free blocks, ascending, each counted once; None if there are too few.

        The lowest run of neighbours is preferred: a backend reads a contiguous run of keys faster.
        """
        if count > self.num_free:
            return None
        if count == 0:
            return np.zeros(0, np.int32)
        free = np.flatnonzero(self._counts == 0)
        runs = np.flatnonzero(free[count - 1:] - free[:len(free) - count + 1] == count - 1)
        start = int(runs[0]) if len(runs) else 0
        chosen = free[start:start + count].astype(np.int32)
        self._counts[chosen] = 1
        self.num_free -= count
        return chosen

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of these different blocks, which must be in use."""
        assert (self._counts[blocks] > 0).all(), "a free block cannot be shared"
        self._counts[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """One owner less for each of these different blocks."""
        assert (self._counts[blocks] > 0).all(), "a block was released more often than it was taken"
        self._counts[blocks] -= 1
        self.num_free += int((self._counts[blocks] == 0).sum())

    def owned_alone(self, counts: np.ndarray) -> int:
        """How many blocks in use have no owner beyond these. counts: int32 [num_blocks], owners of each block."""
        return int(((self._counts > 0) & (self._counts == counts)).sum())

    def check(self, owned: Iterable[np.ndarray]) -> None:
        """AssertionError unless the counts are those of `owned`: every owner's blocks."""
        expected = np.zeros(self.num_blocks, np.int32)
        for blocks in owned:
            np.add.at(expected, blocks, 1)
        wrong = np.flatnonzero(expected != self._counts)
        assert not len(wrong), f"blocks {wrong[:8].tolist()} count {self._counts[wrong[:8]].tolist()} owners, expected " \
                               f"{expected[wrong[:8]].tolist()}"
        assert self.num_free == int((self._counts == 0).sum()), "num_free is not the number of free blocks"
