"""Where warps of the row family begin, against going along the line step by step."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, GATHER_BYTES, GROUP_TILES, KIND_F16, PLAN_BYTES, ROUND_GROUPS, STEP_UNITS, UNIT_BYTES, group_count, group_steps,
    round_places, row_shares,
)
from q27app.kernels.row_plans import GATHER, GIVES, IS_F16, PLAN, TAKES, RowPlans, plan_warps
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
def test_plans_and_gathers_go_along_the_line(name, num_sms):
    segments, units = placed(*LISTS[name]), LISTS[name][1]
    wrap = units // 2 if name == "float32" else 0
    for places in (2, 3):
        shares = row_shares(num_sms, segments, units, places)
        line, position = line_of(segments, units), 0
        plans, gathers = plan_warps(shares, segments, units, wrap)
        assert plans.shape == (shares.rounds, shares.blocks, BLOCK_WARPS) and gathers.shape == (shares.rounds, shares.blocks, ROUND_GROUPS)
        for block in range(shares.blocks):
            for row, gather in zip(plans[:, block], gathers[:, block], strict=True):
                low, size, owners = position, int(row["left"].sum()), {}
                for warp, plan in enumerate(row):
                    segment, group, step, _ = line[position]
                    part = segments[segment]
                    bytes_before = (group * GROUP_TILES * part.tile_bytes + step * STEP_UNITS[part.kind] * UNIT_BYTES[part.kind])
                    assert plan["offset"] == part.offset + bytes_before
                    assert plan["second"] == (part.tile_bytes if group * GROUP_TILES + 1 < part.num_tiles else 0)
                    unit = step * STEP_UNITS[part.kind]
                    assert (plan["group"], plan["step"], plan["unit"]) == (group, step, unit - wrap if wrap and unit >= wrap else unit)
                    assert plan["kinds"] & 3 == segment and plan["kinds"] >> 2 & 3 == part.kind
                    steps = line[position:position + int(plan["left"])]
                    for place, number in enumerate(dict.fromkeys(step[3] for step in steps)):
                        owners.setdefault(number, []).append((warp, place))
                    position += int(plan["left"])
                    assert position == low + (size * (warp + 1) >> 4)
                assert (row["kinds"] >> 4 == len(owners)).all()
                check_gathers(gather, segments, units, line[low:position], owners)
        assert position == len(line) == shares.total


def check_gathers(gather, segments, units, steps, owners):
    """gather: of a round; steps: its part of the line; owners: {number of a group: (warp, place) of those that have steps of it}."""
    for index, (number, warps) in enumerate(owners.items()):
        own = [step for step in steps if step[3] == number]
        segment, group = segments[own[0][0]], own[0][1]
        warp, place = warps[0]
        assert gather["warps"][index] == warp | warps[-1][0] << 8 | place << 16 and all(place == 0 for _, place in warps[1:])
        assert gather["row"][index] == segment.first_row + group * 32 and gather["left"][index] == segment.num_rows - group * 32
        flags = TAKES * (own[0][2] > 0) | GIVES * (own[-1][2] + 1 < group_steps(segment, units)) | IS_F16 * (segment.kind == KIND_F16)
        assert gather["flags"][index] == flags | group * 16 << 3


def test_a_round_of_nothing_has_no_groups():
    """A round begins where a group does, so one of few steps may be empty: it must not finish a group that another one has."""
    segments, units = placed(*LISTS["gate up"]), LISTS["gate up"][1]
    shares = row_shares(1, segments, units, 3)
    plans, _ = plan_warps(shares, segments, units, 0)
    assert shares.rounds > 1 and (plans["kinds"] >= 0).all() and plans["left"].sum() == shares.total


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
    right, size = plan_warps(shares, segments, units, 0), shares.rounds * shares.blocks
    ends = address + size * BLOCK_WARPS * PLAN_BYTES
    np.testing.assert_array_equal(device.bytes[address:ends].view(PLAN), right[0].reshape(-1))
    np.testing.assert_array_equal(device.bytes[ends:ends + size * ROUND_GROUPS * GATHER_BYTES].view(GATHER), right[1].reshape(-1))
    assert plans.of(shares, segments, units + 4, 0) != address
