"""How keys and values are stored: a table of formats, each with its bytes, its needs, and encode and decode in NumPy.

    name   key of a head   value of a head   bits
    fp32   4 bytes x dim   4 bytes x dim     exact; what the NumPy backend takes by default
    fp16   2 bytes x dim   2 bytes x dim     IEEE half, round to nearest even, saturating at 65,504
    fp8    1 byte  x dim   1 byte  x dim     e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN is 0x7f;
                                             round to nearest even, saturating at 448; no scale

Heads of a position are coded one by one. turbo3, turbo5k and turbo3v are reserved names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from q27app.errors import UsageError

FP8_MAX = np.float32(448.0)
FP16_MAX = np.float32(65504.0)


@dataclass(frozen=True)
class RowCodec:
    """Codes the head_dim values of one head.

    storage: dtype of the coded items. items(head_dim): how many a head takes. encode: f32 [..., head_dim] -> storage
    [..., items]; decode: the way back, always float32.
    """

    storage: np.dtype
    items: Callable[[int], int]
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]

    def row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of one position in one layer."""
        return heads * self.items(head_dim) * self.storage.itemsize


@dataclass(frozen=True)
class KVFormat:
    """One row of the table. min_compute_capability: the oldest NVIDIA card whose kernels read it."""

    name: str
    key: RowCodec
    value: RowCodec
    min_compute_capability: tuple[int, int]

    def key_row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of the keys of one position in one layer."""
        return self.key.row_bytes(heads, head_dim)

    def value_row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of the values of one position in one layer."""
        return self.value.row_bytes(heads, head_dim)


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


def _as_float32(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


def _one_each(head_dim: int) -> int:
    return head_dim


_FP32 = RowCodec(np.dtype(np.float32), _one_each, _as_float32, _as_float32)
_FP16 = RowCodec(np.dtype(np.float16), _one_each, encode_fp16, _as_float32)
_FP8 = RowCodec(np.dtype(np.uint8), _one_each, encode_fp8, decode_fp8)

KV_FORMATS: dict[str, KVFormat] = {
    form.name: form
    for form in (
        KVFormat("fp32", _FP32, _FP32, (7, 5)),
        KVFormat("fp16", _FP16, _FP16, (7, 5)),
        KVFormat("fp8", _FP8, _FP8, (8, 9)),
    )
}

RESERVED_KV_FORMATS = ("turbo3", "turbo5k", "turbo3v")


def kv_format(name: str) -> KVFormat:
    """Look a format up. Raises UsageError for a name that does not exist, or not yet."""
    form = KV_FORMATS.get(name)
    if form is not None:
        return form
    expected = f"Choose one of {', '.join(KV_FORMATS)}."
    if name in RESERVED_KV_FORMATS:
        raise UsageError(f"KV format {name} is not built into this version.", expected)
    raise UsageError(f"KV format {name!r} is unknown.", expected)
