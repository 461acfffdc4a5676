"""How many prompt tokens a pass may take while others wait for their next token, or while a request may come: as many as GAP_MS
allows at the prices measured. Owned by the engine thread.
"""

from __future__ import annotations

from q27app.kernels.batch import BLOCK_POSITIONS

GAP_MS = 90.0
"""What a chunk of prefill may add to the time between two tokens of a running stream."""
WEIGHT = 1 / 4
GROWTH = 2
"""A chunk is at most so many times as large as the largest measured."""


class PrefillPace:
    """gap_ms: see GAP_MS. A pass has a price of its own beside that of its tokens, so prices are kept by size: a moving average
    for each number of blocks, a straight line between and beyond. Unknown prices: one block, so that they become known."""

    def __init__(self, gap_ms: float = GAP_MS) -> None:
        self._gap_ms = gap_ms
        self._ms: dict[int, float] = {}

    def record(self, tokens: int, ms: float) -> None:
        """A pass of at least one whole block took so long; shorter ones tell little of the next chunk's price."""
        if tokens >= BLOCK_POSITIONS:
            size = -(-tokens // BLOCK_POSITIONS)
            old = self._ms.get(size)
            self._ms[size] = ms if old is None else old + WEIGHT * (ms - old)

    def chunk(self, most: int) -> int:
        """A multiple of 64 from 64 to `most`."""
        size = 1
        if self._ms:
            largest = min(most // BLOCK_POSITIONS, GROWTH * max(self._ms))
            while size < largest and self._price(size + 1) <= self._gap_ms:
                size += 1
        return min(most, size * BLOCK_POSITIONS)

    def _price(self, size: int) -> float:
        """Milliseconds of a pass of so many blocks; never less than what a smaller one took."""
        known = sorted(self._ms)
        low = max((n for n in known if n <= size), default=0)
        high = min((n for n in known if n > size), default=0)
        floor = max((self._ms[n] for n in known if n <= size), default=0.0)
        if low == size:
            return floor
        if not high and len(known) > 1:
            low, high = known[-2], known[-1]
        start, end = self._ms.get(low, 0.0), self._ms[high or low]
        slope = (end - start) / (high - low) if high else end / low
        return max(floor, start + slope * (size - low) if high else end + slope * (size - low))
