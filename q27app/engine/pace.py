"""How many prompt tokens a pass may take while others wait for their next token, or while a request may come: as many as GAP_MS
allows at the prices measured. Owned by the engine thread.
"""

from __future__ import annotations

from q27app.kernels.batch import BLOCK_POSITIONS

GAP_MS = 120.0
"""What a chunk of prefill may add to the time between two tokens of a running stream."""
BACKGROUND_GAP_MS = 60.0
"""How long a request may wait for a pass of work that nobody waits for."""
WEIGHT = 1 / 4
GROWTH = 2
"""A chunk is at most so many times as large as the largest measured."""


class PrefillPace:
    """A pass has a price of its own beside that of its tokens, so prices are kept by size: a moving average for each number of
    blocks, a straight line between and beyond. Unknown prices: one block, so that they become known."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}

    def record(self, tokens: int, ms: float) -> None:
        """A pass of at least one whole block took so long; shorter ones tell little of the next chunk's price."""
        if tokens >= BLOCK_POSITIONS:
            size = -(-tokens // BLOCK_POSITIONS)
            old = self._ms.get(size)
            self._ms[size] = ms if old is None else old + WEIGHT * (ms - old)

    def chunk(self, most: int, gap_ms: float = GAP_MS) -> int:
        """A multiple of 64 from 64 to `most`."""
        largest = min(most // BLOCK_POSITIONS, GROWTH * max(self._ms, default=0))
        size = next((size for size in range(largest, 1, -1) if self._price(size) <= gap_ms), 1)
        return min(most, size * BLOCK_POSITIONS)

    def _price(self, size: int) -> float:
        """Milliseconds of a pass of so many blocks. Not always more than of fewer: kernels are made for some sizes."""
        known = sorted(self._ms)
        low = max((n for n in known if n <= size), default=0)
        high = min((n for n in known if n > size), default=0)
        if not high:
            last = self._ms[low]
            steps = [(last - self._ms[n]) / (low - n) for n in known[:-1]]
            return last + max([last / low / 2, *steps[-1:]]) * (size - low)
        start = self._ms.get(low, 0.0)
        return start + (self._ms[high] - start) / (high - low) * (size - low)
