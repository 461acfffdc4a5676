"""How prefill's products are cut (kernels/cuda_tiles.py): every row and token once, and fewer waves than blocks of one shape."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.card import Card
from q27app.kernels.cuda_tiles import TilePart, cut_segments, tile_plan, tile_shapes
from q27app.kernels.cuda_weights import KIND_Q4, Segment

HOPPER, AMPERE = Card("90", (9, 0), 132, 227 * 1024), Card("86", (8, 6), 82, 99 * 1024, 1536)


def segments_of(*rows: int) -> tuple[Segment, ...]:
    found, tile, row, offset = [], 0, 0, 0
    for count in rows:
        tiles = -(-count // 16)
        found.append(Segment(tile, tiles, row, count, KIND_Q4, 544, offset))
        tile, row, offset = tile + tiles, row + count, offset + tiles * 544
    return tuple(found)


@pytest.mark.parametrize("card", [HOPPER, AMPERE], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("stage, matrix", [("plain", (10240, 6144)), ("plain", (12288,)), ("add", (5120,)), ("gate_up", (34816,)), ("plain", (50, 300))])
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 500, 1024, 2048])
def test_a_plan_covers_everything_once(card, stage, matrix, rows):
    count = np.zeros((rows, sum(matrix)), int)
    for part in tile_plan(card, segments_of(*matrix), rows):
        assert part.first_token % 64 == 0 and part.shape in tile_shapes(card)
        for segment in part.segments:
            assert segment.num_tiles == -(-segment.num_rows // 16)
            assert segment.offset == segment.first_tile * 544 and (stage != "gate_up" or segment.first_tile % 2 == 0)
            count[part.first_token:part.first_token + part.rows, segment.first_row:segment.first_row + segment.num_rows] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("stage, matrix", [("plain", 16384), ("add", 5120), ("gate_up", 34816)])
@pytest.mark.parametrize("rows", [64, 500, 1024, 2048, 8192])
def test_a_plan_costs_no_more_than_one_shape_and_little_more_than_whole_waves(stage, matrix, rows):
    segments = segments_of(matrix)
    cost = sum(part.cost(HOPPER) for part in tile_plan(HOPPER, segments, rows))
    assert cost <= min(TilePart(shape, segments, 0, rows).cost(HOPPER) for shape in tile_shapes(HOPPER))
    if rows >= 1024:
        assert cost <= 1.25 * matrix / 16 * rows / HOPPER.num_sms


def test_segments_are_cut_anywhere():
    head, tail = cut_segments(segments_of(50, 300), 6)
    assert [(s.num_tiles, s.num_rows, s.first_row) for s in head] == [(4, 50, 0), (2, 32, 50)]
    assert [(s.first_tile, s.num_tiles, s.num_rows, s.first_row, s.offset) for s in tail] == [(6, 17, 268, 82, 6 * 544)]
