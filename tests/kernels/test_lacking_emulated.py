"""States that lack rows, on the CPU (tests/kernels/emulation): no bit tells when they are written, and whoever does not settle first is found out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from q27app.errors import Q27Error
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_lacking import MAX_LACKING, STEADY_PASSES
from tests.kernels import cuda_checks
from tests.kernels.delta_checks import DeltaBench
from tests.kernels.emulation.emulated_device import CARD, EmulatedDevice, needs_compiler
from tests.kernels.lacking_checks import Life, check_lacking, check_life
from tests.kernels.made import begin_alone, make_batch

pytestmark = needs_compiler


def open_bench(dim: int = 32, group: int = 2, leaves: bool = False, num_sms: int = 4) -> DeltaBench:
    config = replace(cuda_checks.NANO, delta_head_dim=dim, delta_key_heads=2, delta_value_heads=2 * group)
    return DeltaBench(EmulatedDevice(replace(CARD, num_sms=num_sms)), config, leaves=leaves)


@pytest.mark.parametrize("num_seqs", [2, 3, 7])
def test_company_that_lacks_different_rows_has_the_bits_of_each_alone(num_seqs):
    bench = open_bench()
    assert check_lacking(bench, num_seqs, 14, 2) == {0, 1, 2, 3}
    bench.backend.device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("num_seqs", [2, 3, 8, 16])
@pytest.mark.parametrize("dim, group, leaves", [(128, 3, False), (128, 2, True), (64, 2, False)])
def test_so_has_company_of_any_size_and_heads(dim, group, leaves, num_seqs):
    bench = open_bench(dim, group, leaves, 2)
    assert check_lacking(bench, num_seqs, 12, 2) == {0, 1, 2, 3}
    assert bench.was_left == leaves
    bench.backend.device.check_guards()


SEEDS = (4, 5, 8)
MEETING = {"one row", "several rows", "verify", "broken off", "prefill", "copy", "export", "import", "clear"}


def test_a_life_has_the_bits_of_one_whose_states_are_written_with_every_row():
    bench = open_bench()
    assert set().union(*(check_life(bench, seed, 50) for seed in SEEDS)) == MEETING
    bench.backend.device.check_guards()


def never(*_) -> None: ...


def without(life: Life, method: str, what: str) -> None:
    """The state's `method`, or the begin of a pass for "", does not settle or drop."""
    owner, name = (life.state, method) if method else (life.bench.backend._mixers, "begin")
    whole, lacking = getattr(owner, name), life.state.lacking

    def call(*args):
        if not method and args[1] is not life.state:
            return whole(*args)
        setattr(lacking, what, never)
        try:
            return whole(*args)
        finally:
            delattr(lacking, what)

    setattr(owner, name, call)


def forget_a_row(life: Life) -> None:
    """Of three."""
    begin = life.state.lacking.begin
    life.state.lacking.begin = lambda slots: np.maximum(begin(slots), -MAX_LACKING)


@pytest.mark.parametrize("method, what", [("", "settle"), ("", "drop"), ("copy_slot", "settle"), ("copy_slot", "drop"), ("export_slot", "settle"),
                                          ("begin_export", "settle"), ("import_slot", "drop"), ("clear_slot", "drop")])
def test_a_life_finds_who_does_not_settle(method, what):
    with pytest.raises(AssertionError, match="other bits"):
        for seed in SEEDS:
            check_life(open_bench(), seed, 50, lambda life: without(life, method, what))


def test_a_life_finds_a_row_that_is_not_applied():
    with pytest.raises(AssertionError, match="other bits"):
        check_life(open_bench(), SEEDS[0], 50, forget_a_row)


def passes(bench: DeltaBench, state, passes_of: list[int | str]) -> list[list[int]]:
    """Rows that each of six slots lacks after passes of so many of them, one row each; "prefill": of the last one, from nothing; "verify": of all."""
    found = []
    for of in passes_of:
        slots = list(range(of)) if isinstance(of, int) else [5] if of == "prefill" else list(range(6))
        if of == "prefill":
            state.clear_slot(5)
        phase = "decode" if isinstance(of, int) else of
        begin_alone(bench.backend, make_batch(phase, [[0]] * len(slots), [0] * len(slots), slots, [[0]] * len(slots), None, of == "verify"), state)
        found.append(state.lacking.rows.tolist())
    return found


def test_states_lack_rows_once_a_slot_is_in_steady_company():
    bench = open_bench()
    state = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 6, 8, 16)
    found = passes(bench, state, [6] * STEADY_PASSES + [6, 6, 6, 6, 6])
    assert found == [[0] * 6] * STEADY_PASSES + [[1] * 6, [2] * 6, [3] * 6, [0] * 6, [1] * 6]


def test_states_of_a_pass_are_written_together():
    """Whoever comes late, or is settled for somebody who looks at it, is in step with the others from their next write on."""
    bench = open_bench()
    state = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 6, 8, 16)
    passes(bench, state, [6] * STEADY_PASSES)
    assert passes(bench, state, [3, 3, 6, 6, 6]) == [[1] * 3 + [0] * 3, [2] * 3 + [0] * 3, [3] * 3 + [1] * 3, [0] * 6, [1] * 6]
    state.copy_slot(1, 5)
    assert passes(bench, state, [5, 5, 5, 5]) == [[2, 1, 2, 2, 2, 0], [3, 2, 3, 3, 3, 0], [0] * 6, [1] * 5 + [0]]


def test_a_prompt_that_is_read_between_passes_settles_nobody_else():
    bench = open_bench()
    state = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 6, 8, 16)
    passes(bench, state, [6] * STEADY_PASSES)
    assert passes(bench, state, [6, "prefill", 6, "prefill", 6, 6]) == [[1] * 6, *[[1] * 5 + [0], [2] * 5 + [0]], *[[2] * 5 + [0], [3] * 5 + [0]], [0] * 6]


def test_a_pass_with_drafts_now_and_then_does_not_begin_the_wait_again():
    """Several in a row, or few passes between them, do."""
    bench = open_bench()
    state = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 6, 8, 16)
    passes(bench, state, [6] * STEADY_PASSES)
    for count in (STEADY_PASSES, STEADY_PASSES - 1):
        assert passes(bench, state, ["verify"] + [6] * count) == [[0] * 6, *[[each % 4] * 6 for each in range(1, count + 1)]]
    for drafts in (1, 2):
        assert passes(bench, state, ["verify"] * drafts + [6] * (STEADY_PASSES + 1)) == [[0] * 6] * (drafts + STEADY_PASSES) + [[1] * 6]


def test_what_is_recorded_with_its_begin_writes_every_row():
    bench = open_bench()
    state, device = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 6, 8, 16), bench.backend.device
    state.lacking.steady, device.is_recording = 0, True
    assert passes(bench, state, [6, 6]) == [[0] * 6] * 2
    device.is_recording = False
    passes(bench, state, [6])
    device.is_recording = True
    with pytest.raises(Q27Error, match="lack rows"):
        passes(bench, state, [6])


@pytest.mark.long
def test_a_model_replays_passes_whose_states_lack_rows():
    """Rows, slots and logits of three sequences beside each other are those of each alone."""
    model = cuda_checks.bound_model(CudaBackend(EmulatedDevice()), cuda_checks.NANO, cuda_checks.model_tensors(cuda_checks.NANO, cuda_checks.F16), 64)
    tokens = np.random.default_rng(2).integers(0, 100, (3, 20)).tolist()
    together, alone = (cuda_checks.Lines(model, 3, 4, "fp16", 16) for _ in range(2))
    together.state.lacking.steady = 0
    for seq, own in enumerate(tokens):
        for lines in (together, alone):
            lines.feed(seq, own[:9])
    for at in range(9, 15):
        found = together.feed_many({seq: own[at:at + 1] for seq, own in enumerate(tokens)}, "decode")
        np.testing.assert_array_equal(found, np.concatenate([alone.feed(seq, own[at:at + 1], "decode") for seq, own in enumerate(tokens)]))
    assert together.state.lacking.rows.tolist() == [2] * 3 and len(model.replays)
    for seq in range(3):
        np.testing.assert_array_equal(together.state.export_slot(seq), alone.state.export_slot(seq))
