"""The draft layer at the precision of the layers that it drafts for.

Tiers keep the draft layer at Q8. Where the main layers are Q4 a draft step spends two fifths of its time on reading it, and what
a draft loses to Q4 can only be a guess less that is right: the text never depends on it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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


def with_light_drafts(container: Container, draft_layer: int) -> Container:
    """The container with its draft layer's Q8 matrices requantised to Q4, or itself where the main layers are not Q4.

    draft_layer: number of the draft layer's block. The other arrays are the container's own. Raises FileFormatError."""
    tensors = container.tensors
    if MEASURE not in tensors or tensors[MEASURE].dtype is not Q4_G64:
        return container
    block = f"blk.{draft_layer}."
    heavy = {name: tensor for name, tensor in tensors.items()
             if name.startswith(block) and tensor.dtype is Q8_G128 and not name.endswith(KEPT)}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        light = {name: _requantised(tensor, pool) for name, tensor in heavy.items()}
    return Container(container.path, container.metadata, tensors | light) if light else container


def _requantised(tensor: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    data = np.empty((tensor.rows, row_bytes(Q4_G64, tensor.cols)), np.uint8)
    scales = np.empty((tensor.rows, scales_per_row(Q4_G64, tensor.cols)), np.float16)

    def some(start: int) -> None:
        rows = slice(start, start + ROWS)
        data[rows], scales[rows] = encode(tensor.values(start, start + ROWS), Q4_G64, tensor.name, threads=1)

    list(pool.map(some, range(0, tensor.rows, ROWS)))
    return replace(tensor, dtype=Q4_G64, data=data, scales=scales)
