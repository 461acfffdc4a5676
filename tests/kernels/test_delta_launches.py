"""Which kernel takes the few rows of a pass through the delta rule, by company, card and pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from q27app.errors import Q27Error
from q27app.kernels.cuda_mixers import flow_launch
from tests.kernels import cuda_checks
from tests.kernels.attend_checks import AttendBench
from tests.kernels.counting_device import CARDS
from tests.kernels.delta_checks import DeltaBench
from tests.kernels.made import begin_alone, make_batch
from tests.kernels.test_dependent_launches import NotingDevice

ROOM, OF_EACH = 228 * 1024, 1024
"""Shared memory of a multiprocessor of 9.0, and what the system keeps of it for each block."""


@pytest.mark.parametrize("card, counts, deferred, kernels", [
    ("wide", (1,), False, ["delta_one"]), ("wide", (1, 1), False, ["delta_flow"]), ("wide", (1, 1), True, ["delta_one"]),
    ("wide", (1,) * 3, True, ["delta_many"]), ("narrow", (1,) * 3, False, ["delta_many"]), ("narrow", (1, 1), False, ["delta_one"]),
    ("wide", (4,), False, ["delta_step", "delta_window"]), ("wide", (2, 1, 1), False, ["delta_steps", "delta_window"]),
    ("wide", (4,), True, ["delta_step"])])
def test_the_kernel_of_a_pass(card, counts, deferred, kernels):
    device = NotingDevice(CARDS[card])
    bench = DeltaBench(device, replace(cuda_checks.NANO, delta_head_dim=128, delta_key_heads=2, delta_value_heads=4))
    state, seqs = bench.backend.allocate_state(bench.config, 1, 1, "fp16", len(counts), 8, 16), range(len(counts))
    phase = "verify" if deferred else "decode"
    begin_alone(bench.backend, make_batch(phase, [[0] * count for count in counts], [0] * len(counts), list(seqs), [[seq] for seq in seqs], None, deferred), state)
    device.launches.clear()
    bench.backend.delta(bench.y.rows(sum(counts)), bench.layer, bench.out.rows(sum(counts)))
    assert [name for name, _ in device.launches if name != "row_sizes"] == kernels   # that is asked once of the weights


@pytest.mark.parametrize("seqs, heads", [(2, 1), (2, 6), (3, 1), (3, 6), (5, 3), (64, 48)])
def test_heads_of_the_flow_wait_for_blocks_with_smaller_numbers_alone(seqs, heads):
    """Blocks begin in their order, maybe not all at once: a wait for a larger number might have no end."""
    for sms in range(1, 133):
        (blocks,), _, _ = flow_launch(128, seqs, heads, sms)
        assert all((share - 1) % blocks < share % blocks for share in range(1, 2 * seqs * heads, 2))


def test_states_are_settled_once_and_only_where_they_lack_rows():
    """Sequences leave the company, then others look at their slots."""
    device = NotingDevice(CARDS["wide"])
    bench = DeltaBench(device, replace(cuda_checks.NANO, delta_head_dim=128, delta_key_heads=2, delta_value_heads=4))
    state = bench.backend.allocate_state(bench.config, 2, 1, "fp16", 8, 8, 16)
    state.lacking.steady = 0

    def settles(run) -> int:
        device.launches.clear()
        run()
        assert ("delta_settle", True) not in device.launches, "it does not wait by itself"
        return device.launches.count(("delta_settle", False))

    def decode(count: int, phase: str = "decode") -> None:
        begin_alone(bench.backend, make_batch(phase, [[0]] * count, [0] * count, list(range(count)), [[0]] * count, None, phase == "verify"), state)

    assert [settles(lambda: decode(4)) for _ in range(6)] == [0] * 6
    assert state.lacking.rows.tolist() == [2] * 4 + [0] * 4
    assert settles(lambda: decode(1, "draft")) == 0
    assert [settles(lambda: decode(1)) for _ in range(3)] == [1, 0, 0]
    assert [settles(lambda: state.copy_slot(2, 7)) for _ in range(2)] == [1, 0]
    assert [settles(lambda: decode(4, "verify")) for _ in range(2)] == [1, 0]
    assert state.lacking.rows.tolist() == [0] * 8


@pytest.mark.parametrize("stage", ["delta", "attend"])
def test_a_scale_that_is_not_known_is_not_asked_for_in_a_recording(stage):
    device, config = NotingDevice(CARDS["wide"]), replace(cuda_checks.NANO, delta_head_dim=128, delta_key_heads=2, delta_value_heads=4)
    bench = DeltaBench(device, config, leaves=True) if stage == "delta" else AttendBench(device, config, "fp8", 4)
    state = bench.backend.allocate_state(config, 1, 1, "fp8", 1, 8, 16)
    begin_alone(bench.backend, make_batch("decode", [[0]], [0], [0], [[0]]), state)
    layer = bench.layer if stage == "delta" else bench.layer[0]
    run = lambda: getattr(bench.backend, stage)(bench.y.rows(1), layer, bench.out.rows(1))  # noqa: E731
    device.is_recording = True
    with pytest.raises(Q27Error, match="has not run before"):
        run()
    device.is_recording = False
    run()
    device.is_recording = True
    run()


def test_blocks_of_the_flow_hold_three_shares_and_two_fit_beside_each_other():
    (blocks,), threads, shared = flow_launch(128, 64, 48, 132)
    assert (blocks, threads, shared) == (2 * 132, 256, 3 * (32768 + 4 * (4 + 3 * (128 + 64))) + 2 * 4 * (128 + 128 + 64) + 2 * 32 + 3 * 12 + 12)
    assert 2 * (shared + OF_EACH) <= ROOM and flow_launch(128, 1, 48, 132)[0] == (96,)
