"""Slots and blocks: taken, shared, given back, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine.block_pool import BlockPool, blocks_of
from q27app.engine.slot_pool import SlotPool


def test_blocks_of_counts_begun_blocks():
    assert [blocks_of(count) for count in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_a_run_of_neighbours_is_preferred_to_lower_scattered_blocks():
    pool = BlockPool(8)
    taken = [pool.allocate(1) for _ in range(8)]
    for index in (1, 3, 4, 5):
        pool.release(taken[index])
    assert pool.allocate(3).tolist() == [3, 4, 5]
    assert pool.allocate(1).tolist() == [1]


def test_scattered_blocks_do_where_there_is_no_run():
    pool = BlockPool(5)
    taken = [pool.allocate(1) for _ in range(5)]
    for index in (0, 2, 4):
        pool.release(taken[index])
    assert pool.allocate(3).tolist() == [0, 2, 4]


def test_too_many_blocks_are_refused_and_nothing_is_taken():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check([blocks[:1]])
    pool.release(blocks[:1])
    pool.check([])


def test_releasing_too_often_and_sharing_free_blocks_are_mistakes():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.share(blocks)


def test_check_names_a_block_that_leaks():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=r"blocks \[0, 1\] count \[1, 1\]"):
        pool.check([])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free"]), st.integers(0, 9)), max_size=40))
def test_counts_always_equal_the_owners(actions):
    pool, owned = BlockPool(16), []
    for action, size in actions:
        if action == "take" and (blocks := pool.allocate(size)) is not None:
            owned.append(blocks)
        elif action == "share" and owned:
            pool.share(owned[size % len(owned)])
            owned.append(owned[size % len(owned)])
        elif action == "free" and owned:
            pool.release(owned.pop(size % len(owned)))
        pool.check(owned)
    flat = np.concatenate([*owned, np.zeros(0, np.int32)])
    assert pool.num_free == 16 - len(set(flat.tolist()))


def test_slots_go_lowest_first_and_come_back():
    pool = SlotPool(3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    pool.release(1)
    pool.release(0)
    pool.check([2])
    assert pool.allocate() == 0


def test_a_slot_released_twice_or_leaked_is_a_mistake():
    pool = SlotPool(2)
    slot = pool.allocate()
    with pytest.raises(AssertionError, match=r"slots \[0\] are in use"):
        pool.check([])
    pool.release(slot)
    with pytest.raises(AssertionError):
        pool.release(slot)
