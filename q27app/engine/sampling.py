"""The parameters of every logit row of a pass, as the arrays that a backend takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from q27app.engine.request import SamplingParams
from q27app.engine.sequence import TokenCounts
from q27app.kernels.batch import SamplingRows

_IGNORED = SamplingParams()
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class LogitRow:
    """params None: nobody looks at the draw. position: of the token to be drawn. counts: None without penalties.
    drafts: the drafts before the row in this pass, which penalties count as generated. mask: None = all ids."""

    params: SamplingParams | None
    position: int
    counts: TokenCounts | None = None
    drafts: tuple[int, ...] = ()
    mask: np.ndarray | None = None


def sampling_rows(rows: list[LogitRow], vocab_size: int) -> SamplingRows:
    """See `SamplingRows`; the values have passed `limits.check_params`."""
    if all(row.params is rows[0].params and row.counts is None and row.mask is None for row in rows):
        shared = _alike(rows[0].params or _IGNORED, len(rows), vocab_size)
        return replace(shared, positions=np.array([row.position for row in rows], np.int64))
    return _rows(rows, vocab_size)


@lru_cache(64)
def _alike(params: SamplingParams, count: int, vocab_size: int) -> SamplingRows:
    """Rows of one request without penalties and mask, at position 0. Nobody writes into their arrays."""
    return _rows([LogitRow(params, 0)] * count, vocab_size)


def _rows(rows: list[LogitRow], vocab_size: int) -> SamplingRows:
    params = [row.params or _IGNORED for row in rows]
    counted = [row.counts.arrays(list(row.drafts)) if row.counts and row.params else None for row in rows]
    pairs = [pair for pair in counted if pair is not None]
    wanted = [-1 if one.logprobs is None else min(one.logprobs, vocab_size) for one in params]
    return SamplingRows(
        temperature=np.array([one.temperature for one in params], np.float32),
        top_k=np.array([one.top_k for one in params], np.int32),
        top_p=np.array([one.top_p for one in params], np.float32),
        min_p=np.array([one.min_p for one in params], np.float32),
        presence=np.array([one.presence_penalty for one in params], np.float32),
        frequency=np.array([one.frequency_penalty for one in params], np.float32),
        seeds=np.array([one.seed & _SEED_MASK for one in params], np.uint64),
        positions=np.array([row.position for row in rows], np.int64),
        penalty_starts=np.array([0, *accumulate(0 if pair is None else len(pair[0]) for pair in counted)], np.int32),
        penalty_ids=np.concatenate([pair[0] for pair in pairs]) if pairs else np.zeros(0, np.int32),
        penalty_counts=np.concatenate([pair[1] for pair in pairs]) if pairs else np.zeros(0, np.int32),
        num_logprobs=np.array(wanted, np.int32),
        masks=_masks(rows, vocab_size),
    )


def _masks(rows: list[LogitRow], vocab_size: int) -> np.ndarray | None:
    if all(row.mask is None for row in rows):
        return None
    out = np.full((len(rows), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for index, row in enumerate(rows):
        if row.mask is not None:
            out[index] = row.mask
    return out
