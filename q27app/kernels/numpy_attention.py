"""Causal attention over paged keys, tile by tile, with the softmax merged in ascending order of keys.

Keys are cut at multiples of a fixed number of positions, counted from 0; prefill cuts again at the row tile's own 64, the
only ones with a mask. No score matrix is larger than the rows of a tile times that number. All query heads of a KV head
stand below each other in one product.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from q27app.kernels.numpy_pass import TILE, Pass, Tile
from q27app.kernels.numpy_state import NumpyState

TILE_KEYS = 1024
"""Positions of keys for a tile of rows: scores of 6 heads, 1.5 MiB, stay in a core's second-level cache."""
ROW_KEYS = 256
"""Positions of keys for one row: small enough for BLAS to read them in place, without a copy in its own order."""

Piece = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Keys [n, D], values [n, D], and None or hidden [n, 64]: True where a row of the tile does not see the key."""


def attend_pass(work: Pass, q: np.ndarray, kv_index: int, first_position: int, out: np.ndarray) -> None:
    """out [rows, A, D] = attention of q [rows, A, D] (normed and turned) over the stored keys, the rows' own included."""
    q = q * (np.float32(1) / np.sqrt(np.float32(q.shape[-1])))
    if work.tiles is None:
        for row in range(len(q)):
            _attend_row(work, row, q[row], kv_index, first_position, out[row])
        return
    for tile in work.tiles:
        _attend_tile(work, tile, tile.padded(q), kv_index, first_position, out)


def _attend_tile(
    work: Pass, tile: Tile, q: np.ndarray, kv_index: int, first_position: int, out: np.ndarray
) -> None:
    """q [64, A, D], padded."""
    groups, (_, heads, dim) = work.state.geometry.num_kv_heads, q.shape
    repeat = heads // groups
    end = tile.base + tile.places.stop
    table = work.batch.block_tables[tile.seq]
    for g in range(groups):
        mine = slice(g * repeat, (g + 1) * repeat)
        stacked = np.ascontiguousarray(q[:, mine].transpose(1, 0, 2)).reshape(repeat * TILE, dim)
        pieces = _tile_pieces(work.state, kv_index, g, table, tile.base, end, first_position)
        attended = softmax_merge(stacked, pieces).reshape(repeat, TILE, dim)
        out[tile.rows, mine] = attended[:, tile.places].transpose(1, 0, 2)


def _attend_row(
    work: Pass, row: int, q: np.ndarray, kv_index: int, first_position: int, out: np.ndarray
) -> None:
    """q [A, D]; out [A, D]. The row alone."""
    groups = work.state.geometry.num_kv_heads
    repeat = len(q) // groups
    table = work.batch.block_tables[work.seq_of_row[row]]
    stop = int(work.batch.positions[row]) + 1
    for g in range(groups):
        mine = slice(g * repeat, (g + 1) * repeat)
        pieces = _past_pieces(work.state, kv_index, g, table, first_position, stop, ROW_KEYS)
        out[mine] = softmax_merge(q[mine], pieces)


def _past_pieces(
    state: NumpyState, kv_index: int, head: int, table: np.ndarray, start: int, stop: int, size: int
) -> Iterator[Piece]:
    """Positions start .. stop, cut at multiples of `size`."""
    while start < stop:
        cut = min(stop, (start // size + 1) * size)
        keys, values = state.read_rows(kv_index, head, table, start, cut)
        yield keys, values, None
        start = cut


def _tile_pieces(
    state: NumpyState, kv_index: int, head: int, table: np.ndarray, base: int, end: int, first_position: int
) -> Iterator[Piece]:
    """The positions before the tile, then the tile's own up to `end`, padded with zeros to 64."""
    yield from _past_pieces(state, kv_index, head, table, first_position, base, TILE_KEYS)
    start = max(base, first_position)
    place = np.arange(TILE)
    hidden = (place[:, None] > place) | (place[:, None] < start - base)
    keys = np.zeros((TILE, state.geometry.head_dim), np.float32)
    values = np.zeros_like(keys)
    if start < end:
        keys[start - base:end - base], values[start - base:end - base] = state.read_rows(
            kv_index, head, table, start, end)
    yield keys, values, hidden


def softmax_merge(q: np.ndarray, pieces: Iterator[Piece]) -> np.ndarray:
    """softmax(q K^T) V over all pieces, q [rows, D] already scaled; rows that see nothing give zeros.

    Running maximum, sum and weighted values, rescaled when the maximum grows. Scores stand keys first, [n, rows]: BLAS
    copies the keys faster that way, or not at all. A mask repeats for each 64 rows."""
    rows, dim = q.shape
    top = np.full(rows, -np.inf, np.float32)
    total = np.zeros(rows, np.float32)
    weighted = np.zeros((rows, dim), np.float32)
    for keys, values, hidden in pieces:
        scores = keys @ q.T
        if hidden is not None:
            np.copyto(scores.reshape(len(keys), -1, TILE), -np.inf, where=hidden[:, None])
        new_top = np.maximum(top, scores.max(axis=0))
        shift = np.where(np.isneginf(new_top), np.float32(0), new_top)
        scores -= shift
        np.exp(scores, out=scores)
        rescale = np.exp(top - shift)
        total = total * rescale + np.ones(len(keys), np.float32) @ scores
        weighted *= rescale[:, None]
        weighted += scores.T @ values
        top = new_top
    return np.divide(weighted, total[:, None], out=weighted, where=total[:, None] != 0)
