"""Copies through two halves of page-locked memory, on a device that copies when it is waited for and not before."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.staging import SHARE, Copier, Staging


class Late:
    """Copies are made at `wait`, those of the mark and all before it."""

    def __init__(self, size: int) -> None:
        self.memory, self.queue, self.num_marks, self.waited = np.zeros(size, np.uint8), [], 0, set()

    def upload_pinned(self, address, data):
        self.queue.append((address, data))

    def download_pinned(self, data, address):
        self.queue.append((data, address))

    def mark(self):
        self.num_marks += 1
        self.queue.append(self.num_marks)
        return self.num_marks

    def wait(self, event):
        assert event not in self.waited, "a mark is waited for once"
        self.waited.add(event)
        while event in self.queue:
            item = self.queue.pop(0)
            if isinstance(item, int):
                continue
            if isinstance(item[0], np.ndarray):
                item[0][:] = self.memory[item[1]:item[1] + len(item[0])]
            else:
                self.memory[item[0]:item[0] + len(item[1])] = item[1]


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 4097, 40_001, 9 << 20])
@pytest.mark.parametrize("place", [8192, 6 << 20])
def test_every_byte_arrives(size, place):
    device, staging = Late(size + 64), Staging(np.zeros(place, np.uint8))
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    staging.upload(device, 32, data)
    np.testing.assert_array_equal(device.memory[32:32 + size], data)
    assert not device.memory[:32].any() and not device.memory[32 + size:].any() and len(device.waited) == device.num_marks
    staging.close()


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 4097, 40_001, 9 << 20])
@pytest.mark.parametrize("place", [8192, 6 << 20])
def test_every_byte_comes_back(size, place):
    device, staging = Late(size + 64), Staging(np.zeros(place, np.uint8))
    device.memory[:] = np.random.default_rng(size).integers(0, 256, size + 64, dtype=np.uint8)
    out = np.zeros(size + 8, np.uint8)
    staging.download(device, 32, out[:size])
    np.testing.assert_array_equal(out[:size], device.memory[32:32 + size])
    assert not out[size:].any() and len(device.waited) == device.num_marks
    staging.close()


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("size", [0, 1, SHARE - 1, 2 * SHARE, 5 * SHARE + 3])
def test_several_threads_copy_every_byte_once(threads, size):
    copier, data = Copier(threads), np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    place = np.zeros(size + 8, np.uint8)
    for _ in range(2):
        copier.copy(place[:size], data)
        assert np.array_equal(place[:size], data) and not place[size:].any()
        copier.close()   # may be used again
