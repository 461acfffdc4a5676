"""Causal attention over paged keys, tile by tile.

Keys are cut at multiples of a fixed number of positions, counted from 0; prefill cuts again at the row tile's own 64, the
only ones with a mask, and merges the softmax in ascending order, so no score matrix is larger than the rows of a tile times
that number. A row alone has one line of scores a head. All query heads of a KV head stand below each other in one product.
Where a format turns its rows, queries are turned once and what was attended is turned back once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from q27app.kernels.numpy_pass import TILE, Pass, Tile
from q27app.kernels.numpy_state import NumpyState, Pages
from q27app.kernels.numpy_workers import share

TILE_KEYS = 1024
"""Positions of keys for a tile of rows: scores of 6 heads, 1.5 MiB, stay in a core's second-level cache."""
ROW_PRODUCTS = 1 << 18
"""Multiplications of a row's heads with a piece of keys: so few that BLAS reads the keys in place, without a copy in its own
order. The piece is a multiple of 64 positions."""

Piece = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Keys [n, D], values [n, D], and None or hidden [n, 64]: True where a row of the tile does not see the key."""


def attend_pass(work: Pass, q: np.ndarray, kv_index: int, first_position: int, out: np.ndarray) -> None:
    """out [rows, A, D] = attention of q [rows, A, D] (normed and turned) over the stored keys, the rows' own included."""
    groups, (_, heads, dim) = work.state.geometry.num_kv_heads, q.shape
    repeat = heads // groups
    q = work.state.format.key.turn(q * (np.float32(1) / np.sqrt(np.float32(dim))))
    for g in range(groups):
        mine = slice(g * repeat, (g + 1) * repeat)
        if work.tiles is None:
            for row in range(len(q)):
                stop = int(work.batch.positions[row]) + 1
                pages = work.pages(int(work.seq_of_row[row]))
                out[row, mine] = attend_row(work.state, kv_index, g, pages, first_position, stop, q[row, mine])
            continue
        for tile in work.tiles:
            work.pages(tile.seq)
        share(lambda index, g=g, mine=mine: _attend_tile(work, work.tiles[index], q[:, mine], kv_index, g, first_position,
                                                         out[:, mine]), len(work.tiles))
    out[...] = work.state.format.value.turn_back(out)


def _attend_tile(
    work: Pass, tile: Tile, q: np.ndarray, kv_index: int, head: int, first_position: int, out: np.ndarray
) -> None:
    """out [rows, r, D] of the tile's rows, q [rows, r, D]: the heads of one KV head."""
    _, repeat, dim = q.shape
    stacked = np.ascontiguousarray(tile.padded(q).transpose(1, 0, 2)).reshape(repeat * TILE, dim)
    pieces = _tile_pieces(work.state, kv_index, head, work.pages(tile.seq), tile, first_position)
    attended = softmax_merge(stacked, pieces).reshape(repeat, TILE, dim)
    out[tile.rows] = attended[:, tile.places].transpose(1, 0, 2)


def attend_row(
    state: NumpyState, kv_index: int, head: int, pages: Pages, start: int, stop: int, q: np.ndarray
) -> np.ndarray:
    """softmax(q K^T) V of one row's heads q [r, D], already scaled, over positions start .. stop of a KV head."""
    weighted = np.zeros_like(q)
    if stop <= start:
        return weighted
    size = min(512, max(TILE, ROW_PRODUCTS // q.size // TILE * TILE))
    cuts = [(low, high, pages.rows(low, high)) for low, high in _cuts(start, stop, size)]
    scores = np.empty((len(q), stop - start), np.float32)
    for low, high, rows in cuts:
        scores[:, low - start:high - start] = (state.read_keys(kv_index, head, rows) @ q.T).T
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    for low, high, rows in cuts:
        weighted += scores[:, low - start:high - start] @ state.read_values(kv_index, head, rows)
    return weighted / scores.sum(axis=1, keepdims=True)


def _cuts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """start .. stop, cut at multiples of `size`."""
    while start < stop:
        cut = min(stop, (start // size + 1) * size)
        yield start, cut
        start = cut


def _tile_pieces(
    state: NumpyState, kv_index: int, head: int, pages: Pages, tile: Tile, first_position: int
) -> Iterator[Piece]:
    """The positions before the tile, then the tile's own up to its last row, padded with zeros to 64."""
    for low, high in _cuts(first_position, tile.base, TILE_KEYS):
        rows = pages.rows(low, high)
        yield state.read_keys(kv_index, head, rows), state.read_values(kv_index, head, rows), None
    start, end = max(tile.base, first_position), tile.base + tile.places.stop
    place = np.arange(TILE)
    hidden = (place[:, None] > place) | (place[:, None] < start - tile.base)
    keys = np.zeros((TILE, state.geometry.head_dim), np.float32)
    values = np.zeros_like(keys)
    if start < end:
        own, rows = slice(start - tile.base, end - tile.base), pages.rows(start, end)
        keys[own], values[own] = state.read_keys(kv_index, head, rows), state.read_values(kv_index, head, rows)
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
