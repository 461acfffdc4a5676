"""The row family: shares of a row list, and what blocks leave to each other, with any number of multiprocessors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, BORDER_BYTES, KIND_F16, KIND_Q4, KIND_Q8, ROUND_GROUPS, WHOLE_LOSS, Segment, group_count,
    group_steps, round_places, row_shares, rows_shared_bytes,
)
from q27app.weights.dtypes import F16, Q4_G64, Q8_G128
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import CARD, EmulatedDevice, needs_compiler
from tests.kernels.test_compiler_keys import CARDS

emulated = needs_compiler
ROW_COUNTS = (1, 2, 3, 9, 16)
SMS = (*range(1, 201), 264)


def segments_of(*parts: tuple[int, int]) -> tuple[Segment, ...]:
    """(tiles, kind) of each segment."""
    out, tile = [], 0
    for tiles, kind in parts:
        out.append(Segment(tile, tiles, tile * 16, tiles * 16, kind, 0, 0))
        tile += tiles
    return tuple(out)


LISTS = {
    "delta in of the 27B": (segments_of((1024, KIND_Q4), (6, KIND_F16)), 80), "gate up": (segments_of((2176, KIND_Q4)), 80),
    "down": (segments_of((320, KIND_Q4)), 272), "q8 and q4": (segments_of((768, KIND_Q8), (128, KIND_Q4)), 80),
    "first the largest": (segments_of((3, KIND_F16), (9, KIND_Q4)), 8), "every kind": (segments_of((5, KIND_Q4), (3, KIND_Q8), (1, KIND_F16), (8, KIND_Q4)), 4),
    "one tile": (segments_of((1, KIND_Q8)), 4), "one step": (segments_of((33, KIND_Q4), (2, KIND_F16)), 4),
    "head": (segments_of((15520, KIND_Q4)), 80), "float32": (segments_of((9, KIND_F16)), 2),
}


def group_ends(segments: tuple[Segment, ...], units: int) -> list[int]:
    out = [0]
    for segment in segments:
        out += [out[-1] + group_steps(segment, units) * (i + 1) for i in range(group_count(segment))]
    return out


@pytest.mark.parametrize("name", LISTS)
def test_every_step_is_in_one_block_and_a_group_in_two_at_most(name):
    segments, units = LISTS[name]
    groups = group_ends(segments, units)
    for num_sms, places in product(SMS, (2, 3)):
        shares = row_shares(num_sms, segments, units, places)
        borders = shares.borders(segments, units)
        assert 1 <= shares.blocks <= num_sms and len(borders) == shares.blocks + 1
        assert borders[0] == 0 and borders[-1] == shares.total == groups[-1]
        assert all(start < end for start, end in pairwise(borders)), (num_sms, borders)
        within = np.searchsorted(groups, borders, "right") - 1
        inside = [int(group) for group, border in zip(within, borders) if groups[group] != border]
        assert len(inside) == len(set(inside)) and not (shares.whole and inside)
        if shares.whole:
            assert max(end - start for start, end in pairwise(borders)) * shares.blocks <= shares.total * (1 + WHOLE_LOSS)


@pytest.mark.parametrize("name", LISTS)
def test_no_warp_is_in_more_groups_of_a_round_than_it_has_places(name):
    """As Share::open and run of the kernel go, step by step."""
    segments, units = LISTS[name]
    groups = np.asarray(group_ends(segments, units))
    for num_sms, places in product((1, 7, 82, 108, 132, 170, 264), (2, 3)):
        shares = row_shares(num_sms, segments, units, places)
        assert 1 <= shares.places <= places
        for begin, end in pairwise(shares.borders(segments, units)):
            starts = [begin + (end - begin) * i // shares.rounds for i in range(shares.rounds)]
            starts = [begin, *(max(begin, int(groups[np.searchsorted(groups, start, "right") - 1])) for start in starts[1:]), end]
            for low, high in pairwise(starts):
                assert low <= high and np.searchsorted(groups, high) - np.searchsorted(groups, low, "right") < ROUND_GROUPS
                warps = [low + ((high - low) * warp >> 4) for warp in range(BLOCK_WARPS + 1)]
                touched = [np.searchsorted(groups, stop) - np.searchsorted(groups, start, "right") + 1 for start, stop in pairwise(warps)]
                assert max(touched) <= shares.places


def test_shares_of_the_27b_are_even():
    for name in ("delta in of the 27B", "gate up", "down"):
        segments, units = LISTS[name]
        shares = row_shares(132, segments, units, 3)
        borders = shares.borders(segments, units)
        assert shares.blocks == 132
        assert max(end - start for start, end in pairwise(borders)) * 132 <= 1.04 * shares.total


@pytest.mark.parametrize("number", CARDS)
def test_every_block_fits_the_card(number):
    for units in (80, 96, 272):
        for rows in ROW_COUNTS:
            for ready in (False, True):
                assert rows_shared_bytes(rows, units, False, round_places(CARDS[number].shared_bytes), CARDS[number].row_ring, ready) <= CARDS[number].shared_bytes
        assert rows_shared_bytes(2, units, True, 2, CARDS[number].row_ring) <= CARDS[number].shared_bytes


SPECS = {
    "many groups of two lengths": [(130, F16), (200, Q4_G64), (200, Q4_G64)],
    "q4": [(200, Q4_G64)], "first the largest": [(33, F16), (100, Q4_G64), (30, Q4_G64)], "pair": [(72, Q4_G64)] * 2,
    "every kind": [(70, Q4_G64), (40, Q8_G128), (17, F16), (100, Q4_G64)], "unlike pair": [(50, Q8_G128), (50, F16)],
}


@emulated
@pytest.mark.long
@pytest.mark.parametrize("num_sms", [1, 3, 5, 7])
@pytest.mark.parametrize("name", SPECS)
def test_rows_keep_their_bits_and_every_border_is_empty_again(name, num_sms, monkeypatch):
    """Groups that lie in two blocks, and what one block leaves to the next: gone after every launch."""
    device = EmulatedDevice(replace(CARD, num_sms=num_sms))
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, SPECS[name], 384, 1)
    backend.empty((96, 384), "float32", "x")
    state = cuda_checks.open_state(backend, 384)
    left, launch = [], device.launch

    def launch_and_look(function, grid, *rest, **more) -> None:
        launch(function, grid, *rest, **more)
        assert grid[0] <= max(num_sms, 16)
        left.append(device.download(backend.scratch.border, (num_sms + 1) * BORDER_BYTES).view(np.uint32).any())

    monkeypatch.setattr(device, "launch", launch_and_look)
    assert cuda_checks.check_linear(backend, state, stage, "decode", ROW_COUNTS) < cuda_checks.TENSOR_CORE_TOLERANCE
    assert left and not any(left)
    device.check_guards()


@emulated
@pytest.mark.long
def test_sums_that_are_not_finite_cross_a_border():
    """A word says by being zero that it is empty; whatever a sum may be, it is not that."""
    device = EmulatedDevice(replace(CARD, num_sms=3))
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, [(128, Q4_G64)], 640, 1)
    shares = stage.weight.shares
    groups = group_ends(stage.weight.segments, stage.weight.units)
    backend.empty((96, 640), "float32", "x")
    state = cuda_checks.open_state(backend, 640)
    assert set(shares.borders(stage.weight.segments, stage.weight.units)) - set(groups), "no group lies in two blocks"
    for fill in (0.0, np.nan):
        backend.begin(cuda_checks.make_batch("decode", [[0]], [0], [0], [[0]]), state)
        out = backend.upload(np.ones((1, 128), np.float32))
        backend.project(stage.norm, stage.weight, backend.upload(np.full((1, 640), fill, np.float32)), out)
        np.testing.assert_array_equal(np.isnan(backend.download(out)), np.isnan(fill))
        assert not device.download(backend.scratch.border, 4 * BORDER_BYTES).any()
