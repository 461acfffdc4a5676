"""Device memory: arenas that hand out pieces, and buffers, which are views of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from q27app.kernels.launch import Device

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """nbytes rounded up to the alignment of every piece."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory of one purpose, taken from the device in whole chunks and handed out in order; given back all at once."""

    def __init__(self, device: Device, name: str, chunk_bytes: int = 64 << 20) -> None:
        self.name, self.nbytes = name, 0
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: list[int] = []
        self._next = self._end = 0

    def take(self, nbytes: int) -> int:
        """Address of a fresh piece. Raises OutOfMemory."""
        size = aligned(max(nbytes, 1))
        if self._next + size > self._end:
            chunk = max(size, min(self._chunk_bytes, max(1 << 20, self._device.free_bytes() // 8)))
            self._next = self._device.allocate(chunk)
            self._end = self._next + chunk
            self._chunks.append(self._next)
            self.nbytes += chunk
        address, self._next = self._next, self._next + size
        return address

    def take_zeros(self, nbytes: int) -> int:
        address = self.take(nbytes)
        self._device.fill(address, nbytes)
        return address

    def release(self) -> None:
        for chunk in self._chunks:
            self._device.release(chunk)
        self._chunks, self._next, self._end, self.nbytes = [], 0, 0, 0


@dataclass(frozen=True)
class CudaBuffer:
    """An array on the device, row-major. `rows(n)` is a view of the first n rows."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    name: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def rows(self, count: int) -> "CudaBuffer":
        assert 0 <= count <= self.shape[0], (self.name, count, self.shape)
        return CudaBuffer(self.address, (count, *self.shape[1:]), self.dtype, self.name)

    def row(self, index: int) -> int:
        """Address of a row."""
        return self.address + index * self.row_bytes
