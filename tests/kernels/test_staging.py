"""Copies through two halves of page-locked memory, on a device that copies when it is waited for and not before; where memory or threads
end, what is copied is still whole, or nobody has it."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from q27app.kernels.slot_exports import SlotExports
from q27app.kernels.staging import SHARE, Copier, Staging
from tests.kernels.immediate_device import ImmediateDevice


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


def refuse_threads(monkeypatch, after: int) -> None:
    """The system gives so many threads more, then none."""
    start, given = threading.Thread.start, itertools.count()

    def refuses(thread):
        if next(given) >= after:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_where_the_system_gives_no_thread_one_copies_all_and_nobody_writes_later(monkeypatch, after):
    copier, data = Copier(4), np.random.default_rng(1).integers(0, 256, 5 * SHARE, dtype=np.uint8)
    place = np.zeros(5 * SHARE, np.uint8)
    refuse_threads(monkeypatch, after)
    copier.copy(place, data)
    assert np.array_equal(place, data)
    monkeypatch.undo()
    place[:] = 0
    copier.copy(place, data[::-1].copy())
    assert np.array_equal(place, data[::-1])
    copier.close()


def test_a_slot_that_no_memory_is_given_for_gives_its_place_back(monkeypatch):
    """Places are page-locked memory; there are few."""
    device = ImmediateDevice()
    device.download = lambda address, nbytes: np.full(nbytes, address, np.uint8)
    exports = SlotExports(device, 8)
    refuse_threads(monkeypatch, 0)
    taken = [exports.begin(address) for address in (1, 2)]
    assert exports.begin(3) is None

    class Place(np.ndarray):
        def copy(self):
            raise MemoryError("Unable to allocate 150 MiB")

    taken[0]._place = taken[0]._place.view(Place)
    with pytest.raises(MemoryError):
        taken[0].data()
    assert taken[1].data().tolist() == [2] * 8
    again = exports.begin(4)
    again._place = np.asarray(again._place)
    assert again.data().tolist() == [4] * 8 and exports.begin(5) is not None
    exports.close()
