"""Matrix products whose rows keep their bits in any company.

Prefill multiplies tiles of 64 padded rows: one shape a matrix, so one order of summation. The row family multiplies each
row alone, in panels of the weight that stay in cache while the rows pass.
"""

from __future__ import annotations

import numpy as np

from q27app.kernels.numpy_pass import Pass, Tile
from q27app.kernels.numpy_workers import share

PANEL_FLOATS = 1 << 18
"""Weights of a panel, 1 MiB: half of a core's second-level cache."""


def multiply(work: Pass, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """out [rows, N] = x [rows, K] @ weight [N, K].T by the family of the pass."""
    if work.tiles is None:
        multiply_rows(x, weight, out)
    else:
        multiply_tiles(work.tiles, x, weight, out)


def multiply_tiles(tiles: list[Tile], x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """Tile by tile at full size. The weight stands first in the product: BLAS copies it faster that way."""
    share(lambda index: _multiply_tile(tiles[index], x, weight, out), len(tiles))


def _multiply_tile(tile: Tile, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    out[tile.rows] = (weight @ tile.padded(x).T).T[tile.places]


def multiply_rows(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """Row by row; the cuts of the weight depend on its shape alone."""
    panel = max(64, PANEL_FLOATS // weight.shape[1])
    for start in range(0, len(weight), panel):
        part = weight[start:start + panel]
        for row in range(len(x)):
            np.dot(part, x[row], out=out[row, start:start + panel])
