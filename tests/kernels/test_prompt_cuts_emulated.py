"""A prompt's attention over several cuts of the keys, on the CPU (tests/kernels/emulation): the same bits whoever merges them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.kernels import card as card_module
from q27app.kernels import cuda_attention
from q27app.kernels.batch import Batch
from q27app.kernels.cuda_prompts import PromptPlan, part_places, prompt_plan, tile_grid
from tests.kernels import attend_checks, cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.made import make_batch, relative_error

pytestmark = [needs_compiler, pytest.mark.long]
CONFIG = replace(cuda_checks.NANO, num_heads=12, num_kv_heads=2)
ADA_CARD = replace(SMALL_CARD, capability=(8, 9))
MAX_ROWS = 2000
"""Scratch is made for them, and has room for the parts of fewer."""
WAYS = {"a block takes all": (False, 0), "a block takes one": (False, 9), "two at once": (False, 2), "one at once": (False, 1),
        "shared, a block takes all": (True, 0), "shared, a block takes one": (True, 9), "shared, two at once": (True, 2)}


@pytest.fixture
def forced(monkeypatch):
    """way: whether a key head's queries share tiles, and cuts of a launch; None: as usual. planned: the ways that passes were planned for. Keys are
    cut at 64, 128, 256, 384 and so on."""
    monkeypatch.setattr(card_module, "PROMPT_CUT", 64)
    monkeypatch.setattr(card_module, "FIRST_CUTS", 2)
    forced = SimpleNamespace(way=None, planned=[])

    def plan(card, geometry, batch, room):
        usual = prompt_plan(card, geometry, batch, room)
        forced.planned.append(forced.way)
        if forced.way is None:
            return usual
        shares, at_once = forced.way
        at_once = min(at_once, usual.cuts)
        assert part_places(geometry, batch.num_rows, at_once)[-1] <= room
        return PromptPlan(*tile_grid(geometry, batch, shares), usual.cuts, at_once)

    monkeypatch.setattr(cuda_attention, "prompt_plan", plan)
    return forced


def open_bench(card, name: str, blocks: int, filled: int) -> attend_checks.AttendBench:
    bench = attend_checks.AttendBench(EmulatedDevice(card), CONFIG, name, blocks, 1, MAX_ROWS)
    attend_checks.fill(bench, filled)
    return bench


def by_each_way(forced, bench: attend_checks.AttendBench, batch: Batch, y: np.ndarray) -> dict[str, np.ndarray]:
    """What was attended, by way; none finds what another one left. A batch is planned once, so that each way gets its own."""
    found = {}
    forced.planned.clear()
    for name, forced.way in WAYS.items():
        bench.backend.device.fill(bench.out.address, bench.out.nbytes)
        found[name] = bench.run_batch(replace(batch), y)
    assert forced.planned == list(WAYS.values())
    return found


@pytest.mark.parametrize("name, card", [("fp16", CARD), ("fp8", CARD), ("turbo5k", CARD), ("fp16", SMALL_CARD), ("fp8", ADA_CARD), ("turbo3", SMALL_CARD)],
                         ids=["fp16, warpgroups", "fp8, warpgroups", "turbo5k, warpgroups", "fp16, warps", "fp8, warps", "turbo3, warps"])
def test_every_way_gives_the_same_bits(name, card, forced):
    """Rows on both sides of a border, in one tile and in several."""
    bench = open_bench(card, name, 5, 256)
    for position, rows in ((123, 135), (253, 13)):
        y = np.random.default_rng(rows).standard_normal((rows, bench.width)).astype(np.float32)
        found = by_each_way(forced, bench, bench.batch("prefill", position, rows), y)
        assert relative_error(found["a block takes all"], bench.expected("prefill", y, position)) < 5e-4
        for way, bits in found.items():
            assert np.array_equal(bits, found["a block takes all"]), (position, way)
    bench.backend.device.check_guards()


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["warpgroups", "warps"])
def test_a_row_has_the_same_bits_in_any_chunk(card, forced):
    bench = open_bench(card, "fp16", 5, 128)
    for forced.way in (None, (True, 2)):
        assert attend_checks.check_attend(bench, 127, (140, 35, 14), "prefill") < 5e-4
    bench.backend.device.check_guards()


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["warpgroups", "warps"])
def test_sequences_of_other_depths_in_a_pass(card, forced):
    """Some have fewer cuts than launches, and none of their rows is touched again."""
    bench = open_bench(card, "fp16", 9, 384)
    tables, positions, counts = ([*range(5), 6], [7], [*range(3), 8]), (330, 3, 170), (40, 5, 30)
    y = np.random.default_rng(3).standard_normal((sum(counts), bench.width)).astype(np.float32)
    batch = make_batch("prefill", [[0] * count for count in counts], list(positions), [0, 0, 0], list(tables))
    found = by_each_way(forced, bench, batch, y)
    starts = np.cumsum((0, *counts))
    for seq, (first, position, table) in enumerate(zip(starts, positions, tables)):
        alone = bench.run_batch(make_batch("prefill", [[0] * counts[seq]], [position], [0], [table]), y[first:first + counts[seq]])
        for way, bits in found.items():
            assert np.array_equal(bits[first:first + counts[seq]], alone), (way, seq)
    bench.backend.device.check_guards()
