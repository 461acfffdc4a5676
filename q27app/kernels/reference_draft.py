"""Chains of drafts, in NumPy: the oracle of `draft.cu`, and what the NumPy backend runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch, Drafted, Sampled, SamplingRows
from q27app.kernels.reference_sample import sample_rows


class DraftChain:
    """rows: how to draw, one a sequence. limits: int32 [rows], steps that each row may take, at least 1."""

    def __init__(self, rows: SamplingRows, limits: np.ndarray) -> None:
        self._rows, self._limits = rows, np.asarray(limits)
        if len(self._limits) != len(rows.temperature) or (self._limits < 1).any():
            raise Q27Error(f"limits of drafts are {self._limits.tolist()} for {len(rows.temperature)} rows, expected 1 or more.")
        self._tokens: list[np.ndarray] = []
        self._margins: list[np.ndarray] = []

    def draw(self, logits: np.ndarray, batch: Batch, skip: tuple[int, int] = (0, 0)) -> Batch:
        """Draw a draft for each row of logits [rows, vocab], none of the ids skip[0] to skip[1] - 1; the batch of the next step."""
        tokens, margins, _ = sample_rows(logits, self._rows, skip)
        self._tokens.append(tokens)
        self._margins.append(margins)
        goes_on = len(self._tokens) < self._limits
        self._rows = _counted(replace(self._rows, positions=self._rows.positions + goes_on), tokens)
        return replace(batch, tokens=np.where(goes_on, tokens, batch.tokens).astype(np.int32),
                       positions=(batch.positions + goes_on).astype(np.int32))

    def result(self) -> Drafted:
        return Drafted(np.stack(self._tokens), np.stack(self._margins))


def followed(batch: Batch, sampled: Sampled) -> Batch:
    """The first draft step after a pass: a row a sequence, its last drawn token where it will stand."""
    starts, count = batch.row_starts[:-1], batch.num_seqs
    return replace(batch, phase="draft", tokens=sampled.tokens[starts + sampled.accepted - 1],
                   positions=(batch.positions[starts] + sampled.accepted).astype(np.int32), deferred=False,
                   row_starts=np.arange(count + 1, dtype=np.int32), logit_rows=np.arange(count, dtype=np.int32))


def chain_ahead(rows: SamplingRows, first: Batch) -> DraftChain:
    """A chain that begins with the batch `first`; the positions of `rows` mean nothing."""
    return DraftChain(replace(rows, positions=first.positions.astype(np.int64) + 1), np.full(first.num_rows, MAX_DECODE_ROWS))


def with_drafts(batch: Batch, chain: DraftChain | None, before: Sampled | None = None) -> Batch:
    """The batch with what the chain, and the pass before, drew in the places of its `in_flight` tokens."""
    if not batch.is_in_flight:
        return batch
    lengths = np.diff(batch.row_starts)
    depths = np.arange(batch.num_rows) - np.repeat(batch.row_starts[:-1], lengths)
    tokens, drawn, drafted = batch.tokens.copy(), (batch.tokens < 0) & (depths == 0), (batch.tokens < 0) & (depths > 0)
    if drafted.any() and chain is None or drawn.any() and before is None:
        raise Q27Error("a pass with tokens in flight, and nothing before it drew any.")
    if chain is not None and drafted.any():
        tokens[drafted] = chain.result().tokens[depths[drafted] - 1, -1 - tokens[drafted]]
    if before is not None:
        tokens[drawn] = before.tokens[-1 - tokens[drawn]]
    return replace(batch, tokens=tokens)


def _counted(rows: SamplingRows, tokens: np.ndarray) -> SamplingRows:
    """The penalties, each row's token counted once more; rows without penalties stay without lists."""
    if not len(rows.penalty_ids) and not rows.presence.any() and not rows.frequency.any():
        return rows
    ids, counts, starts = [], [], [0]
    for row, token in enumerate(tokens.tolist()):
        span = slice(int(rows.penalty_starts[row]), int(rows.penalty_starts[row + 1]))
        own_ids, own_counts = rows.penalty_ids[span], rows.penalty_counts[span].copy()
        if rows.presence[row] or rows.frequency[row]:
            if not (own_ids == token).any():
                own_ids, own_counts = np.append(own_ids, np.int32(token)), np.append(own_counts, np.int32(0))
            own_counts[own_ids == token] += 1
        ids.append(own_ids)
        counts.append(own_counts)
        starts.append(starts[-1] + len(own_ids))
    return replace(rows, penalty_starts=np.array(starts, np.int32), penalty_ids=np.concatenate(ids).astype(np.int32),
                   penalty_counts=np.concatenate(counts).astype(np.int32))
