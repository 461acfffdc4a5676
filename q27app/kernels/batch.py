"""The rows of one forward pass, as plain host arrays. A backend copies them into buffers of its own in `begin`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

BLOCK_POSITIONS = 64
"""Positions in a KV block and in a block of the delta rule, both counted from position 0 of a sequence."""

MAX_DECODE_ROWS = 16
"""Most rows of one sequence in a decode or verify pass."""

Phase = Literal["prefill", "decode", "verify", "draft"]


def in_flight(row: int) -> int:
    """A token that only the device knows. As the first one of a sequence: what row `row` of the pass before drew. As a later one:
    the draft of row `row` of the chain that `Backend.begin_ahead` began."""
    return -1 - row


MAX_KEEPS = 64
"""Most states that a prefill pass keeps on its way."""


@dataclass(frozen=True)
class Keep:
    """Slot `slot` gets the state that sequence `seq` of a prefill pass has after its first `rows` rows, at least 16, the last
    of them at a position 64 n - 1. The slot belongs to no sequence of the pass."""

    seq: int
    rows: int
    slot: int


@dataclass(frozen=True)
class Batch:
    """Rows of one or several sequences, grouped by sequence, positions ascending and contiguous in each.

    phase        chooses the kernel family, never the row count: "prefill" runs the tile family also for one row; the
                 others run the row family. "draft" rows go through the MTP layer only.
    tokens       int32 [rows]     a negative one, `in_flight(row)`, is known to the device alone
    positions    int32 [rows]     absolute position of each row in its sequence
    row_starts   int32 [seqs + 1] rows of sequence i are row_starts[i] .. row_starts[i + 1]
    slots        int32 [seqs]     the recurrent state of each sequence
    block_tables int32 [seqs, max_blocks] KV block of positions 64 b .. 64 b + 63; entries past the need are -1
    logit_rows   int32 [n]        rows whose logits are wanted, ascending
    deferred     True: the recurrent state is read but not written, and what `commit` needs is recorded (verify);
                 False: it is advanced in place (prefill, plain decode)
    keeps        prefill: states on the way that are copied into other slots
    """

    phase: Phase
    tokens: np.ndarray
    positions: np.ndarray
    row_starts: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray
    deferred: bool = False
    keeps: tuple[Keep, ...] = ()

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def is_single(self) -> bool:
        """One row of each sequence."""
        return self.num_rows == self.num_seqs

    @property
    def is_in_flight(self) -> bool:
        """Some tokens are known to the device alone."""
        return bool((self.tokens < 0).any())


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of each logit row of a pass, as arrays of n rows (see `engine.request.SamplingParams`).

    positions     int64 [n]  absolute position of the token to be drawn: with the seed it names the noise
    penalty_*     sparse counts of generated tokens: row i has ids penalty_ids[penalty_starts[i]:penalty_starts[i+1]]
                  (int32, distinct) with counts penalty_counts (int32); drafts before row i of the same pass included
    masks         uint32 [n, ceil(vocab / 32)] or None; a row of ones where a sequence has no grammar
    num_logprobs  int32 [n]  -1 = none wanted
    """

    temperature: np.ndarray   # float32
    top_k: np.ndarray         # int32, 0 = off
    top_p: np.ndarray         # float32
    min_p: np.ndarray         # float32
    presence: np.ndarray      # float32
    frequency: np.ndarray     # float32
    seeds: np.ndarray         # uint64
    positions: np.ndarray     # int64
    penalty_starts: np.ndarray
    penalty_ids: np.ndarray
    penalty_counts: np.ndarray
    num_logprobs: np.ndarray
    masks: np.ndarray | None = None


@dataclass(frozen=True)
class Drafted:
    """A chain of drafts. tokens: int32 [steps, rows]; margins: float32 [steps, rows], top1 - top2 of the raw logits."""

    tokens: np.ndarray
    margins: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """What one download brings back. n = logit rows.

    tokens    int32 [n]    the drawn id of each row
    margins   float32 [n]  top1 - top2 of the raw logits
    accepted  int32 [seqs] rows of each sequence that became text (1 + agreeing drafts); all ones without drafts
    logprobs  one entry a row: None, or (logprob of the drawn id, ids int32 [k], logprobs float32 [k])
    """

    tokens: np.ndarray
    margins: np.ndarray
    accepted: np.ndarray
    logprobs: list = field(default_factory=list)
