"""KV blocks on their way between a card and the host: in any order, neighbours together, no bytes through the host's memory twice."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_state import MAX_RUN
from tests.kernels.counting_device import CARDS, CountingDevice
from tests.kernels.made import DEMO

BLOCKS = 2 * MAX_RUN + 6


class HoldingDevice(CountingDevice):
    """Holds what is copied to it, block by block, and where each download went."""

    def __init__(self) -> None:
        super().__init__(CARDS["wide"])
        self.stored: dict[int, np.ndarray] = {}
        self.places: list[np.ndarray | None] = []

    def upload(self, address: int, data: np.ndarray) -> None:
        for number, block in enumerate(data if data.ndim == 2 else ()):
            self.stored[address + number * data.shape[1]] = block.copy()

    def download(self, address: int, nbytes: int, out: np.ndarray | None = None) -> np.ndarray:
        self.places.append(out)
        size = len(next(iter(self.stored.values())))
        found = np.concatenate([self.stored[address + start] for start in range(0, nbytes, size)])
        if out is None:
            return found
        out[:] = found
        return out


@pytest.mark.parametrize("order", [[3], [0, 1, 2], [5, 4, 3], [7, 8, 2, 3, 4, 130], [*range(BLOCKS)], [*range(1, BLOCKS, 2), *range(0, BLOCKS, 2)]])
def test_blocks_leave_and_come_back_in_any_order(order):
    device, random = HoldingDevice(), np.random.default_rng(4)
    state = CudaBackend(device).allocate_state(DEMO, 3, 1, "fp16", 1, BLOCKS, 16)
    content = random.integers(0, 256, (BLOCKS, state.block_bytes), dtype=np.uint8)
    state.import_blocks(range(BLOCKS), content)
    found = state.export_blocks(order)
    assert np.array_equal(found, content[order])
    assert all(place is not None and np.shares_memory(place, found) for place in device.places), "copied twice"
    runs = 1 + sum(b != a + 1 for a, b in zip(order, order[1:]))
    assert runs <= len(device.places) <= runs + BLOCKS // MAX_RUN
    state.import_blocks(order[::-1], found)
    assert all(np.array_equal(device.stored[state.block(block)], content[other]) for block, other in zip(order[::-1], order))
