"""Codecs that turn a row before they round it: 128 numbers become a norm and one small index each.

The turn makes any row look like 128 draws of one normal distribution, for which a few fixed levels are near the best:

    y = D2 H D1 x / sqrt(128)        D1, D2 diagonal signs; H the butterfly of strides 1, 2, 4, ... 64: (a, b) -> (a + b, a - b)
    x = D1 H D2 y / sqrt(128)

Products of two turned rows are those of the rows, so a query is turned once and the keys stay as they are; weighted sums of
turned values are turned back once.

    block of 128 numbers     3 bits: 50 bytes                            5 bits: 82 bytes
    norm                     fp16                                        fp16
    low bits                 2 a number, 32 bytes: number j in byte      4 a number, 64 bytes: even j in the low half of
                             j / 4, shift 2 (j % 4)                      byte j / 2, odd j in the high half
    highest bit              16 bytes: number j in byte j / 8, bit j % 8, in both

Encoding: n = sqrt(sum of squares), added as a tree: in each 4 consecutive numbers (0 + 1) + (2 + 3), then the 32 sums at
distances 16, 8, 4, 2, 1. x / n is turned; an index is the number of thresholds that are not above the number. The stored
norm is n / sqrt(sum of the chosen levels' squares), added alike, as fp16, saturating at 65,504. Inputs saturate at 65,504; a
block of n <= 1e-10 is all zero bytes; one with a NaN has the norm NaN (0x7e00) and indices 0. Every step is one rounded
float32 operation, so that each writer makes the same bytes (cu/wht.cuh).
"""

from __future__ import annotations

import numpy as np

from q27app.kernels.kv_codecs import FP16_MAX, RowCodec

BLOCK = 128
"""Numbers of a block: half a head of 256."""
SMALLEST_NORM = np.float32(1e-10)
FP16_NAN = 0x7E00

_D1 = "-++--+-+--+++++++-+-+--+++-++----++-++-+-++--+-++++-----+-++++-+--+---+---+---+++--+++--++-++-+--++-+-+-++++-+-++-++-----++-++-+"
_D2 = "++++-++-+---+---++--+-+-+--+-+++++---+------+++-+-+++--+------+++-+----+-+-+--++-+-++-+----+--+-+-+++--+-+-++--+-+-++-+-+-----+-"

LEVELS_3 = (0.021663, 0.066822, 0.118786, 0.190207)
THRESHOLDS_3 = (0.044243, 0.092804, 0.154496)
LEVELS_5 = (
    0.00582388, 0.01750547, 0.02928998, 0.04125080, 0.05346908, 0.06603809, 0.07906913, 0.09270022, 0.10710939, 0.12253633,
    0.13932019, 0.15797059, 0.17931595, 0.20486116, 0.23786362, 0.28821075,
)
THRESHOLDS_5 = (
    0.01166468, 0.02339773, 0.03527039, 0.04735994, 0.05975358, 0.07255360, 0.08588468, 0.09990481, 0.11482286, 0.13092826,
    0.14864540, 0.16864327, 0.19208856, 0.22136238, 0.26303717,
)
"""The positive halves; 0 is a threshold too."""


def _signs(text: str) -> np.ndarray:
    return np.array([1 if sign == "+" else -1 for sign in text], np.float32)


SIGNS_1, SIGNS_2 = _signs(_D1), _signs(_D2)
_SCALE = np.float32(1 / np.sqrt(128.0))


def _butterfly(x: np.ndarray) -> np.ndarray:
    """H x over the last axis of 128, in the order of the strides. x: [n, 128]; numbers of one place lie together inside."""
    now = np.ascontiguousarray(x.T)
    then = np.empty_like(now)
    stride = 1
    while stride < BLOCK:
        old, new = (array.reshape(BLOCK // (2 * stride), 2, stride, -1) for array in (now, then))
        np.add(old[:, 0], old[:, 1], out=new[:, 0])
        np.subtract(old[:, 0], old[:, 1], out=new[:, 1])
        now, then = then, now
        stride *= 2
    return np.ascontiguousarray(now.T)


def turn(x: np.ndarray) -> np.ndarray:
    """Every 128 numbers of the last axis into the frame of the code. x: f32 [..., 128 n]."""
    blocks = np.asarray(x, np.float32).reshape(-1, BLOCK)
    return (_butterfly(blocks * SIGNS_1) * _SCALE * SIGNS_2).reshape(x.shape)


def turn_back(y: np.ndarray) -> np.ndarray:
    """The way back. y: f32 [..., 128 n]."""
    blocks = np.asarray(y, np.float32).reshape(-1, BLOCK)
    return (_butterfly(blocks * SIGNS_2) * _SCALE * SIGNS_1).reshape(y.shape)


def _length(x: np.ndarray) -> np.ndarray:
    """sqrt of the sum of squares over the last axis of 128, added as the docstring says."""
    squares = (x * x).reshape(*x.shape[:-1], 32, 4)
    sums = (squares[..., 0] + squares[..., 1]) + (squares[..., 2] + squares[..., 3])
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return np.sqrt(sums[..., 0])


class _Turned:
    """A codec's tables. levels, thresholds: positive halves, ascending."""

    def __init__(self, levels: tuple[float, ...], thresholds: tuple[float, ...]) -> None:
        upper, above = np.array(levels, np.float32), np.array(thresholds, np.float32)
        self.levels = np.concatenate([-upper[::-1], upper])
        self.thresholds = np.concatenate([-above[::-1], np.zeros(1, np.float32), above])
        self.low_bits = len(levels).bit_length() - 1
        self.block_bytes = 2 + BLOCK * self.low_bits // 8 + BLOCK // 8
        """of 128 numbers"""
        per_byte = 8 // self.low_bits
        index = np.arange(1 << per_byte * (self.low_bits + 1))
        low, high = index & 0xFF, index >> 8
        parts = [(low >> self.low_bits * i & (len(levels) - 1)) | (high >> i & 1) << self.low_bits for i in range(per_byte)]
        self._values = self.levels[np.stack(parts, axis=-1)]
        """float32 [index, numbers of a byte]: index = the byte of low bits, above it the numbers' highest bits"""

    def items(self, head_dim: int) -> int:
        return head_dim // BLOCK * self.block_bytes

    def encode(self, x: np.ndarray) -> np.ndarray:
        blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
        blocks = np.clip(blocks, -FP16_MAX, FP16_MAX)
        lengths = _length(blocks)
        is_zero, is_nan = lengths <= SMALLEST_NORM, np.isnan(lengths)
        skipped = is_zero | is_nan
        divisor = np.where(skipped, np.float32(1), lengths)
        turned = turn(np.where(skipped[..., None], np.float32(0), blocks) / divisor[..., None])
        index = np.searchsorted(self.thresholds, turned.reshape(-1), side="right").astype(np.uint8).reshape(turned.shape)
        norms = np.minimum(divisor / _length(self.levels[index]), FP16_MAX).astype(np.float16).view(np.uint16)
        norms = np.where(is_nan, np.uint16(FP16_NAN), norms)
        index[skipped] = 0
        out = np.empty((*lengths.shape, self.block_bytes), np.uint8)
        out[..., :2] = norms[..., None].astype("<u2").view(np.uint8)
        low = (index & ((1 << self.low_bits) - 1)).reshape(*lengths.shape, -1, 8 // self.low_bits)
        shifts = np.arange(low.shape[-1], dtype=np.uint8) * np.uint8(self.low_bits)
        out[..., 2:-16] = np.bitwise_or.reduce(low << shifts, axis=-1)
        out[..., -16:] = np.packbits(index >> self.low_bits, axis=-1, bitorder="little")
        out[is_zero] = 0
        return out.reshape(*x.shape[:-1], -1)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        blocks = codes.reshape(*codes.shape[:-1], -1, self.block_bytes)
        norms = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
        high = np.unpackbits(blocks[..., -16:], axis=-1, bitorder="little")
        per_byte = 8 // self.low_bits
        weights = (1 << np.arange(8, 8 + per_byte)).astype(np.uint16)
        index = high.reshape(*blocks.shape[:-1], -1, per_byte) @ weights + blocks[..., 2:-16]
        values = self._values[index].reshape(*blocks.shape[:-1], BLOCK)
        return (values * norms).reshape(*codes.shape[:-1], -1)

    def codec(self) -> RowCodec:
        return RowCodec(np.dtype(np.uint8), self.items, self.encode, self.decode, turn, turn_back, BLOCK, self.low_bits)


THREE_BITS = _Turned(LEVELS_3, THRESHOLDS_3).codec()
FIVE_BITS = _Turned(LEVELS_5, THRESHOLDS_5).codec()
