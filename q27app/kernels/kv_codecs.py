"""How the numbers of one head are coded: the codec of a row, and the plain ones.

    fp32   4 bytes a number   exact
    fp16   2 bytes            IEEE half, round to nearest even, saturating at 65,504
    fp8    1 byte             e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN is 0x7f; round to nearest
                              even, saturating at 448; no scale

Those that turn a row before they code it stand in `kv_turned.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FP8_MAX = np.float32(448.0)
FP16_MAX = np.float32(65504.0)


def as_float32(values: np.ndarray) -> np.ndarray:
    """values as float32; the same array where they are."""
    return np.asarray(values, np.float32)


@dataclass(frozen=True)
class RowCodec:
    """Codes the head_dim values of one head.

    storage: dtype of the coded items. items(head_dim): how many a head takes. encode: f32 [..., head_dim] -> storage
    [..., items]; decode: the way back, float32 in the frame of the code. turn: f32 [..., head_dim] into that frame, where
    products with decoded rows are those of the originals; turn_back: out of it. Both keep the array where there is no frame.
    multiple: head_dim must be one of it. low_bits: of an index, without its highest; 0: no indices.
    """

    storage: np.dtype
    items: Callable[[int], int]
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]
    turn: Callable[[np.ndarray], np.ndarray] = as_float32
    turn_back: Callable[[np.ndarray], np.ndarray] = as_float32
    multiple: int = 1
    low_bits: int = 0

    def row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of one position in one layer."""
        return heads * self.items(head_dim) * self.storage.itemsize


def encode_fp16(values: np.ndarray) -> np.ndarray:
    """float32 -> float16, nearest even, saturating; NaN stays NaN."""
    return np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16)


def encode_fp8(values: np.ndarray) -> np.ndarray:
    """float32 -> e4m3 bytes (uint8), nearest even, saturating at 448; NaN becomes 0x7f with its sign."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    magnitude = np.minimum(np.abs(values), FP8_MAX)
    # Normal numbers, 2^-6 and above: keep 3 mantissa bits; a carry moves into the exponent by itself.
    word = magnitude.view(np.uint32)
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9; 8 steps are 2^-6, whose code is 8.
    with np.errstate(invalid="ignore"):
        tiny = np.rint(magnitude * np.float32(512.0)).astype(np.uint32)
    code = np.where(magnitude < np.float32(2.0**-6), tiny, normal)
    code = np.where(np.isnan(values), 0x7F, code)
    return code.astype(np.uint8) | sign


def _fp8_table() -> np.ndarray:
    """float32 [256]: the value of every e4m3 byte."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[0x7F] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


_FP8_VALUES = _fp8_table()


def decode_fp8(codes: np.ndarray) -> np.ndarray:
    """e4m3 bytes -> float32."""
    return _FP8_VALUES[codes]


def _one_each(head_dim: int) -> int:
    return head_dim


FP32 = RowCodec(np.dtype(np.float32), _one_each, as_float32, as_float32)
FP16 = RowCodec(np.dtype(np.float16), _one_each, encode_fp16, as_float32)
FP8 = RowCodec(np.dtype(np.uint8), _one_each, encode_fp8, decode_fp8)
