"""The multi-token-prediction layer: one more attention layer that guesses the token after the next.

An entry at position p pairs the main model's hidden row of position p - 1 (after the final norm) with the token at p, and
predicts the token at p + 1. Position 0 has no entry; the layer masks it (`first_position = 1`). A chain of drafts feeds
the layer its own output (after its norm) with the drafted token at the next position.

The head is most of what a draft step reads. Ids of a vocabulary of byte pairs stand in the order in which merges were learned: most texts
are written with the first of them and with the special ones at the end. The narrow head knows no others: a draft step that uses
it costs half as much, and what it cannot draw is a guess less, never another text.
"""

from __future__ import annotations

from q27app.kernels.backend import Backend, Buffer
from q27app.model.config import ModelConfig
from q27app.model.layers import Scratch, run_layer
from q27app.model.weights import MtpLayer

COMMON_IDS, LAST_IDS = 98_304, 512
"""What the narrow head knows: the first ids and the last ones. Of English and code 1 token in 2,000 is another one, of German,
French and Spanish 1 in 200, of Russian, Chinese and Japanese 1 in 5."""
WORTH = 1.25
"""There is a narrow head where the whole one is so many times as large."""


def rare_ids(vocab_size: int, common_ids: int | None = None) -> tuple[int, int]:
    """The ids from .. to - 1 that the narrow head does not know; (0, 0): there is none. common_ids: None = COMMON_IDS, 0 = all."""
    common_ids = COMMON_IDS if common_ids is None else common_ids
    first, end = common_ids // 32 * 32, (vocab_size - LAST_IDS) // 32 * 32
    return (first, end) if 0 < first < end and vocab_size >= WORTH * (first + vocab_size - end) else (0, 0)


class MtpPass:
    """Runs the draft layer on the batch that the backend has begun."""

    def __init__(self, backend: Backend, config: ModelConfig, weights: MtpLayer, scratch: Scratch, max_rows: int,
                 common_ids: int | None = None) -> None:
        self.rare = rare_ids(config.vocab_size, common_ids)
        self._narrow_head = backend.without_rows(weights.head, self.rare) if self.rare[1] else weights.head
        self.backend, self.weights, self.scratch = backend, weights, scratch
        shape = (max_rows, config.hidden_size)
        self.x = backend.empty(shape, "float32", "mtp_residual")
        self.hidden = backend.empty(shape, "float32", "mtp_hidden")
        self.output = backend.empty(shape, "float32", "mtp_output")

    def warm(self, final: Buffer, compute: bool) -> None:
        """Write entries for the rows of the pass that gave `final` [rows, hidden]; keeps the slots' hidden rows current."""
        hidden = self.hidden.rows(final.shape[0])
        self.backend.previous_hidden(final, hidden)
        if compute:
            weights, rows = self.weights, hidden.shape[0]
            y = self.scratch.attention_in.rows(rows)
            self.backend.project(weights.layer.norm, weights.layer.project, self._fuse(hidden), y)
            self.backend.attend(y, weights.layer, None)

    def draft(self, rows: int, first: bool, logits: Buffer, is_narrow: bool = False) -> Buffer:
        """One draft step; logits [rows, vocab]. The layer's own output becomes the next step's hidden rows. is_narrow: there are no
        logits of the ids from self.rare[0] to self.rare[1] - 1."""
        hidden = self.hidden.rows(rows) if first else self.output.rows(rows)
        if first:
            self.backend.slot_hidden(hidden)
        x = self._fuse(hidden)
        run_layer(self.backend, self.weights.layer, x, self.scratch)
        self.backend.head(self.weights.final_norm, self._narrow_head if is_narrow else self.weights.head, x, self.output.rows(rows), logits)
        return logits

    def _fuse(self, hidden: Buffer) -> Buffer:
        weights, x = self.weights, self.x.rows(hidden.shape[0])
        self.backend.mtp_input(weights.embed_norm, weights.hidden_norm, weights.fuse, weights.embed, hidden, x)
        return x
