"""Where warps of the row family begin, against going along the line step by step."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, GROUP_TILES, PLAN_BYTES, STEP_UNITS, UNIT_BYTES, group_count, group_steps, round_places, row_shares,
)
from q27app.kernels.row_plans import HAS_HEAD, HAS_TAIL, IS_FIRST, IS_LAST, PLAN, RowPlans, plan_warps
from tests.kernels.test_row_stages import LISTS


def placed(segments, units):
    """The segments as they lie one after the other."""
    out, offset = [], 0
    for segment in segments:
        tile_bytes = units * UNIT_BYTES[segment.kind]
        out.append(type(segment)(segment.first_tile, segment.num_tiles, segment.first_row, segment.num_rows, segment.kind, tile_bytes, offset))
        offset += segment.num_tiles * tile_bytes
    return tuple(out)


def line_of(segments, units):
    """(segment, group, step, number of the group) of every step."""
    out, number = [], 0
    for index, segment in enumerate(segments):
        for group in range(group_count(segment)):
            out += [(index, group, step, number) for step in range(group_steps(segment, units))]
            number += 1
    return out


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_plans_go_along_the_line(name, num_sms):
    segments, units = placed(*LISTS[name]), LISTS[name][1]
    wrap = units // 2 if name == "float32" else 0
    for places in (2, 3):
        shares = row_shares(num_sms, segments, units, places)
        line, plans, position = line_of(segments, units), plan_warps(shares, segments, units, wrap), 0
        assert plans.shape == (shares.rounds, shares.blocks, BLOCK_WARPS)
        for block in range(shares.blocks):
            for row in plans[:, block]:
                low, size = position, int(row["left"].sum())
                for warp, plan in enumerate(row):
                    segment, group, step, number = line[min(position, len(line) - 1)]
                    part = segments[segment]
                    bytes_before = (group * GROUP_TILES * part.tile_bytes + step * STEP_UNITS[part.kind] * UNIT_BYTES[part.kind])
                    assert plan["offset"] == part.offset + bytes_before
                    assert plan["second"] == (part.tile_bytes if group * GROUP_TILES + 1 < part.num_tiles else 0)
                    unit = step * STEP_UNITS[part.kind]
                    assert (plan["group"], plan["step"], plan["unit"]) == (group, step, unit - wrap if wrap and unit >= wrap else unit)
                    assert plan["flags"] & 3 == segment and plan["flags"] >> 2 & 3 == part.kind
                    assert plan["number"] == number - line[min(low, len(line) - 1)][3] or not size
                    assert bool(plan["flags"] & IS_FIRST) == (step == 0 or position == low)
                    position += int(plan["left"])
                    assert position == low + (size * (warp + 1) >> 4)
                    assert bool(plan["flags"] & IS_LAST) == (position == low + size)
                if size:
                    first, last = line[low], line[position - 1]
                    ends = HAS_HEAD * (first[2] > 0) | HAS_TAIL * (last[2] + 1 < group_steps(segments[last[0]], units))
                    assert (row["first_group"] == first[3]).all() and (row["groups"] == last[3] - first[3] + 1).all() and (row["ends"] == ends).all()
                else:
                    assert (row["groups"] <= 0).all()
        assert position == len(line) == shares.total


def test_a_round_of_nothing_has_no_groups():
    """A round begins where a group does, so one of few steps may be empty: it must not finish a group that another one has."""
    segments, units = placed(*LISTS["gate up"]), LISTS["gate up"][1]
    shares = row_shares(1, segments, units, 3)
    plans = plan_warps(shares, segments, units, 0)
    assert shares.rounds > 1 and (plans["groups"] >= 0).all() and plans["left"].sum() == shares.total


class Memory:
    """Of a device: pieces one behind the other."""

    def __init__(self) -> None:
        self.bytes, self._next = np.zeros(4 << 20, np.uint8), 256

    def allocate(self, nbytes: int) -> int:
        address, self._next = self._next, self._next + nbytes
        assert self._next <= len(self.bytes)
        return address

    def upload(self, address: int, array: np.ndarray) -> None:
        self.bytes[address:address + array.nbytes] = array.view(np.uint8)


def test_lists_of_one_shape_have_one_table():
    device = Memory()
    plans = RowPlans(device)
    segments, units = placed(*LISTS["down"]), LISTS["down"][1]
    shares = row_shares(132, segments, units, round_places(227 << 10))
    address, nbytes = plans.of(shares, segments, units, 0), plans.nbytes
    assert plans.of(row_shares(132, segments, units, 3), placed(*LISTS["down"]), units, 0) == address and plans.nbytes == nbytes
    stored = device.bytes[address:address + shares.rounds * shares.blocks * BLOCK_WARPS * PLAN_BYTES].view(PLAN)
    np.testing.assert_array_equal(stored.reshape(-1), plan_warps(shares, segments, units, 0).reshape(-1))
    assert plans.of(shares, segments, units + 4, 0) != address
