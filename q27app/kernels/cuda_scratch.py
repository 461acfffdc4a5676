"""Scratch memory of the stages, allocated once for the largest pass and reused by every layer."""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_follow, cuda_ready
from q27app.kernels.card import MAX_CONTEXT, cut_count
from q27app.kernels.cuda_attention import ATTEND_ROWS, COUNTERS
from q27app.kernels.cuda_tiles import MAX_TILE_SPLITS, SIDE_BY_SIDE_ROWS
from q27app.kernels.cuda_weights import BORDER_BYTES
from q27app.kernels.memory import Arena, CudaBuffer


PAIRS = 32
"""Numbers of a row's share of the matrices of its block of positions (delta_chunk.cu)."""


class Scratch:
    """Addresses of the scratch areas. max_rows: rows of the largest pass; `wide_width`: floats of the widest joined row;
    ready_bytes: of rows that gate_up and the delta rule leave ready (cuda_ready.py)."""

    def __init__(self, arena: Arena, geometry, card, *, max_rows: int, num_blocks: int, halves_width: int, wide_width: int, ready_bytes: int) -> None:
        self.max_rows, self._halves_width = max_rows, halves_width
        heads, dim = geometry.num_heads, geometry.head_dim
        self._channels = (2 * geometry.delta_key_heads + geometry.delta_value_heads) * geometry.delta_head_dim
        self._value_heads = geometry.delta_value_heads
        self._query_row, self._query_heads = heads * dim, heads
        width = geometry.delta_value_heads * geometry.delta_head_dim
        self.max_splits = cut_count(card.attend_defines(), min(64 * num_blocks, MAX_CONTEXT))
        self.border = arena.take_zeros((card.num_sms + 1) * BORDER_BYTES)
        """What blocks of the row family leave to the next ones."""
        self.head_words = arena.take_zeros(min(max_rows, cuda_ready.HEAD_ROWS) * width * 4) if geometry.delta_head_dim == cuda_ready.READY_HEAD else 0
        """What blocks of the delta rule leave to the one that takes a head, as words; 0: heads of another size."""
        self.rope = arena.take(max_rows * geometry.rotary_dim * 4)
        self.frequencies = arena.take(geometry.rotary_dim // 2 * 8)
        self.attend_counters = arena.take_zeros(4 * COUNTERS)
        self.part_ml = arena.take(ATTEND_ROWS * self.max_splits * heads * 8)
        self.part_o = arena.take(ATTEND_ROWS * self.max_splits * heads * dim * 4)
        self._halves = arena.take(-(-max_rows // 64) * 64 * halves_width * 2)   # whole blocks of rows
        self._inverse = arena.take(max_rows * 4)
        self.staged = (self._halves, arena.take(32 * halves_width // 64 * 4), arena.take(16 * 4))
        """Of up to 16 rows of the row family, in fragment order: fp16 [units, rows, 64], starts [units, rows, 2], 1 / scale [rows]."""
        self.follow = arena.take_zeros(2 * cuda_follow.follow_parts(max_rows) * cuda_follow.FOLLOW_BYTES)
        """Two Follow for each 16 rows, of additions by turns."""
        self.followed = arena.take_zeros(cuda_follow.followed_bytes(max_rows, geometry.hidden_size))
        """Rows of the stream that an addition left ready for the norm behind it; zeros past their columns."""
        attended = 512 + cuda_ready.ready_bytes(max_rows, self._query_row)
        shared = max(max_rows * (self._channels + (4 + PAIRS) * self._value_heads) * 4 + 512, max_rows * (self._query_row * 2 + heads * 4) + attended,
                     max_rows * wide_width * 4, ready_bytes,
                     MAX_TILE_SPLITS * min(max_rows, SIDE_BY_SIDE_ROWS) * geometry.hidden_size * 4 if card.has_warpgroups else 0)
        self._shared, self._shared_bytes = arena.take(shared), shared

    def _check(self, rows: int) -> None:
        if rows > self.max_rows:
            raise Q27Error(f"a pass of {rows} rows, scratch was allocated for {self.max_rows}.")

    def halves(self, rows: int, width: int) -> tuple[int, int]:
        """fp16 rows [rows, width], float32 [rows]."""
        self._check(rows)
        assert width <= self._halves_width, (width, self._halves_width)
        return self._halves, self._inverse

    def channels(self, rows: int) -> tuple[int, int, int]:
        """float32 [rows, channels], [rows, value heads, 4], [rows, value heads, PAIRS]."""
        self._check(rows)
        gates = self._shared + -(-rows * self._channels * 4 // 256) * 256
        return self._shared, gates, gates + -(-rows * self._value_heads * 16 // 256) * 256

    def queries(self, rows: int) -> tuple[int, int]:
        """fp16 [rows, heads, head_dim], float32 [rows, heads]."""
        self._check(rows)
        return self._shared, self._shared + -(-rows * self._query_row * 2 // 256) * 256

    def attended(self, rows: int) -> int:
        """Room for rows that attention leaves ready, behind their queries."""
        end = self.queries(rows)[1] + rows * self._query_heads * 4
        return -(-end // 256) * 256

    def behind_queries(self, rows: int) -> tuple[int, int]:
        """All room behind the queries, and its bytes."""
        start = self.attended(rows)
        return start, self._shared + self._shared_bytes - start

    def holds(self, nbytes: int) -> bool:
        return nbytes <= self._shared_bytes

    def ready(self, nbytes: int) -> int:
        """Room for rows that are left ready, to the stage after."""
        assert nbytes <= self._shared_bytes, (nbytes, self._shared_bytes)
        return self._shared

    def split_sums(self, nbytes: int) -> int:
        """Room for the sums of K splits that run side by side."""
        assert nbytes <= self._shared_bytes, (nbytes, self._shared_bytes)
        return self._shared

    def wide(self, rows: int, width: int) -> CudaBuffer:
        """float32 [rows, width] for a joined or ungated row."""
        self._check(rows)
        assert rows * width * 4 <= self._shared_bytes, (rows, width)
        return CudaBuffer(self._shared, (rows, width), np.dtype(np.float32), "wide")
