"""Guides that leave the next pass open, so that its drafts may be begun before this one is known, and then change their mind."""

from __future__ import annotations

import numpy as np

from q27app.chat.guide import Decision


class Interrupts:
    """Constrains nothing; after every 11th token it says two ids by itself, the 30th it drops and says one."""

    is_open = True

    def __init__(self) -> None:
        self.seen = 0

    def advance(self, tokens):
        for index in range(len(tokens)):
            self.seen += 1
            if self.seen % 30 == 0:
                return Decision(index, (9,))
            if self.seen % 11 == 0:
                return Decision(index + 1, (5, 6))
        return Decision(len(tokens))

    def mask(self, prefix):
        return None


class Closes(Interrupts):
    """Open for 15 tokens, then it allows two ids."""

    @property
    def is_open(self):
        return self.seen < 15

    def mask(self, prefix):
        words = np.full(2560 // 32, 0 if self.seen >= 15 else 0xFFFFFFFF, np.uint32)
        words[0] |= np.uint32(3 << 5)
        return None if self.seen < 15 else words

    def advance(self, tokens):
        keep = min(len(tokens), 15 - self.seen) if self.seen < 15 else len(tokens)
        self.seen += keep
        return Decision(keep, () if keep == len(tokens) else (7,))
