"""A device that computes nothing and counts its memory: what the CUDA backend takes, without a card."""

from __future__ import annotations

import ctypes
from collections import defaultdict

import numpy as np

from q27app.errors import OutOfMemory
from q27app.kernels.card import Card
from q27app.kernels.cuda_args import CopyWords
from tests.kernels.immediate_device import ImmediateDevice

CARDS = {
    "wide": Card("counted", (9, 0), 132, 227 * 1024),
    "narrow": Card("counted, narrow", (8, 6), 82, 99 * 1024, 1536),
}


class CountingDevice(ImmediateDevice):
    """See `launch.Device`. total: bytes of the card. Every downloaded word is 1: one accepted row, token 1."""

    context_bytes = 400 << 20

    def __init__(self, card: Card, total: int = 141 << 30) -> None:
        self.card, self.total = card, total
        self.held: dict[int, int] = {}
        self.num_allocations = 0
        self.fails: Exception | None = None
        self._next = 1 << 20

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def free_bytes(self) -> int:
        return self.total - self.used

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_bytes():
            raise OutOfMemory(f"{nbytes} bytes are needed on the GPU and {self.free_bytes()} are free.")
        address, self._next = self._next, self._next + -(-nbytes // 256) * 256
        self.held[address] = nbytes
        self.num_allocations += 1
        return address

    def release(self, address: int) -> None:
        del self.held[address]

    def host_memory(self, nbytes: int) -> int:
        return 1 << 50

    def upload(self, address: int, data: np.ndarray) -> None: ...

    def download(self, address: int, nbytes: int, out: np.ndarray | None = None) -> np.ndarray:
        self.synchronize()
        out = np.empty(nbytes, np.uint8) if out is None else out
        out[:] = np.resize(np.array([1], np.int32).view(np.uint8), nbytes)
        return out

    def copy(self, target: int, source: int, nbytes: int) -> None: ...

    def fill(self, address: int, nbytes: int) -> None: ...

    def module(self, job):
        return defaultdict(int)

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        self.num_launches += 1
        if isinstance(args, CopyWords) and not args.is_ready:   # it is the host's memory that is written
            (ctypes.c_int32 * args.words).from_address(args.target)[:] = [1] * args.words

    def synchronize(self) -> None:
        if self.fails is not None:
            raise self.fails

    def close(self) -> None:
        self.held.clear()
