"""The delta rule on the CPU (tests/kernels/emulation): near the reference, the same bits when resumed and in every pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels import cuda_checks
from tests.kernels.delta_checks import READY_TOLERANCE, TOLERANCE, DeltaBench, check_company, check_delta, check_fold, check_steps
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler

pytestmark = needs_compiler
SHAPES = [(128, 2), (128, 3), (64, 2), (32, 2)]
"""Size of a head, value heads of a key head."""
LEFT = [(*shape, False) for shape in SHAPES] + [(128, 2, True), (128, 3, True)]
"""And whether rows are left ready for the next stage."""


def open_bench(device: EmulatedDevice, dim: int, group: int, leaves: bool) -> DeltaBench:
    config = replace(cuda_checks.NANO, delta_head_dim=dim, delta_key_heads=2, delta_value_heads=2 * group)
    return DeltaBench(device, config, leaves=leaves)


@pytest.mark.long
@pytest.mark.parametrize("sharp", [False, True], ids=["natural", "sharp decays and repeated rows"])
@pytest.mark.parametrize("dim, group", SHAPES)
def test_a_prefill_equals_the_reference_and_keeps_its_bits(dim, group, sharp):
    device = EmulatedDevice()
    bench = DeltaBench(device, replace(cuda_checks.NANO, delta_head_dim=dim, delta_key_heads=2, delta_value_heads=2 * group), sharp)
    assert check_delta(bench, 100) < TOLERANCE
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("dim, group, leaves", LEFT)
def test_decode_rows_equal_the_reference_in_every_pass(dim, group, leaves):
    device = EmulatedDevice()
    bench = open_bench(device, dim, group, leaves)
    assert check_steps(bench, 17, (1, 3, 16)) < (READY_TOLERANCE if leaves else TOLERANCE)
    assert bench.was_left == leaves
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["bulk copies", "none"])
@pytest.mark.parametrize("dim, group, leaves", LEFT)
def test_sequences_beside_each_other_keep_the_bits_of_each_alone(dim, group, leaves, card):
    """As many as take each way to share out the heads, and some with more rows than others."""
    device = EmulatedDevice(card)
    bench = open_bench(device, dim, group, leaves)
    check_company(bench, 3, ((1, 1), (1, 1, 1), (1,) * 5, (2, 1), (1, 3, 2)))
    assert bench.was_left == leaves
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("dim, group, leaves", LEFT)
def test_accepted_rows_leave_the_bits_of_rows_decoded_singly(dim, group, leaves):
    device = EmulatedDevice()
    bench = open_bench(device, dim, group, leaves)
    check_fold(bench, 3, 9)
    check_fold(bench, 2, 1)
    assert bench.was_left == leaves
    device.check_guards()
