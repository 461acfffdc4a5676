"""What the scheduler and the runner tell each other of a pass: whose rows it has, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from q27app.engine.cut import Cut
from q27app.engine.request import TokenLogprobs
from q27app.engine.sequence import Sequence
from q27app.kernels.batch import Phase


@dataclass(eq=False)
class Part:
    """One sequence's rows of a pass: `tokens` at positions start, start + 1, ...; the last num_drafts are drafts.

    draws: tokens are drawn after the last known row and after each draft. masks: one a drawn row, or None. keeps: prefill,
    (position, slot) of states on the way that are to be kept."""

    sequence: Sequence
    start: int
    tokens: list[int]
    num_drafts: int = 0
    draws: bool = True
    masks: list[np.ndarray | None] | None = None
    keeps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_void(self) -> bool:
        """It was started before it was known that its sequence has ended, or is being computed again."""
        return self.sequence.is_finished or self.sequence.num_computed != self.start


@dataclass(frozen=True)
class Work:
    """A pass: what the runner makes a Batch of."""

    phase: Phase
    parts: list[Part]

    @property
    def is_deferred(self) -> bool:
        return self.phase == "verify"

    @property
    def commits_what_is_accepted(self) -> bool:
        """The accepted rows become state whatever is cut: nobody goes on from a cut but a guide, and nothing but drafts
        follows the first row of each part."""
        return self.is_deferred and all(part.draws and len(part.tokens) == 1 + part.num_drafts
                                        and part.sequence.request.guide is None for part in self.parts)

    def rows_to_commit(self, cuts: Seq[Cut | None]) -> list[int]:
        """Rows of each part that become state: all known ones, or what the cut of a run with drafts leaves."""
        return [cut.num_rows if part.num_drafts and cut is not None else len(part.tokens)
                for part, cut in zip(self.parts, cuts, strict=True)]


@dataclass(frozen=True)
class Drawn:
    """What a pass gave a part: the accepted run (empty if nothing was drawn), log probabilities for it if the request
    wants them, and the logits [rows, vocab] if it asked for the prompt's."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: np.ndarray | None = None
