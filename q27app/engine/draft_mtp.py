"""Drafts of the checkpoint's own draft layer, several sequences in one pass of it.

A chain starts at the pending token t of a sequence: the first step pairs the hidden row of the last computed position (kept
in the slot) with t, each further step the layer's own output with the token that it drafted. Tokens are drawn with the
noise of the position that they would stand at, so a draft agrees with the main model's draw as often as their
distributions allow. The layer's keys and values of drafted positions are written again, from the main model's hidden rows,
by the pass that verifies them.

A chain ends at its limit, at an end-of-text token, or where the draft's margin (best raw logit minus the second) is below
MIN_MARGIN: what follows a token that is probably wrong is wasted. Where steps are queued on a device their end is known
only afterwards; a sequence whose guide restricts the next token is drafted a step at a time, because only the host knows
what it allows then.

`start_ahead` queues a whole chain behind a pass that has not been looked at (see `drafts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from q27app.engine.masks import mask_after
from q27app.engine.request import SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.sequence import Sequence
from q27app.errors import Q27Error
from q27app.kernels.backend import State
from q27app.kernels.batch import BLOCK_POSITIONS, Batch, Drafted, SamplingRows

MIN_MARGIN = 0.5


class RunsDrafts(Protocol):
    """What a chain needs of `model.forward.Model`."""

    num_fresh: int

    def draft_chain(self, batch: Batch, state: State, first: bool, steps: int, rows: SamplingRows,
                    limits: np.ndarray, is_narrow: bool = False) -> Drafted: ...

    def draft_ahead(self, state: State, steps: int, rows: SamplingRows, is_narrow: bool = False) -> None: ...

    @property
    def rare_ids(self) -> tuple[int, int]: ...


@dataclass
class Chain:
    """One sequence's drafts while they grow. mask: what its guide allows next, None = all."""

    sequence: Sequence
    limit: int
    params: SamplingParams
    mask: np.ndarray | None = None
    drafts: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def place(self) -> int:
        """Where the chain's next row stands. One that has ended stays at its last place, which the verify pass rewrites."""
        return self.sequence.num_computed + len(self.drafts) - (self.is_over and bool(self.drafts))

    @property
    def last_token(self) -> int:
        return self.drafts[-1] if self.drafts else self.sequence.tokens[-1]

    def look(self, vocab_size: int) -> None:
        """Ask the guide. One that fails ends the chain here, and its request when the pass is made."""
        if not self.is_over:
            try:
                self.mask = mask_after(self.sequence.request.guide, self.drafts, vocab_size)
            except Q27Error:
                self.is_over = True

    def take(self, drafts: list[int], margins: list[float], min_margin: float) -> None:
        """Append what was drawn, up to where the chain ends."""
        ends = self.sequence.request.eos_ids
        for token, margin in zip(drafts, margins, strict=True):
            if self.is_over:
                return
            self.drafts.append(token)
            self.is_over = len(self.drafts) == self.limit or margin < min_margin or token in ends


class MtpDrafter:
    """min_margin: raw logits; 0 = never end a chain early. steps_at_once: queued before anything is looked at; 1 where
    looking costs nothing. on_step: told the milliseconds of each step, and whether it was a
    narrow one."""

    def __init__(
        self, model: RunsDrafts, state: State, vocab_size: int, min_margin: float = MIN_MARGIN, steps_at_once: int = 1,
        on_step: Callable[[float, bool], None] = lambda ms, is_narrow: None,
    ) -> None:
        self._model, self._state, self._vocab_size = model, state, vocab_size
        self._min_margin, self._steps_at_once, self._on_step = min_margin, steps_at_once, on_step
        self._ahead: tuple[tuple[SamplingParams, ...], SamplingRows] | None = None

    @property
    def rare_ids(self) -> tuple[int, int]:
        """Ids from .. to - 1 that narrow drafts never are; (0, 0): there are no narrow ones."""
        return self._model.rare_ids

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], is_narrow: bool = False) -> list[list[int]]:
        """Chains of at most limits[i] tokens; a limit of 0 gives []. is_narrow: none of them rare, for half the price."""
        chains = [Chain(sequence, limit, replace(sequence.request.params, logprobs=None))
                  for sequence, limit in zip(sequences, limits, strict=True)]
        going = [chain for chain in chains if chain.limit > 0]
        is_first = True
        while not all(chain.is_over for chain in going):
            self._extend(going, is_first, is_narrow)
            is_first = False
        return [chain.drafts for chain in chains]

    def start_ahead(self, sequences: Seq[Sequence], steps: int, is_narrow: bool = False) -> None:
        """Chains of `steps` drafts behind the pass that was just drawn for these sequences, in this order; nothing waits.
        None of them has penalties or a guide. Their margins end nothing: nobody sees them in time."""
        params = tuple(sequence.request.params for sequence in sequences)
        if self._ahead is None or self._ahead[0] != params:
            rows = [LogitRow(replace(one, logprobs=None), 0) for one in params]
            self._ahead = params, sampling_rows(rows, self._vocab_size)
        self._model.draft_ahead(self._state, steps, self._ahead[1], is_narrow)

    def _extend(self, chains: list[Chain], is_first: bool, is_narrow: bool) -> None:
        """One or several steps for all chains. The layer's output rows feed its next step by place, so chains that have
        ended keep their row."""
        for chain in chains:
            chain.look(self._vocab_size)
        left = [1 if chain.is_over else chain.limit - len(chain.drafts) for chain in chains]
        steps = min(self._most_at_once(chains), max(left))
        limits = np.minimum(left, steps).astype(np.int32)
        rows = [LogitRow(chain.params, chain.place + 1, chain.sequence.counts, tuple(chain.drafts), chain.mask)
                for chain in chains]
        started, fresh = time.monotonic(), self._model.num_fresh
        drafted = self._model.draft_chain(self._batch(chains, limits), self._state, is_first, steps,
                                          sampling_rows(rows, self._vocab_size), limits, is_narrow)
        if self._model.num_fresh == fresh:
            self._on_step((time.monotonic() - started) * 1e3 / steps, is_narrow)
        for chain, tokens, margins in zip(chains, drafted.tokens.T.tolist(), drafted.margins.T.tolist(), strict=True):
            chain.take(tokens, margins, self._min_margin)

    def _most_at_once(self, chains: list[Chain]) -> int:
        return 1 if any(chain.mask is not None for chain in chains) else self._steps_at_once

    def _batch(self, chains: list[Chain], limits: np.ndarray) -> Batch:
        """A row a chain; a chain that has ended repeats its last token, and nobody looks at what comes of it."""
        count = len(chains)
        positions = np.array([chain.place for chain in chains], np.int32)
        width = int((positions + limits - 1).max()) // BLOCK_POSITIONS + 1
        tables = np.full((count, width), -1, np.int32)
        for row, chain in zip(tables, chains, strict=True):
            used = min(width, len(chain.sequence.blocks))
            row[:used] = chain.sequence.blocks[:used]
        return Batch(
            phase="draft",
            tokens=np.array([chain.last_token for chain in chains], np.int32),
            positions=positions,
            row_starts=np.arange(count + 1, dtype=np.int32),
            slots=np.array([chain.sequence.slot for chain in chains], np.int32),
            block_tables=tables,
            logit_rows=np.arange(count, dtype=np.int32),
        )
