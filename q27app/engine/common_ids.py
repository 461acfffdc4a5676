"""Whether a text is written with the ids that narrow drafts can be (see `model.mtp`): looked at again every LOOK_EVERY tokens."""

from __future__ import annotations

import numpy as np

from q27app.engine.sequence import Sequence

LOOKED, LOOK_EVERY = 256, 32
"""Tokens at the text's end that are looked at, the prompt's too; and how many new ones until the next look."""
MOST_RARE = 0.04
"""A greater share of rare ids costs more right drafts than the narrow head saves."""


class CommonIds:
    """Of one sequence. rare: the ids from .. to - 1 that narrow drafts never are; (0, 0): there are no narrow ones."""

    def __init__(self, rare: tuple[int, int]) -> None:
        self._rare, self._is_narrow, self._next = rare, False, 0

    def suffice(self, sequence: Sequence) -> bool:
        """Narrow drafts are the better ones."""
        if self._rare[1] and len(sequence.tokens) >= self._next:
            self._next = len(sequence.tokens) + LOOK_EVERY
            last = np.array(sequence.tokens[-LOOKED:], np.int32)
            self._is_narrow = bool(((last >= self._rare[0]) & (last < self._rare[1])).mean() <= MOST_RARE)
        return self._is_narrow
