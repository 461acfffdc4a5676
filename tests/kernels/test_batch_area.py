"""The arrays of a pass on a device: what is copied, and that the host's copy is not written over too soon."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.cuda_batch import BatchArea, area_bytes
from q27app.kernels.staging import Slates
from tests.kernels.made import make_batch


class Memory:
    """A device of one array, whose copies happen when they are waited for."""

    is_recording = False

    def __init__(self) -> None:
        self.words = np.full(1 << 12, -7, np.int32)
        self.queued: list[tuple[int, np.ndarray]] = []
        self.num_bytes: list[int] = []
        self.num_waits = 0
        self.now = self.passed = 0

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def allocate(self, nbytes):
        return 0

    def upload_pinned(self, address, data):
        self.queued.append((address // 4, data))   # read when it happens, as a card does
        self.num_bytes.append(data.nbytes)

    def moment(self):
        return self.now

    def has_passed(self, moment):
        return self.passed > moment

    def synchronize(self):
        for at, data in self.queued:
            self.words[at:at + len(data)] = data
        self.queued.clear()
        self.num_waits += 1
        self.now += 1
        self.passed = self.now


def found(memory: Memory, area: BatchArea, name: str, count: int, index: int = 0) -> list[int]:
    start = area.at(name, index) // 4
    return memory.words[start:start + count].tolist()


def test_tables_are_copied_where_they_changed_and_are_always_right():
    memory = Memory()
    area, stride = BatchArea(memory, 64, 4, 8), 8
    random, held = np.random.default_rng(0), []
    for step in range(60):
        count = int(random.integers(1, 5))
        tables = [[int(block) for block in random.integers(0, 50, random.integers(1, 5))] for _ in range(count)]
        if step % 3:
            tables = held[:count] + tables[len(held):]
        held = tables
        area.put(make_batch("decode", [[step + seq] for seq in range(count)], [0] * count, list(range(count)), tables))
        memory.synchronize()
        assert found(memory, area, "tokens", count) == [step + seq for seq in range(count)]
        assert found(memory, area, "slots", count) == list(range(count))
        for seq, table in enumerate(tables):
            assert found(memory, area, "tables", len(table), seq * stride) == table
    assert len(set(memory.num_bytes)) > 1 and max(memory.num_bytes) <= area_bytes(64, 4, 8)


def test_the_hosts_copies_are_written_in_turn_and_again_only_after_a_wait():
    memory = Memory()
    area = BatchArea(memory, 64, 4, 8)
    for step in (1, 2):
        area.put(make_batch("decode", [[step]], [0], [0], [[3]]))
    assert memory.num_waits == 0, "a pass may be prepared while the one before has not begun"
    area.put(make_batch("decode", [[3]], [0], [0], [[4]]))
    assert memory.num_waits == 1 and found(memory, area, "tokens", 1) == [2]
    memory.synchronize()
    for step in (4, 5):
        area.put(make_batch("decode", [[step]], [0], [0], [[4]]))
    assert memory.num_waits == 2, "somebody has waited already"
    memory.synchronize()
    assert found(memory, area, "tokens", 1) == [5] and found(memory, area, "tables", 1) == [4]


def test_a_replay_sends_what_was_put_last():
    """A recording that contains the copy reads the host's memory whenever it is replayed."""
    memory = Memory()
    area = BatchArea(memory, 64, 4, 8)

    def batch(step: int):
        return make_batch("decode", [[step]], [step], [0], [[3, 4 + step // 4]])

    for step in range(3):
        area.put(batch(step))
        memory.synchronize()
    memory.is_recording = True
    area.put(batch(3))
    memory.is_recording, recorded = False, memory.queued.copy()
    memory.queued.clear()
    for step in range(3, 12):
        area.put(batch(step))
        memory.queued += recorded
        memory.synchronize()
        assert found(memory, area, "tokens", 1) == [step] == found(memory, area, "positions", 1)
        assert found(memory, area, "tables", 2) == [3, 4 + step // 4]


def test_what_lies_there_is_not_copied_again_where_a_kernel_writes_the_rest():
    memory = Memory()
    area = BatchArea(memory, 64, 4, 8)

    def copies(tokens: int, slots: list[int], tables: list[list[int]], moves: bool = True) -> bool:
        before = len(memory.num_bytes)
        area.put(make_batch("decode", [[tokens]] * len(slots), [0] * len(slots), slots, tables), moves)
        memory.synchronize()
        assert found(memory, area, "slots", len(slots)) == slots and found(memory, area, "tables", 1) == tables[0][:1]
        return len(memory.num_bytes) > before

    assert copies(1, [0, 2], [[5], [6]]) and not copies(2, [0, 2], [[5], [6]])
    assert found(memory, area, "tokens", 2) == [1, 1]
    assert copies(3, [0, 2], [[5], [6]], moves=False) and found(memory, area, "tokens", 2) == [3, 3]
    assert copies(3, [0, 1], [[5], [6]]) and copies(3, [0, 1], [[7], [6]]) and copies(3, [0], [[7]]) and not copies(4, [0], [[7]])
    memory.is_recording = True   # its replays copy what the recording copied
    assert copies(4, [0], [[7]])
    memory.is_recording = False
    assert copies(4, [0], [[7]])


def test_what_could_not_be_sent_is_sent_the_next_time():
    memory = Memory()
    area, batch = BatchArea(memory, 64, 4, 8), make_batch("decode", [[1]], [0], [2], [[5]])
    area._send = lambda address, data: 1 / 0
    with pytest.raises(ZeroDivisionError):
        area.put(batch, moves=True)
    area._send = memory.upload_pinned
    area.put(batch, moves=True)
    memory.synchronize()
    assert found(memory, area, "slots", 1) == [2] and found(memory, area, "tables", 1) == [5]


def test_tables_of_a_recording_are_not_taken_to_lie_there_before_it_is_replayed():
    memory = Memory()
    area, batch = BatchArea(memory, 64, 4, 8), make_batch("decode", [[1]], [0], [2], [[5]])
    memory.is_recording = True
    area.put(batch)
    memory.is_recording = False
    memory.queued.clear()   # a recording copies nothing
    area.put(batch)
    memory.synchronize()
    assert found(memory, area, "tables", 1) == [5]


def test_slates_know_what_lies_there_until_others_change_it_or_a_recording_sends_them():
    memory = Memory()
    slates = Slates(memory, 16)
    assert not slates.holds("a") and not slates.holds(None)
    slates.open(), slates.sent("a")
    assert slates.holds("a") and not slates.holds("b")
    slates.open()
    assert not slates.holds("a"), "it is being written"
    slates.sent()
    assert not slates.holds("a") and not slates.holds(None)
    slates.open(), slates.sent("a")
    memory.is_recording = True
    slates.open(), slates.sent("a")
    memory.is_recording = False
    assert not slates.holds("a"), "a replay sends what the host's memory holds"
