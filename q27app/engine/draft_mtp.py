"""Drafts of the checkpoint's own draft layer, several sequences in one pass of it.

A chain starts at the pending token t of a sequence: the first step pairs the hidden row of the last computed position (kept
in the slot) with t, each further step the layer's own output with the token that it drafted. Tokens are drawn with the
noise of the position that they would stand at, so a draft agrees with the main model's draw as often as their
distributions allow. The layer's keys and values of drafted positions are written again, from the main model's hidden rows,
by the pass that verifies them.

A chain ends at its limit, at an end-of-text token, or where the draft's margin (best raw logit minus the second) is below
MIN_MARGIN: what follows a token that is probably wrong is wasted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from q27app.engine.request import SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.sequence import Sequence
from q27app.kernels.backend import Backend, Buffer, State
from q27app.kernels.batch import BLOCK_POSITIONS, Batch

MIN_MARGIN = 0.5


class RunsDrafts(Protocol):
    """What a chain needs of `model.forward.Model`."""

    backend: Backend

    def draft(self, batch: Batch, state: State, first: bool) -> Buffer: ...


@dataclass
class Chain:
    """One sequence's drafts while they grow."""

    sequence: Sequence
    limit: int
    params: SamplingParams
    drafts: list[int] = field(default_factory=list)

    def position(self, depth: int) -> int:
        """Where this step's row stands. A chain that has ended stays at its last place, which the verify pass rewrites."""
        return self.sequence.num_computed + (depth if len(self.drafts) == depth else len(self.drafts) - 1)

    @property
    def last_token(self) -> int:
        return self.drafts[-1] if self.drafts else self.sequence.tokens[-1]


class MtpDrafter:
    """min_margin: raw logits; 0 = never end a chain early. on_step: told the milliseconds of each step."""

    needs_mtp = True

    def __init__(
        self, model: RunsDrafts, state: State, vocab_size: int, min_margin: float = MIN_MARGIN,
        on_step: Callable[[float], None] = lambda ms: None,
    ) -> None:
        self._model, self._state, self._vocab_size = model, state, vocab_size
        self._min_margin, self._on_step = min_margin, on_step

    def propose(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[list[int]]:
        """Chains of at most limits[i] tokens; a limit of 0 gives []."""
        chains = [Chain(sequence, limit, replace(sequence.request.params, logprobs=None))
                  for sequence, limit in zip(sequences, limits, strict=True)]
        going = [chain for chain in chains if chain.limit > 0]
        depth = 0
        while going:
            going = self._step(going, depth)
            depth += 1
        return [chain.drafts for chain in chains]

    def _step(self, chains: list[Chain], depth: int) -> list[Chain]:
        """One step for all chains; returns the chains of the next step, [] if none goes on. The layer's output rows feed
        its next step by place, so chains that have ended keep their row."""
        started = time.monotonic()
        logits = self._model.draft(self._batch(chains, depth), self._state, depth == 0)
        rows = [LogitRow(chain.params, chain.position(depth) + 1, chain.sequence.counts, tuple(chain.drafts))
                for chain in chains]
        backend = self._model.backend
        backend.sample(logits, sampling_rows(rows, self._vocab_size))
        result = backend.result()
        self._on_step((time.monotonic() - started) * 1e3)
        for chain, token in zip(chains, result.tokens.tolist(), strict=True):
            if len(chain.drafts) == depth < chain.limit:
                chain.drafts.append(token)
        certain = (result.margins >= self._min_margin).tolist()
        for chain, is_certain in zip(chains, certain, strict=True):
            ends = chain.sequence.request.eos_ids
            if not is_certain or (chain.drafts and chain.drafts[-1] in ends):
                chain.limit = min(chain.limit, len(chain.drafts))
        wants_more = any(len(chain.drafts) == depth + 1 < chain.limit for chain in chains)
        return chains if wants_more else []

    def _batch(self, chains: list[Chain], depth: int) -> Batch:
        """A row a chain; a chain that has ended repeats its last token, and nobody looks at what comes of it."""
        count = len(chains)
        positions = np.array([chain.position(depth) for chain in chains], np.int32)
        width = int(positions.max()) // BLOCK_POSITIONS + 1
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
