"""How many prompt tokens a pass may take while others wait for their next token: as many as GAP_MS allows at the measured
speed. Owned by the engine thread.
"""

from __future__ import annotations

from q27app.kernels.batch import BLOCK_POSITIONS

GAP_MS = 90.0
"""What a chunk of prefill may add to the time between two tokens of a running stream."""
WEIGHT = 1 / 4


class PrefillPace:
    """gap_ms: see GAP_MS. Unknown speed: one block at a time, so that it becomes known."""

    def __init__(self, gap_ms: float = GAP_MS) -> None:
        self._gap_ms = gap_ms
        self._ms_per_token = 0.0

    def record(self, tokens: int, ms: float) -> None:
        """A pass of at least one whole block took so long; shorter ones tell little of the next chunk's price."""
        if tokens >= BLOCK_POSITIONS:
            each = ms / tokens
            self._ms_per_token = each if not self._ms_per_token else self._ms_per_token + WEIGHT * (each - self._ms_per_token)

    def chunk(self, most: int) -> int:
        """A multiple of 64 from 64 to `most`."""
        if not self._ms_per_token:
            return min(most, BLOCK_POSITIONS)
        tokens = int(self._gap_ms / self._ms_per_token) // BLOCK_POSITIONS * BLOCK_POSITIONS
        return min(most, max(BLOCK_POSITIONS, tokens))
