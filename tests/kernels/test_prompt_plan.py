"""How a prompt's attention is cut into blocks (kernels/cuda_prompts.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from q27app.kernels.cuda_prompts import cut_begin, cut_of, part_places, prompt_plan
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD
from tests.kernels.made import make_batch
from tests.model.geometry import config_27b


def test_cuts_cover_positions_in_order():
    for card in (CARD, SMALL_CARD):
        defines = card.prompt_defines()
        for cut in range(40):
            first, end = cut_begin(defines, cut), cut_begin(defines, cut + 1)
            assert first < end and first % 64 == 0 and cut_of(defines, first) == cut_of(defines, end - 1) == cut


@pytest.mark.parametrize("rows, position, grid, launches", [
    (40, 1000, (2, 4, 1), 1), (40, 131_000, (2, 4, 20), 1), (512, 131_000, (4, 24, 7), 3), (2048, 131_000, (16, 24, 1), 1), (4, 5000, (1, 4, 2), 1)])
def test_blocks_of_a_prompt(rows, position, grid, launches):
    """On 132 multiprocessors with 95 MB of room: few rows share tiles, and a block takes a cut where few blocks would take all."""
    config, card = config_27b(), replace(CARD, num_sms=132)
    plan = prompt_plan(card, config, make_batch("prefill", [[0] * rows], [position], [0], [[0]]), 95_000_000)
    assert (plan.grid, len(plan.launches)) == (grid, launches)
    assert part_places(config, rows, plan.at_once)[-1] <= 95_000_000
