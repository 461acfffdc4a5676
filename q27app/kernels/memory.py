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
    """Memory of one purpose, taken from the device in chunks and handed out in order; given back all at once.

    What is larger than a chunk gets one of its own, so that little is lost; `reserve` takes at once what is known to be needed.
    """

    def __init__(self, device: Device, name: str, chunk_bytes: int = 4 << 20) -> None:
        self.name, self.nbytes = name, 0
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: list[int] = []
        self._next = self._end = 0

    def take(self, nbytes: int) -> int:
        """Address of a fresh piece. Raises OutOfMemory."""
        size = aligned(max(nbytes, 1))
        if self._next + size > self._end:
            if size > self._chunk_bytes:
                return self._chunk(size)
            self._next = self._chunk(self._chunk_bytes)
            self._end = self._next + self._chunk_bytes
        address, self._next = self._next, self._next + size
        return address

    def reserve(self, nbytes: int) -> None:
        """Make room for so many bytes to come, in one chunk. What was left of the chunk before is lost."""
        size = aligned(nbytes)
        if self._next + size > self._end:
            self._next = self._chunk(size)
            self._end = self._next + size

    def _chunk(self, size: int) -> int:
        address = self._device.allocate(size)
        self._chunks.append(address)
        self.nbytes += size
        return address

    def take_zeros(self, nbytes: int) -> int:
        address = self.take(nbytes)
        self._device.fill(address, nbytes)
        return address

    def release(self) -> None:
        for chunk in self._chunks:
            self._device.release(chunk)
        self._chunks, self._next, self._end, self.nbytes = [], 0, 0, 0


class Tally:
    """Stands in for an arena and only counts."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        self.nbytes += aligned(max(nbytes, 1))
        return 0

    take_zeros = take


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
