"""Drives a model directly, without an engine: prompts, single steps, drafts, for tests of the model room and of the card."""

from __future__ import annotations

import numpy as np

from q27app.kernels import open_backend
from q27app.kernels.batch import BLOCK_POSITIONS, Batch
from q27app.model.forward import Model, load_model
from q27app.weights.container import open_container


class Run:
    """One sequence in slot 0, blocks 0.. in order; on the NumPy backend, or the one given."""

    def __init__(self, path, context: int = 512, kv_format: str = "fp32", backend=None) -> None:
        self.container = open_container(path)
        self.backend = backend or open_backend("numpy")
        self.model: Model = load_model(self.backend, self.container, max_rows=context, max_logit_rows=context)
        blocks = -(-context // BLOCK_POSITIONS)
        self.state = self.model.allocate_state(kv_format, 2, blocks, 16)
        self.table = np.arange(blocks, dtype=np.int32)[None]
        self.length = 0

    def batch(self, phase: str, tokens, positions, logit_rows, deferred: bool = False) -> Batch:
        return Batch(
            phase=phase,
            tokens=np.asarray(tokens, np.int32),
            positions=np.asarray(positions, np.int32),
            row_starts=np.asarray([0, len(tokens)], np.int32),
            slots=np.zeros(1, np.int32),
            block_tables=self.table,
            logit_rows=np.asarray(logit_rows, np.int32),
            deferred=deferred,
        )

    def feed(self, tokens, phase: str = "prefill", deferred: bool = False) -> np.ndarray:
        """Append tokens; logits of every row [rows, vocab]."""
        positions = np.arange(self.length, self.length + len(tokens))
        batch = self.batch(phase, tokens, positions, np.arange(len(tokens)), deferred)
        logits = self.backend.download(self.model.forward(batch, self.state)).copy()
        if not deferred:
            self.length += len(tokens)
        return logits

    def final(self) -> np.ndarray:
        return self.backend.download(self.model.final).copy()

    def draft(self, token: int, first: bool, position: int) -> np.ndarray:
        """One draft step from a token; logits [vocab]."""
        batch = self.batch("draft", [token], [position], [0])
        return self.backend.download(self.model.draft(batch, self.state, first)).copy()[0]
