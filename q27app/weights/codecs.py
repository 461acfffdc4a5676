"""Float32 rows to the bytes of a format and back, in NumPy: what every kernel's dequantisation must equal.

Rules, for a group of weights w with float32 arithmetic and h(x) = x rounded to float16:

    format    s                             code of w                        value of a code
    Q4_G64    max|w| / 7, 1e-8 if that is 0   clip(rint(w / s), -8, 7) + 8     (code - 8) * h(s)
    Q8_G128   max|w| / 127, 1e-8 if 0         clip(rint(w / s), -127, 127)     code * h(s)
    T2_G128   max|w|, 1e-8 if 0               clip(rint(w / s), -1, 1) + 1     (code - 1) * h(s); there is no code 3
    B1_G128   mean|w|                         1 if w >= 0 else 0               (2 code - 1) * h(s)

`rint` rounds half to even, the division uses the float32 s before h. Codes lie in column order from the low bits of a
byte up; Q8 codes are int8. T2 and B1 give ternary and binary weights back without loss.

Encoding works in blocks that stay in a core's cache and divides the rows among threads (NumPy releases the
interpreter).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from q27app.errors import FileFormatError
from q27app.weights.dtypes import (
    B1_G128,
    F16,
    F32,
    Q4_G64,
    Q8_G128,
    T2_G128,
    DType,
    require_readable,
    row_bytes,
    scales_per_row,
)

BLOCK_WEIGHTS = 1 << 17
"""Weights of one encoding step: 512 KiB of float32, so that its passes run in the second-level cache."""

MAX_THREADS = 8

_MAGIC = np.float32(3 << 22)
"""1.5 * 2^23: x + _MAGIC has rint(x) in its low mantissa bits for |x| < 2^22, rounded half to even by the adder."""

_SMALLEST_EXACT_SCALE = np.float32(2.0**-120)
"""Above it w / s is at most the top code by construction; below, s loses bits and codes must be clipped."""

# top code, lowest code, what is added so that stored codes start at 0
_LEVELS = {Q4_G64: (7, -8, 8), Q8_G128: (127, -127, 0), T2_G128: (1, -1, 1)}


def encode(
    values: np.ndarray, dtype: DType, name: str = "", threads: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Quantise `values` [rows, cols] (any float type).

    Returns data uint8 [rows, row_bytes] and scales float16 [rows, groups], or None for F32 and F16. `name` is the
    tensor's, for errors. FileFormatError: columns that the group does not divide; values that are not finite or that
    the format's float16 part cannot hold. threads: None takes the machine's cores, at most MAX_THREADS.
    """
    where = name or "tensor"
    require_readable(dtype, where)
    if values.ndim != 2:
        raise FileFormatError(f"{where}: {dtype.name} encodes [rows, cols], found shape {list(values.shape)}.")
    rows, cols = values.shape
    try:
        width, groups = row_bytes(dtype, cols), scales_per_row(dtype, cols)
    except FileFormatError as problem:
        raise FileFormatError(f"{where}: {problem.message}", problem.hint) from None
    data = np.empty((rows, width), np.uint8)
    scales = np.empty((rows, groups), np.float16) if groups else None
    if data.size:
        step = max(1, BLOCK_WEIGHTS // cols)
        _spread(lambda start, stop: _encode_rows(values, dtype, data, scales, start, stop, step), rows, step, threads)
    _refuse_unrepresentable(dtype, data, scales, where)
    return data, scales


def decode(dtype: DType, data: np.ndarray, scales: np.ndarray | None, cols: int, name: str = "") -> np.ndarray:
    """The float32 [rows, cols] of `data` uint8 [rows, row_bytes] and `scales` float16 [rows, cols / group].

    FileFormatError: a T2 code that does not exist. Scales are taken as they are; `container` refuses those that are
    not finite.
    """
    require_readable(dtype, name)
    rows = data.shape[0]
    if dtype in (F32, F16):
        stored = np.ascontiguousarray(data).view(np.float32 if dtype is F32 else np.float16)
        return stored.astype(np.float32).reshape(rows, cols)
    assert scales is not None
    values = np.empty((rows, cols), np.float32)
    step = max(1, BLOCK_WEIGHTS // max(1, cols))
    for first in range(0, rows, step):
        block = np.ascontiguousarray(data[first : first + step])
        if dtype is T2_G128 and _bad_ternary()[block].any():
            raise FileFormatError(
                f"{name or 'tensor'}: T2_G128 data holds the code 3, which does not exist; codes are 0, 1 and 2.",
                "The file is damaged; download or convert it again.",
            )
        codes = block.view(np.int8) if dtype is Q8_G128 else _expand(dtype, block)
        grouped = (len(block), cols // dtype.group, dtype.group)
        factors = scales[first : first + step].astype(np.float32)[:, :, None]
        np.multiply(codes.reshape(grouped), factors, out=values[first : first + step].reshape(grouped))
    return values


def _expand(dtype: DType, block: np.ndarray) -> np.ndarray:
    """Code values before the scale, float32 [rows, cols], of packed bytes [rows, row_bytes]."""
    table = _code_values(dtype)
    if dtype is B1_G128:
        return np.take(table, block, axis=0)
    # One element a byte: two floats move as one 64-bit number, four as one complex number.
    return np.take(table.view(np.uint64 if dtype is Q4_G64 else np.complex128).reshape(-1), block).view(np.float32)


def _spread(work: Callable[[int, int], None], rows: int, step: int, threads: int | None) -> None:
    """Call work(start, stop) over all rows, in one range for each thread."""
    count = threads or min(MAX_THREADS, os.cpu_count() or 1)
    count = max(1, min(count, rows // (2 * step)))
    if count == 1:
        work(0, rows)
        return
    borders = [rows * index // count for index in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, start, stop) for start, stop in zip(borders, borders[1:])]:
            future.result()


def _encode_rows(
    values: np.ndarray, dtype: DType, data: np.ndarray, scales: np.ndarray | None, start: int, stop: int, step: int
) -> None:
    """Encode rows start..stop of `values` into the same rows of `data` and `scales`, `step` rows at a time."""
    scratch = np.empty((min(step, stop - start), values.shape[1]), np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for first in range(start, stop, step):
            last = min(first + step, stop)
            block = np.ascontiguousarray(values[first:last], np.float32)
            if scales is None:
                data[first:last] = block.astype(np.float32 if dtype is F32 else np.float16).view(np.uint8)
            elif dtype is B1_G128:
                scales[first:last] = _encode_binary(block, data[first:last])
            else:
                scales[first:last] = _encode_levels(block, dtype, data[first:last], scratch[: last - first])


def _encode_levels(block: np.ndarray, dtype: DType, data: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Codes of `block` f32 [rows, cols] into `data`; returns the float32 scales [rows, groups] before rounding."""
    top, bottom, offset = _LEVELS[dtype]
    rows, cols = block.shape
    magnitudes = scratch.view(np.int32)
    np.bitwise_and(block.view(np.int32), np.int32(0x7FFFFFFF), out=magnitudes)
    # Magnitudes order like their bit patterns, and integers reduce several times faster; NaN sorts above all.
    peaks = np.maximum.reduceat(magnitudes.reshape(-1), np.arange(0, block.size, dtype.group)).view(np.float32)
    scale = np.divide(peaks, np.float32(top), out=peaks)
    scale[scale == 0] = np.float32(1e-8)
    steps = scratch.reshape(-1, dtype.group)
    np.divide(block.reshape(-1, dtype.group), scale[:, None], out=steps)
    if scale.min() < _SMALLEST_EXACT_SCALE:
        np.clip(steps, bottom, top, out=steps)
    steps += _MAGIC
    codes = scratch.view(np.uint32).astype(np.uint8)
    codes += np.uint8(offset)  # after the rounding: an odd offset would turn ties to odd
    if dtype is Q4_G64:
        np.copyto(data, _join_pairs(codes, 4), casting="unsafe")
    elif dtype is T2_G128:
        np.copyto(data, _join_pairs(_join_pairs(codes, 2).astype(np.uint8), 4), casting="unsafe")
    else:
        data[:] = codes
    return scale.reshape(rows, cols // dtype.group)


def _join_pairs(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each pair of neighbouring bytes as one number, of which the low byte counts: the first in its low `bits`."""
    pairs = codes.view("<u2")
    joined = pairs >> np.uint16(8 - bits)
    joined |= pairs
    return joined


def _encode_binary(block: np.ndarray, data: np.ndarray) -> np.ndarray:
    rows, cols = block.shape
    data[:] = np.packbits(block >= 0, axis=1, bitorder="little")
    return np.abs(block).reshape(rows, cols // B1_G128.group, B1_G128.group).mean(axis=2, dtype=np.float32)


def _refuse_unrepresentable(dtype: DType, data: np.ndarray, scales: np.ndarray | None, where: str) -> None:
    stored = scales
    if stored is None:
        stored = data.view(np.float32 if dtype is F32 else np.float16)
    bad = first_not_finite(stored)
    if bad is not None:
        part = f"scale of group {bad[1]}" if scales is not None else f"column {bad[1]}"
        raise FileFormatError(
            f"{where}: row {bad[0]}, {part} is not finite in {dtype.name} (the source holds a NaN, "
            "an infinity or a value that float16 cannot hold).",
            "Check the source file; a damaged download is the usual cause.",
        )


def first_not_finite(stored: np.ndarray) -> tuple[int, int] | None:
    """Row and column of the first NaN or infinity of a float16 or float32 array [rows, n]; None if all are finite."""
    exponent, bits = (0x7C00, np.uint16) if stored.dtype == np.float16 else (0x7F800000, np.uint32)
    step = max(1, BLOCK_WEIGHTS // max(1, stored.shape[1]))
    for first in range(0, stored.shape[0], step):
        patterns = np.ascontiguousarray(stored[first : first + step]).view(bits) & bits(exponent)
        if patterns.size and patterns.max() == exponent:
            row, col = divmod(int(np.argmax(patterns == exponent)), stored.shape[1])
            return first + row, col
    return None


@cache
def _code_values(dtype: DType) -> np.ndarray:
    """float32 [256, weights of a byte]: each byte's code values before the scale, for formats below a byte a weight."""
    byte = np.arange(256)[:, None]
    if dtype is Q4_G64:
        return (((byte >> np.array([0, 4])) & 15) - 8).astype(np.float32)
    if dtype is T2_G128:
        return (((byte >> np.arange(0, 8, 2)) & 3) - 1).astype(np.float32)
    return (2 * ((byte >> np.arange(8)) & 1) - 1).astype(np.float32)


@cache
def _bad_ternary() -> np.ndarray:
    """bool [256]: bytes with a code 3."""
    return (_code_values(T2_G128) == 2).any(axis=1)
