"""Slots and blocks: exact export and import, copies, sizes, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.errors import OutOfMemory, Q27Error
from q27app.kernels.numpy_state import NumpyState
from q27app.model.budget import block_bytes, slot_bytes
from tests.kernels import made


def filled(kv_format="fp32", slots=3, blocks=5, seed=0):
    """Random bits everywhere, NaN patterns included."""
    config = made.TINY
    state = NumpyState(config, config.num_delta_layers, config.num_kv_layers, kv_format, slots, blocks, 16)
    random = np.random.default_rng(seed)
    for array in (state.conv, state.delta, state.hidden, *state.keys, *state.values):
        bits = array.reshape(-1).view(np.uint8)
        bits[...] = random.integers(0, 256, bits.size, dtype=np.uint8)
    return state


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "fp8"])
def test_sizes_are_those_of_the_memory_plan(kv_format):
    state = filled(kv_format)
    assert state.slot_bytes == slot_bytes(made.TINY)
    assert state.block_bytes == block_bytes(made.TINY, kv_format)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "fp8"])
def test_blocks_survive_export_and_import_bit_for_bit(kv_format):
    source, target = filled(kv_format), filled(kv_format, seed=1)
    untouched = target.export_blocks([0, 2, 3])
    data = source.export_blocks([3, 0])
    target.import_blocks([1, 4], data)
    np.testing.assert_array_equal(target.export_blocks([1, 4]), data)
    np.testing.assert_array_equal(target.export_blocks([0, 2, 3]), untouched)
    assert data.shape == (2, source.block_bytes) and data.dtype == np.uint8


def test_a_slot_survives_export_and_import_bit_for_bit():
    source, target = filled(), filled(seed=1)
    untouched = [target.export_slot(slot) for slot in (0, 1)]
    data = source.export_slot(1)
    target.import_slot(2, data)
    np.testing.assert_array_equal(target.export_slot(2), data)
    np.testing.assert_array_equal(target.conv[2].view(np.uint32), source.conv[1].view(np.uint32))
    np.testing.assert_array_equal(target.hidden[2].view(np.uint32), source.hidden[1].view(np.uint32))
    for slot, expected in enumerate(untouched):
        np.testing.assert_array_equal(target.export_slot(slot), expected)


def test_copies_and_clear():
    state = filled()
    state.copy_slot(0, 2)
    np.testing.assert_array_equal(state.export_slot(2), state.export_slot(0))
    state.copy_block(4, 1)
    np.testing.assert_array_equal(state.export_blocks([1]), state.export_blocks([4]))
    before = state.export_slot(0)
    state.clear_slot(2)
    assert not state.export_slot(2).any()
    np.testing.assert_array_equal(state.export_slot(0), before)


def test_data_of_another_size_is_refused():
    state = filled()
    with pytest.raises(Q27Error, match="data for a slot is uint8"):
        state.import_slot(0, np.zeros(state.slot_bytes - 1, np.uint8))
    with pytest.raises(Q27Error, match="data for 1 blocks is float32"):
        state.import_blocks([0], np.zeros((1, state.block_bytes), np.float32))


@pytest.mark.parametrize("index", [-1, 3])
def test_slots_that_do_not_exist_are_refused(index):
    with pytest.raises(Q27Error, match=f"slot {index} does not exist"):
        filled().export_slot(index)


@pytest.mark.parametrize("index", [-1, 5])
def test_blocks_that_do_not_exist_are_refused(index):
    with pytest.raises(Q27Error, match=f"block {index} does not exist"):
        filled().export_blocks([index])


def test_more_than_the_machine_has_is_out_of_memory():
    with pytest.raises(OutOfMemory, match="10000000000 KV blocks"):
        NumpyState(made.TINY, 2, 3, "fp32", 1, 10**10, 16)
