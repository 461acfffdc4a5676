"""The gated delta rule over a prefill chunk, in blocks of 64 positions counted from 0.

Inside a block, with G_i the sum of log decays up to and including i, and d_i = beta_i (v_i - prediction):

    (I + A) D = beta (V - e^G K S)        A_ij = beta_i e^(G_i - G_j) k_i k_j  for j < i
    O         = e^G Q S + M D             M_ij = e^(G_i - G_j) q_i k_j         for j <= i
    S'        = e^(G_last) S + K^T (e^(G_last - G) D)

which is `reference.delta_step` 64 times, as matrix products. I + A is solved forwards in pieces of 16 rows, with the 16 x 16
inverses built row by row: powers of A would cancel badly where keys repeat. Every exponent is a difference of sums that
only fall, so it is at most 0. Places without a row hold zeros (g = 0, beta = 0) and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS
from q27app.kernels.numpy_workers import share

if TYPE_CHECKING:
    from q27app.kernels.numpy_pass import Tile

PIECE = 16
_PIECES = BLOCK_POSITIONS // PIECE
_LOWER = np.tril(np.ones((BLOCK_POSITIONS, BLOCK_POSITIONS), bool))
_STRICTLY_LOWER = np.tril(_LOWER, -1)


def delta_block(state: np.ndarray, q, k, v, beta, g) -> np.ndarray:
    """One block, in place. state [Nv, Dk, Dv]; q, k [64, Nk, Dk]; v [64, Nv, Dv]; beta, g [64, Nv] -> o [64, Nv, Dv]."""
    _, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    grouped = (value_heads // key_heads, key_heads)
    stacked = np.concatenate([k, q]).transpose(1, 0, 2)                      # [Nk, 128, Dk]
    stacked = np.ascontiguousarray(stacked)
    keys = stacked[:, :BLOCK_POSITIONS]
    products = np.matmul(stacked, keys.transpose(0, 2, 1))                   # [Nk, 128, 64]: k k, then q k
    decayed = np.cumsum(g.T, axis=1, dtype=np.float64)                       # [Nv, 64]: G
    decay = np.exp(np.minimum(decayed[:, :, None] - decayed[:, None], 0).astype(np.float32))
    decay = decay.reshape(*grouped, BLOCK_POSITIONS, BLOCK_POSITIONS)
    from_start = np.exp(decayed.astype(np.float32))[:, :, None]              # e^G [Nv, 64, 1]
    to_end = np.exp((decayed[:, -1:] - decayed).astype(np.float32))[:, :, None]
    betas = np.ascontiguousarray(beta.T)[:, :, None]                         # [Nv, 64, 1]
    flat = (value_heads, BLOCK_POSITIONS, BLOCK_POSITIONS)
    mixing = (decay * products[:, :BLOCK_POSITIONS] * _STRICTLY_LOWER).reshape(flat) * betas
    reading = (decay * products[:, BLOCK_POSITIONS:] * _LOWER).reshape(flat)
    old = np.matmul(stacked, state.reshape(*grouped, key_dim, value_dim))    # [r, Nk, 128, Dv]
    old = old.reshape(value_heads, 2 * BLOCK_POSITIONS, value_dim)
    right = betas * (v.transpose(1, 0, 2) - from_start * old[:, :BLOCK_POSITIONS])
    corrections = solve_unit_lower(mixing, right)
    out = from_start * old[:, BLOCK_POSITIONS:] + np.matmul(reading, corrections)
    state *= from_start[:, -1:]
    fading = (to_end * corrections).reshape(*grouped, BLOCK_POSITIONS, value_dim)
    state += np.matmul(keys.transpose(0, 2, 1), fading).reshape(state.shape)
    return out.transpose(1, 0, 2)


def delta_tiles(tiles: Sequence[Tile], state: np.ndarray, start: int, inputs, outputs: np.ndarray, kept: dict[int, np.ndarray]) -> None:
    """Whole blocks of one sequence; outputs [rows of the batch, Nv, Dv], inputs of its rows, which begin at `start`. kept: number
    of rows -> where the state after them goes.

    A key head and the value heads that read it, i with i % Nk the key head, depend on no other."""
    q, k, v, beta, g = inputs
    key_heads = k.shape[1]

    def run(head: int) -> None:
        mine = slice(head, None, key_heads)
        parts = (q[:, head:head + 1], k[:, head:head + 1], v[:, mine], beta[:, mine], g[:, mine])
        for tile in tiles:
            placed = [_place(part[tile.start - start:tile.stop - start], tile.first) for part in parts]
            outputs[tile.rows, mine] = delta_block(state[mine], *placed)[tile.places]
            if tile.stop - start in kept:
                kept[tile.stop - start][mine] = state[mine]

    share(run, key_heads)


def _place(part: np.ndarray, first: int) -> np.ndarray:
    """The rows at their places in a block of 64, zeros elsewhere."""
    if len(part) == BLOCK_POSITIONS:
        return part
    out = np.zeros((BLOCK_POSITIONS, *part.shape[1:]), np.float32)
    out[first:first + len(part)] = part
    return out


def solve_unit_lower(strict: np.ndarray, right: np.ndarray) -> np.ndarray:
    """D with (I + strict) D = right; strict [n, 64, 64] strictly lower triangular, right [n, 64, columns]."""
    count = len(strict)
    cut = strict.reshape(count, _PIECES, PIECE, _PIECES, PIECE)
    diagonal = np.stack([cut[:, i, :, i] for i in range(_PIECES)], axis=1)   # [n, 4, 16, 16]
    inverses = _invert_unit_lower(diagonal)
    solved = np.empty_like(right)
    for i in range(_PIECES):
        rows, before = slice(i * PIECE, (i + 1) * PIECE), slice(0, i * PIECE)
        rest = right[:, rows]
        if i:
            rest = rest - np.matmul(strict[:, rows, before], solved[:, before])
        solved[:, rows] = np.matmul(inverses[:, i], rest)
    return solved


def _invert_unit_lower(strict: np.ndarray) -> np.ndarray:
    """(I + strict)^-1 of [..., 16, 16] strictly lower matrices, row by row."""
    inverse = np.zeros_like(strict)
    inverse[...] = np.eye(PIECE, dtype=np.float32)
    for row in range(1, PIECE):
        inverse[..., row, :row] -= np.matmul(strict[..., row:row + 1, :row], inverse[..., :row, :row])[..., 0, :]
    return inverse
