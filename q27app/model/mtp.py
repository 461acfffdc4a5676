"""The multi-token-prediction layer: one more attention layer that guesses the token after the next.

An entry at position p pairs the main model's hidden row of position p - 1 (after the final norm) with the token at p, and
predicts the token at p + 1. Position 0 has no entry; the layer masks it (`first_position = 1`). A chain of drafts feeds
the layer its own output (after its norm) with the drafted token at the next position.
"""

from __future__ import annotations

from q27app.kernels.backend import Backend, Buffer
from q27app.model.config import ModelConfig
from q27app.model.layers import Scratch, run_layer
from q27app.model.weights import MtpLayer


class MtpPass:
    """Runs the draft layer on the batch that the backend has begun."""

    def __init__(self, backend: Backend, config: ModelConfig, weights: MtpLayer, scratch: Scratch, max_rows: int) -> None:
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

    def draft(self, rows: int, first: bool, logits: Buffer) -> Buffer:
        """One draft step; logits [rows, vocab]. The layer's own output becomes the next step's hidden rows."""
        hidden = self.hidden.rows(rows) if first else self.output.rows(rows)
        if first:
            self.backend.slot_hidden(hidden)
        x = self._fuse(hidden)
        run_layer(self.backend, self.weights.layer, x, self.scratch)
        self.backend.head(self.weights.final_norm, self.weights.head, x, self.output.rows(rows), logits)
        return logits

    def _fuse(self, hidden: Buffer) -> Buffer:
        weights, x = self.weights, self.x.rows(hidden.shape[0])
        self.backend.mtp_input(weights.embed_norm, weights.hidden_norm, weights.fuse, weights.embed, hidden, x)
        return x
