"""Endless reproducible weights without a random number for each: one zero-mean pool, repeated.

A tensor's bytes are a window of a periodic stream of codes; its scales are a window of a periodic stream of factors.
Periods are prime, so that rows (of any even width, fewer than PERIOD of them) begin at different places and no two
are equal, and two rows' overlap is always shifted, where random codes do not correlate. Windows are views: writing
costs no arithmetic.

The codes' mean is exactly zero: a mean of half a code would add up over the inputs of every matrix and drown the
residual stream.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, DType, row_bytes, scales_per_row
from q27app.weights.writer import TensorEntry

PERIOD = 1_048_573
SCALE_PERIOD = 65_521
CHUNK_BYTES = 16 << 20
"""Data bytes of one window; a row is never longer."""

Rows = tuple[np.ndarray, np.ndarray | None]
"""data uint8 [rows, row_bytes] and scales float16 [rows, groups] or None, as `Writer.write` takes them."""


class Stream:
    """Bytes that repeat after `period`; `rows` gives windows of up to CHUNK_BYTES as views."""

    def __init__(self, period: np.ndarray, room: int = CHUNK_BYTES) -> None:
        self.period = period.nbytes
        self.tile = np.resize(np.ascontiguousarray(period).view(np.uint8), self.period + room)
        self.tile.flags.writeable = False

    def rows(self, offset: int, count: int, width: int) -> np.ndarray:
        """uint8 [count, width]: the bytes from `offset` on."""
        start = offset % self.period
        return self.tile[start:start + count * width].reshape(count, width)


class Pool:
    """The codes and factors of one seed, and the tensors cut from them."""

    def __init__(self, seed: int) -> None:
        random = np.random.Generator(np.random.PCG64(seed))
        self.seed = seed
        self.nibbles = _balanced(random, 7)
        self.bytes = _balanced(random, 127)
        self.factors = random.uniform(0.5, 1.5, SCALE_PERIOD).astype(np.float32)
        factor_rms = np.sqrt(np.mean(self.factors**2))
        self._code_rms = {Q4_G64: _rms(self.nibbles) * factor_rms, Q8_G128: _rms(self.bytes) * factor_rms}
        self._streams = {Q4_G64: Stream(packed(self.nibbles)), Q8_G128: Stream(self.bytes)}
        self._unit = (self.bytes / _rms(self.bytes)).astype(np.float32)

    def random_for(self, name: str) -> np.random.Generator:
        """A generator of its own for each small tensor."""
        return np.random.Generator(np.random.PCG64([self.seed, crc32(name.encode())]))

    def tensor(self, entry: TensorEntry, std: float) -> "PoolTensor":
        """Rows of `entry` with standard deviation `std`; where they begin in the pool depends on the name."""
        place = crc32(entry.name.encode()) % PERIOD
        room = min(CHUNK_BYTES, entry.data_bytes)
        if entry.dtype in (F16, F32):
            width = 2 if entry.dtype is F16 else 4
            unit = self._unit
            if entry.rows * entry.cols <= PERIOD - place:  # a small tensor takes its window alone
                unit, place = unit[place:place + entry.rows * entry.cols], 0
            values = (unit * np.float32(std)).astype(np.float16 if width == 2 else np.float32)
            return PoolTensor(entry, Stream(values, room), place * width, None, 0)
        base = np.float32(std / self._code_rms[entry.dtype])
        groups = scales_per_row(entry.dtype, entry.cols)
        scale_room = min(room // row_bytes(entry.dtype, entry.cols) + 1, entry.rows) * groups * 2
        scales = Stream((self.factors * base).astype(np.float16), scale_room)
        return PoolTensor(entry, self._streams[entry.dtype], place, scales, 2 * (place % SCALE_PERIOD))


class PoolTensor:
    """One tensor as windows of a pool's streams. offset, scale_offset: bytes."""

    def __init__(self, entry: TensorEntry, data: Stream, offset: int, scales: Stream | None, scale_offset: int) -> None:
        self.entry, self.data, self.offset, self.scales, self.scale_offset = entry, data, offset, scales, scale_offset
        self.width = row_bytes(entry.dtype, entry.cols)
        self.scale_width = 2 * scales_per_row(entry.dtype, entry.cols)

    def rows(self, start: int, stop: int) -> Rows:
        count = stop - start
        data = self.data.rows(self.offset + start * self.width, count, self.width)
        if self.scales is None:
            return data, None
        scales = self.scales.rows(self.scale_offset + start * self.scale_width, count, self.scale_width)
        return data, scales.view(np.float16)


def packed(codes: np.ndarray) -> np.ndarray:
    """Q4 bytes of a periodic sequence of odd length n of codes -7 .. 7: n bytes, in which the sequence stands twice."""
    twice = np.resize(codes, 2 * len(codes)).astype(np.int16) + 8
    return (twice[0::2] | twice[1::2] << 4).astype(np.uint8)


def chunk_rows(dtype: DType, cols: int) -> int:
    """Rows of one window."""
    return max(1, CHUNK_BYTES // row_bytes(dtype, cols))


def _balanced(random: np.random.Generator, top: int) -> np.ndarray:
    """int8 [PERIOD]: every code as often as its negative, which stands in the mirror's place."""
    half = random.integers(-top, top + 1, PERIOD // 2, dtype=np.int8)
    return np.concatenate([half, np.zeros(1, np.int8), -half[::-1]])


def _rms(codes: np.ndarray) -> float:
    return float(np.sqrt(np.mean(codes.astype(np.float64) ** 2)))
