"""Drafts for free: what followed the longest earlier occurrence of the text's current end.

    index of the prompt    keys of all runs of GRAM tokens, sorted once; a query is two binary searches
    index of the answer    a table key -> the latest ends, one entry a token; brought up beside a pass, when many have come, or when it is
                           asked
    a match                while new tokens continue it, it stays the longest one and costs nothing; else the index is asked

Lengths are compared up to MAX_COMPARED tokens back, over at most MAX_CANDIDATES of the latest occurrences; of equal lengths the
latest wins. A continuation that reaches the text's end goes on with what it has itself proposed, so that a period repeats.
Memory: about 24 bytes a prompt token, a few hundred a generated one.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from q27app.engine.sequence import Sequence

log = logging.getLogger("q27app.engine")

GRAM = 4
MAX_CANDIDATES = 32
MAX_COMPARED = 64
MAX_UNINDEXED = 256
"""Tokens of the answer that may wait to be indexed."""
MIN_MATCH = 12
"""Shortest match that is proposed on its own."""

_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class SuffixIndex:
    """The tokens of one sequence and where their runs occurred before. Only `extend` changes it."""

    def __init__(self, prompt: Seq[int] | np.ndarray) -> None:
        self._size = len(prompt)
        self._tokens = np.empty(max(64, self._size + 64), np.int32)
        self._tokens[:self._size] = prompt
        keys = _keys(self._tokens[:self._size])
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._sorted = keys[self._order]
        self._recent: dict[int, deque[int]] = {}
        self._num_indexed = self._size
        self._source = 0
        """The match: the text before this position equals the text's end; 0 = none."""
        self._length = 0
        self._find()

    def __len__(self) -> int:
        return self._size

    @property
    def match_length(self) -> int:
        """Tokens of the current end that occurred before, at most MAX_COMPARED when found anew; 0 = none."""
        return self._length

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens of the text."""
        if not tokens:
            return
        before, size = self._size, self._size + len(tokens)
        if size > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[:before], np.empty(size, np.int32)])
        self._tokens[before:size] = tokens
        self._size = size
        if size - self._num_indexed > MAX_UNINDEXED:
            self.bring_up()
        if self._length and self._tokens[self._source:self._source + len(tokens)].tolist() == list(tokens):
            self._source, self._length = self._source + len(tokens), self._length + len(tokens)
        else:
            self._find()

    def bring_up(self) -> None:
        """Index the runs that something follows by now."""
        if self._num_indexed == self._size:
            return
        start, self._num_indexed = max(0, self._num_indexed - GRAM), self._size
        for place, key in enumerate(_few_keys(self._tokens[start:self._size - 1]), start + GRAM):
            self._recent.setdefault(key, deque(maxlen=MAX_CANDIDATES)).append(place)

    def _find(self) -> None:
        """Ask the index for the longest earlier occurrence of the end."""
        size = self._size
        self._source = self._length = 0
        if size <= GRAM:
            return
        ends = self._candidates(_key(self._tokens[size - GRAM:size].tolist()))
        ends = ends[ends < size]
        if not len(ends):
            return
        reach = np.arange(1, MAX_COMPARED + 1)
        places, own = ends[:, None] - reach, size - reach
        equal = self._tokens[np.maximum(places, 0)] == self._tokens[np.maximum(own, 0)]
        equal &= (places >= 0) & (own >= 0)
        lengths = np.where(equal.all(axis=1), MAX_COMPARED, equal.argmin(axis=1))
        best = len(lengths) - 1 - int(lengths[::-1].argmax())
        if lengths[best] >= GRAM:
            self._source, self._length = int(ends[best]), int(lengths[best])

    def _candidates(self, key: int) -> np.ndarray:
        """Ends of earlier runs with this key, ascending, the latest MAX_CANDIDATES of prompt and answer."""
        self.bring_up()
        wanted = np.uint64(key)
        low, high = int(self._sorted.searchsorted(wanted)), int(self._sorted.searchsorted(wanted, "right"))
        answer = self._recent.get(key)
        if low == high and not answer:
            return _NONE
        prompt = self._order[max(low, high - MAX_CANDIDATES):high] + GRAM
        if not answer:
            return prompt
        return np.concatenate([prompt, np.fromiter(answer, np.int64)])[-MAX_CANDIDATES:]

    def propose(self, limit: int, min_match: int = MIN_MATCH, after: Seq[int] = ()) -> list[int]:
        """At most `limit` tokens that followed the match, [] if it is shorter than min_match.

        after: drafts of somebody else; the proposal continues the text with them, and they are not part of it.
        """
        source, length = self._source, self._length
        if after:
            source, length = self._with(after)
        if length < min_match or not length:
            return []
        text_end = self._size
        drafts: list[int] = []
        for _ in range(limit):
            if source < text_end:
                drafts.append(int(self._tokens[source]))
            else:
                beyond = source - text_end
                drafts.append((list(after) + drafts)[beyond])
            source += 1
        return drafts

    def _with(self, after: Seq[int]) -> tuple[int, int]:
        """(source, length) of the text continued by `after`, without keeping it."""
        source, length = self._source, self._length
        if length and self._size - source >= len(after):
            if np.array_equal(self._tokens[source:source + len(after)], np.asarray(after, np.int32)):
                return source + len(after), length + len(after)
        end = np.concatenate([self._tokens[max(0, self._size - GRAM):self._size], np.asarray(after, np.int32)])[-GRAM:]
        if len(end) < GRAM:
            return 0, 0
        ends = self._candidates(_key(end.tolist()))
        ends = ends[(ends < self._size) & (ends >= GRAM)]
        tail = np.concatenate([self._tokens[max(0, self._size - MAX_COMPARED):self._size], np.asarray(after, np.int32)])
        best = (0, 0)
        for place in ends[::-1][:8].tolist():
            reach = min(place, len(tail), MAX_COMPARED)
            same = self._tokens[place - reach:place][::-1] == tail[len(tail) - reach:][::-1]
            length = reach if same.all() else int(same.argmin())
            if length > best[1]:
                best = (place, length)
        return best if best[1] >= GRAM else (0, 0)


_NONE = np.zeros(0, np.int64)
_WORD = (1 << 64) - 1


def _key(run: list[int]) -> int:
    """Key of one run of GRAM tokens; the same as `_keys` gives."""
    key = 0
    for token, factor in zip(run, _FACTORS.tolist(), strict=True):
        key = key + (token + 1) * factor & _WORD
        key ^= key >> 29
    return key


def _keys(tokens: np.ndarray) -> np.ndarray:
    """Key of each run of GRAM tokens, uint64 [n - GRAM + 1]; equal runs have equal keys, others almost never."""
    count = len(tokens) - GRAM + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    keys = np.zeros(count, np.uint64)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    for place in range(GRAM):
        keys += wide[place:place + count] * _FACTORS[place]
        keys ^= keys >> np.uint64(29)
    return keys


def _few_keys(tokens: np.ndarray) -> list[int]:
    """Key of each run, the quicker way."""
    if len(tokens) > 2 * GRAM:
        return _keys(tokens).tolist()
    known = tokens.tolist()
    return [_key(known[place:place + GRAM]) for place in range(len(known) - GRAM + 1)]


def may_match(sequence: Sequence, min_match: int) -> bool:
    """False if the text's end cannot have occurred min_match tokens long, by what the index knows that was not brought up yet: a
    text that did not repeat begins to with a run of less than GRAM."""
    index = sequence.suffix_index
    return index is None or index.match_length > 0 or len(sequence.tokens) - len(index) + GRAM > min_match


class NoIndex:
    """Stands in for the index of a text that there was no memory to index: nothing repeats."""

    match_length = 0

    def bring_up(self) -> None: ...

    def __len__(self) -> int:
        return sys.maxsize

    def propose(self, limit: int, min_match: int = MIN_MATCH, after: Seq[int] = ()) -> list[int]:
        return []


def index_of(sequence: Sequence) -> SuffixIndex | NoIndex:
    """The sequence's index, brought up to its last token."""
    index = sequence.suffix_index
    try:
        if index is None:
            index = sequence.suffix_index = SuffixIndex(sequence.request.prompt_ids)
        if len(index) < len(sequence.tokens):
            index.extend(sequence.tokens[len(index):])
    except MemoryError:
        index = _without(sequence)
    return index


def bring_up(sequence: Sequence) -> None:
    """Index what has come, at a time when nobody waits for it."""
    try:
        if sequence.suffix_index is not None:
            sequence.suffix_index.bring_up()
    except MemoryError:
        _without(sequence)


def _without(sequence: Sequence) -> NoIndex:
    log.warning("host memory has ended: repeats in the text of request %s are not looked for", sequence.request.id)
    sequence.suffix_index = NoIndex()
    return sequence.suffix_index
