"""One sequence fed to a network directly, without an engine: logits of every row, and chains of drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS, Batch

CHUNK = 256
"""Rows of a pass of `logits`; a multiple of BLOCK_POSITIONS, so that its cuts are those of serving."""


@dataclass
class Feeder:
    """One sequence in slot 0 of a model. length: positions fed."""

    model: Any
    state: Any
    table: np.ndarray
    length: int = 0

    @classmethod
    def open(cls, container: Any, context: int, backend: Any = None, kv_format: str = "fp32", max_rows: int | None = None) -> Feeder:
        """backend: an open one, default NumPy. max_rows: most rows of a pass, default all of `context`."""
        from q27app.kernels import open_backend
        from q27app.model.forward import load_model

        rows = max_rows or context
        model = load_model(backend or open_backend("numpy"), container, max_rows=rows, max_logit_rows=rows)
        blocks = -(-context // BLOCK_POSITIONS)
        return cls(model, model.allocate_state(kv_format, 1, blocks, 16), np.arange(blocks, dtype=np.int32)[None])

    def restart(self) -> None:
        """Forget the sequence."""
        self.state.clear_slot(0)
        self.length = 0

    def _batch(self, phase: str, tokens: Sequence[int], first: int, logit_rows: Sequence[int]) -> Batch:
        positions = np.arange(first, first + len(tokens), dtype=np.int32)
        return Batch(
            phase=phase, tokens=np.asarray(tokens, np.int32), positions=positions, slots=np.zeros(1, np.int32),
            row_starts=np.asarray([0, len(tokens)], np.int32), block_tables=self.table,
            logit_rows=np.asarray(logit_rows, np.int32), deferred=False,
        )

    def feed(self, tokens: Sequence[int], phase: str, all_logits: bool = False, warm_mtp: bool = True) -> np.ndarray:
        """Logits of every row, or of the last: [rows, vocabulary]."""
        rows = range(len(tokens)) if all_logits else (len(tokens) - 1,)
        logits = self.model.forward(self._batch(phase, tokens, self.length, rows), self.state, warm_mtp)
        self.length += len(tokens)
        return self.model.backend.download(logits).copy()

    def logits(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """A whole text from position 0, CHUNK rows at a time: float32 [rows, vocabulary]."""
        self.restart()
        for start in range(0, len(tokens), CHUNK):
            yield self.feed(tokens[start:start + CHUNK], "prefill", all_logits=True, warm_mtp=False)

    def drafts(self, token: int, count: int) -> list[int]:
        """The chain that the draft layer writes after `token`, the pending one."""
        found: list[int] = []
        for depth in range(count):
            batch = self._batch("draft", [found[-1] if found else token], self.length + depth, [0])
            logits = self.model.backend.download(self.model.draft(batch, self.state, depth == 0))
            found.append(int(np.argmax(logits[0])))
        return found
