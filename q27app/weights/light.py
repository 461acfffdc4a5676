"""The draft layer at the precision of the layers that it drafts for.

Tiers keep the draft layer at Q8. Where the main layers are Q4 a draft step spends two fifths of its time on reading it, and what
a draft loses to Q4 can only be a guess less that is right: the text never depends on it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from q27app.weights.codecs import MAX_THREADS, encode
from q27app.weights.container import Container, Tensor
from q27app.weights.dtypes import Q4_G64, Q8_G128, row_bytes, scales_per_row

MEASURE = "blk.0.ffn_gate.weight"
"""The matrix whose format is that of the main layers."""
KEPT = ("attn_k.weight", "attn_v.weight")
"""Main layers have these at Q8 as well."""


ROWS = 512
"""Rows that are requantised at a time."""


class Requantised(Tensor):
    """A matrix at Q4 whose arrays are being made; who wants them waits, and gets the FileFormatError that ended it."""

    def __init__(self, of: Tensor, pool: ThreadPoolExecutor) -> None:
        for name, value in (("name", of.name), ("dtype", Q4_G64), ("shape", of.shape), ("source", of.source)):
            object.__setattr__(self, name, value)
        data = np.empty((of.rows, row_bytes(Q4_G64, of.cols)), np.uint8)
        scales = np.empty((of.rows, scales_per_row(Q4_G64, of.cols)), np.float16)

        def some(start: int) -> None:
            rows = slice(start, start + ROWS)
            data[rows], scales[rows] = encode(of.values(start, start + ROWS), Q4_G64, of.name, threads=1)

        parts = [pool.submit(some, start) for start in range(0, of.rows, ROWS)]
        object.__setattr__(self, "_made", (data, scales, parts))

    def _wait(self) -> tuple[np.ndarray, np.ndarray]:
        data, scales, parts = self._made
        for part in parts:
            part.result()
        return data, scales

    @property
    def data(self) -> np.ndarray:
        return self._wait()[0]

    @property
    def scales(self) -> np.ndarray:
        return self._wait()[1]

    @property
    def nbytes(self) -> int:
        data, scales, _ = self._made
        return data.nbytes + scales.nbytes


class LightContainer(Container):
    """A container some of whose matrices are being made in a pool. `close` ends that: parts that were not begun never are, and nobody
    is at work any more when it returns."""

    def __init__(self, of: Container, heavy: dict[str, Tensor]) -> None:
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "q27app-light")
        try:
            light = {name: Requantised(tensor, self._pool) for name, tensor in heavy.items()}
        except BaseException:
            self._end()
            raise
        super().__init__(of.path, of.metadata, of.tensors | light)

    def _end(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self._end()
        super().close()


def with_light_drafts(container: Container, draft_layer: int) -> Container:
    """The container with its draft layer's Q8 matrices requantised to Q4, or itself where the main layers are not Q4. That goes on
    while others are loaded, and no longer than until it is closed.

    draft_layer: number of the draft layer's block. The other arrays are the container's own."""
    tensors = container.tensors
    if MEASURE not in tensors or tensors[MEASURE].dtype is not Q4_G64:
        return container
    block = f"blk.{draft_layer}."
    heavy = {name: tensor for name, tensor in tensors.items()
             if name.startswith(block) and tensor.dtype is Q8_G128 and not name.endswith(KEPT)}
    return LightContainer(container, heavy) if heavy else container
