"""How far one distribution over the vocabulary is from another, token by token, and the three forms in which rows are kept.

    form      of a row                                                       bytes of a row, V ids
    exact     the logits, float32                                            4 V + 8
    full      log probabilities, float16                                     2 V + 8
    top K     the K highest ids (int32) and their log probabilities           6 K + 12
              (float16), and the mass of the rest (float32)

All forms also keep the best id (int32; the lowest on a tie) and the log probability of the token that follows (float32),
taken from the logits before any rounding. KL divergence is sum p (log p - log q) in nats, in float64. Both sides go through
the same form before they are compared, so equal logits give exactly 0 in each, and rounded ones are normalised again, so no
figure is negative. In a `top K` form everything outside the reference's K ids is one event; merging events can only lower a
divergence, so the figure is a lower bound, and close where the rest has little mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from q27app.errors import UsageError

MAX_TOP = 4096
MIN_TAIL = 1e-12
"""Mass below which the rest of a top K row counts as this much, so that its logarithm is finite."""


@dataclass(frozen=True)
class Form:
    """name: "exact", "full" or "top". k: ids that top keeps."""

    name: str
    k: int = 0

    def __str__(self) -> str:
        return f"top{self.k}" if self.name == "top" else self.name

    def row_bytes(self, vocab_size: int) -> int:
        """Of one position on the disk."""
        k = min(self.k, vocab_size)
        return {"exact": 4 * vocab_size + 8, "full": 2 * vocab_size + 8, "top": 6 * k + 12}[self.name]


def parse_form(text: str) -> Form:
    """exact, full or topK. Raises UsageError."""
    if text in ("exact", "full"):
        return Form(text)
    if text.startswith("top") and text[3:].isdigit() and 1 <= int(text[3:]) <= MAX_TOP:
        return Form("top", int(text[3:]))
    raise UsageError(f"form {text[:40]!r}: expected exact, full, or top with a number up to {MAX_TOP}.", "Such as top256.")


@dataclass(frozen=True)
class Rows:
    """Some positions of one network in one form. best: int32 [n]. following: float32 [n], log probability of the token that
    follows (NaN where none does). values: exact [n, V] float32, full [n, V] float16, top [n, K] float16; ids: int32 [n, K]
    and tail: float32 [n] for top."""

    form: Form
    best: np.ndarray
    following: np.ndarray
    values: np.ndarray
    ids: np.ndarray | None = None
    tail: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.best)

    def arrays(self) -> dict[str, np.ndarray]:
        """For a file."""
        found = {"best": self.best, "following": self.following, "values": self.values}
        return found | ({"ids": self.ids, "tail": self.tail} if self.ids is not None and self.tail is not None else {})


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 [n, V] of any logits [n, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def encode(logits: np.ndarray, following: np.ndarray, form: Form, ids: np.ndarray | None = None) -> Rows:
    """logits [n, V] float32 in a form. following: int [n], the next token of each row, -1 = none. ids: of another network's
    `top` rows, which are then taken instead of this one's best."""
    best = logits.argmax(-1).astype(np.int32)
    spread = log_probabilities(logits)
    rows = np.arange(len(logits))
    next_log = np.where(following >= 0, spread[rows, np.maximum(following, 0)], np.nan).astype(np.float32)
    if form.name == "exact":
        return Rows(form, best, next_log, logits.astype(np.float32))
    if form.name == "full":
        return Rows(form, best, next_log, spread.astype(np.float16))
    if ids is None:
        k = min(form.k, logits.shape[1])
        ids = np.argpartition(-spread, k - 1, axis=-1)[:, :k]
        order = np.argsort(-np.take_along_axis(spread, ids, -1), axis=-1, kind="stable")
        ids = np.take_along_axis(ids, order, -1)
    kept = np.take_along_axis(spread, ids, -1)
    tail = np.maximum(1.0 - np.exp(kept).sum(-1), 0.0)
    return Rows(form, best, next_log, kept.astype(np.float16), ids.astype(np.int32), tail.astype(np.float32))


def _normal(rows: Rows) -> np.ndarray:
    """float64 log probabilities of the events of a row: the ids, and for top the rest as one more."""
    if rows.form.name != "top":
        return log_probabilities(rows.values)
    assert rows.tail is not None
    rest = np.log(np.maximum(rows.tail.astype(np.float64), MIN_TAIL))
    return log_probabilities(np.concatenate([rows.values.astype(np.float64), rest[:, None]], axis=1))


def divergence(reference: Rows, candidate: Rows) -> np.ndarray:
    """float64 [n]: KL(reference || candidate) in nats, at least 0. Raises UsageError for forms that do not fit together."""
    if reference.form.name != candidate.form.name or len(reference) != len(candidate):
        raise UsageError(f"rows of form {reference.form} and {candidate.form} cannot be compared.", "Capture both in one form.")
    if reference.form.name == "top":
        reference, candidate = _on_shared_ids(reference, candidate)
    p, q = _normal(reference), _normal(candidate)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def _on_shared_ids(reference: Rows, candidate: Rows) -> tuple[Rows, Rows]:
    """Both on the ids that both hold; the others join the rest. Nothing to do where the ids are the same."""
    assert reference.ids is not None and candidate.ids is not None
    if np.array_equal(reference.ids, candidate.ids):
        return reference, candidate
    left, right = _Merged(reference), _Merged(candidate)
    count = reference.ids.shape[1]
    for row in range(len(reference)):
        both, in_left, in_right = np.intersect1d(reference.ids[row], candidate.ids[row], return_indices=True)
        left.put(row, in_left, len(both))
        right.put(row, in_right, len(both))
    return left.rows(count), right.rows(count)


class _Merged:
    """Rows cut to some ids each; empty places have no mass."""

    def __init__(self, rows: Rows) -> None:
        assert rows.tail is not None
        self._rows = rows
        self._values = np.full(rows.values.shape, -np.inf)
        self._tail = rows.tail.astype(np.float64)

    def put(self, row: int, places: np.ndarray, count: int) -> None:
        values = self._rows.values[row].astype(np.float64)
        self._values[row, :count] = values[places]
        self._tail[row] += np.exp(np.delete(values, places)).sum()

    def rows(self, count: int) -> Rows:
        values = np.where(np.isneginf(self._values), -745.0, self._values)  # exp of it is nothing, and 0 (x - x) stays 0
        return Rows(self._rows.form, self._rows.best, self._rows.following, values, self._rows.ids, self._tail)


def best_probability(rows: Rows) -> np.ndarray:
    """float64 [n]: of each row's most likely id."""
    return np.exp(_normal(rows).max(-1)) if rows.form.name != "top" else np.exp(rows.values[:, 0].astype(np.float64))
