"""Choosing tokens, in NumPy: the oracle of sampling, and what the NumPy backend runs.

Order: penalties, mask, temperature, top_k, top_p, min_p. A draw is the highest scaled logit plus Gumbel noise among the ids
that are kept, the lowest id on a tie. The noise of vocabulary index i is a function of (seed, position, i) alone:

    Philox4x32-10, key = (seed low 32, seed high 32), counter = (i // 4, position low 32, position high 32, 0)
    w = output word i % 4;  v = (w + 0.5) 2^-32 rounded to float32, at most 1 - 2^-24;  gumbel = -log(-log1p(-v))

NaN counts as -inf and +inf as the largest float32, so that damaged logits still give one definite token.
"""

from __future__ import annotations

import numpy as np

from q27app.kernels.batch import Batch, SamplingRows

FLOAT32_MAX = np.finfo(np.float32).max
LARGEST_UNIFORM = np.float32(1 - 2.0**-24)

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10. counters uint32 [n, 4], key two 32-bit words -> uint32 [n, 4] (Salmon et al. 2011)."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((second >> _SHIFT) ^ c1 ^ np.uint64(k0), second & _LOW,
                          (first >> _SHIFT) ^ c3 ^ np.uint64(k1), first & _LOW)
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel_noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """float32 noise of vocabulary ids (ascending) for one draw."""
    ids = np.asarray(ids, np.int64)
    groups, place = np.unique(ids // 4, return_inverse=True)
    counters = np.zeros((len(groups), 4), np.uint32)
    counters[:, 0] = groups
    counters[:, 1], counters[:, 2] = position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF
    words = philox(counters, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[place, ids % 4]
    uniform = ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    return -np.log(-np.log1p(-np.minimum(uniform, LARGEST_UNIFORM)))


def defined(logits: np.ndarray) -> np.ndarray:
    """NaN -> -inf, +inf -> the largest float32, -0 -> +0."""
    clean = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    return np.minimum(clean, FLOAT32_MAX) + np.float32(0)


def penalise(
    logits: np.ndarray, ids: np.ndarray, counts: np.ndarray, presence: float, frequency: float
) -> np.ndarray:
    """logits [vocab] with presence subtracted from every id and frequency once a count; ids are distinct."""
    out = logits.copy()
    out[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)
    return out


def allowed_ids(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    """Ascending ids that a bitmask uint32 [ceil(vocab / 32)] allows; all without one."""
    if mask is None:
        return np.arange(vocab)
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:vocab]
    return np.flatnonzero(bits)


def keep_top_k(scaled: np.ndarray, top_k: int) -> np.ndarray:
    """bool [n]: the k highest, ties with the k-th included; 0 or more than there are = all."""
    if not 0 < top_k < len(scaled):
        return np.ones(len(scaled), bool)
    return scaled >= np.partition(scaled, -top_k)[-top_k]


def keep_top_p(scaled: np.ndarray, top_p: float) -> np.ndarray:
    """bool [n]: the smallest set of highest probabilities whose mass reaches top_p, ties at the threshold included."""
    if not 0 < top_p < 1:
        return np.ones(len(scaled), bool)
    order = np.sort(scaled)[::-1]
    mass = np.cumsum(np.exp(order.astype(np.float64) - float(order[0])))
    last = np.searchsorted(mass, float(top_p) * mass[-1])
    return scaled >= order[min(int(last), len(order) - 1)]


def keep_min_p(scaled: np.ndarray, min_p: float) -> np.ndarray:
    """bool [n]: probability at least min_p of the highest."""
    if not 0 < min_p <= 1:
        return np.ones(len(scaled), bool)
    return scaled.astype(np.float64) - float(scaled.max()) >= np.log(np.float64(np.float32(min_p)))


def distribution(
    logits: np.ndarray, ids: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """(kept ids, their scaled logits): what a draw at this temperature > 0 chooses from.

    Each filter sees what the one before it kept; where nothing is finite only the lowest id stays. logits: `defined`,
    penalised; ids: the allowed ones, ascending."""
    with np.errstate(over="ignore"):
        scaled = defined(logits[ids] / np.float32(temperature))
    if not scaled.max() > -np.inf:
        return ids[:1], scaled[:1]
    for keep, value in ((keep_top_k, top_k), (keep_top_p, top_p), (keep_min_p, min_p)):
        kept = keep(scaled, value)
        ids, scaled = ids[kept], scaled[kept]
    return ids, scaled


def draw(logits: np.ndarray, ids: np.ndarray, rows: SamplingRows, row: int) -> int:
    """The token of one row. logits [vocab]: `defined`, penalised; ids: the allowed ones, ascending, at least one."""
    temperature = float(rows.temperature[row])
    if not temperature > 0:
        return int(ids[np.argmax(logits[ids])])
    kept, scaled = distribution(
        logits, ids, temperature, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    return int(kept[np.argmax(scaled + gumbel_noise(int(rows.seeds[row]), int(rows.positions[row]), kept))])


def margin(logits: np.ndarray) -> np.float32:
    """Highest minus second highest of `defined` logits; 0 where the vocabulary has one id or nothing is finite."""
    if len(logits) < 2:
        return np.float32(0)
    second, first = np.partition(logits, -2)[-2:]
    return np.float32(first - second) if first > -np.inf else np.float32(0)


def log_probabilities(logits: np.ndarray, token: int, count: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(log probability of token, the `count` best ids best first, theirs), of `defined` logits; lowest id first on ties."""
    values = logits.astype(np.float64)
    top = values.max()
    if top == -np.inf:
        values, top = np.zeros(len(values)), 0.0
    logs = values - (top + np.log(np.exp(values - top).sum()))
    best = np.argsort(-logs, kind="stable")[:count] if count else np.zeros(0, np.int64)
    return float(logs[token]), best.astype(np.int32), logs[best].astype(np.float32)


def sample_rows(logits: np.ndarray, rows: SamplingRows, skip: tuple[int, int] = (0, 0)) -> tuple[np.ndarray, np.ndarray, list]:
    """Draw a token for each row of logits [n, vocab]: (tokens int32 [n], margins float32 [n], logprobs list). Ids skip[0] to
    skip[1] - 1 are no candidates, and their logits mean nothing."""
    count, vocab = logits.shape
    tokens, margins = np.zeros(count, np.int32), np.zeros(count, np.float32)
    logprobs: list = [None] * count
    for row in range(count):
        raw = defined(logits[row])
        margins[row] = margin(np.delete(raw, slice(*skip)) if skip[1] else raw)
        penalised = raw
        span = slice(int(rows.penalty_starts[row]), int(rows.penalty_starts[row + 1]))
        if span.stop > span.start:
            penalised = defined(penalise(raw, rows.penalty_ids[span], rows.penalty_counts[span],
                                         float(rows.presence[row]), float(rows.frequency[row])))
        ids = allowed_ids(None if rows.masks is None else rows.masks[row], vocab)
        if skip[1]:
            ids = ids[(ids < skip[0]) | (ids >= skip[1])]
        tokens[row] = draw(penalised, ids, rows, row) if len(ids) else 0
        if rows.num_logprobs[row] >= 0:
            logprobs[row] = log_probabilities(raw, int(tokens[row]), int(rows.num_logprobs[row]))
    return tokens, margins, logprobs


def count_accepted(batch: Batch, tokens: np.ndarray) -> np.ndarray:
    """int32 [seqs]: 1 + the longest run of drafts (a verify batch's tokens after each sequence's first) that equal the
    token drawn one row earlier. All ones in other phases. tokens: drawn ids of the batch's logit rows, which are all rows
    of a verify batch."""
    accepted = np.ones(batch.num_seqs, np.int32)
    if batch.phase != "verify":
        return accepted
    assert len(tokens) == batch.num_rows, "a verify pass wants the logits of every row"
    rows = np.arange(batch.num_rows)
    agrees = np.zeros(batch.num_rows, bool)
    agrees[:-1] = tokens[:-1] == batch.tokens[1:]
    agrees[batch.row_starts[1:] - 1] = False
    starts = batch.row_starts[:-1]
    return accepted + (np.minimum.reduceat(np.where(agrees, len(rows), rows), starts) - starts).astype(np.int32)
