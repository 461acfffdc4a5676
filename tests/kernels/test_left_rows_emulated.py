"""What attention and the delta rule leave for the next stage, where it is hard: sizes asked of the weights, any number of
multiprocessors, heads that end inside a record, more rows than a record has, numbers that are none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_ready import READY_BYTES, ready_bytes, ready_units
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128
from tests.kernels import cuda_checks
from tests.kernels.delta_checks import READY_TOLERANCE, DeltaBench, check_company
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.made import begin_alone, make_batch, relative_error

pytestmark = needs_compiler


def open_bench(card=CARD, key_heads: int = 2, value_heads: int = 4) -> DeltaBench:
    config = replace(cuda_checks.NANO, delta_head_dim=128, delta_key_heads=key_heads, delta_value_heads=value_heads)
    return DeltaBench(EmulatedDevice(card), config, leaves=True)


def run(bench: DeltaBench, rows: np.ndarray, counts: tuple[int, ...], state=None, layer=None, slot: int = 0):
    """A decode pass of the delta rule from position 0 on, the first sequence in `slot`; returns its output buffer, which is still to be taken."""
    state, seqs = state or bench.backend.allocate_state(bench.config, 1, 1, "fp16", len(counts), 8, 16), range(len(counts))
    bench.backend.device.upload(bench.y.address, rows)
    begin_alone(bench.backend, make_batch("decode", [[0] * count for count in counts], [0] * len(counts), [slot + seq for seq in seqs], [list(range(8))] * len(counts)), state)
    out = bench.out.rows(len(rows))
    bench.backend.delta(bench.y.rows(len(rows)), layer or bench.layer, out)
    return out


@pytest.mark.long
@pytest.mark.parametrize("kind, cols", [(F16, 100), (F32, 100), (Q8_G128, 256), (Q4_G64, 192)], ids=["f16", "f32", "q8", "q4"])
def test_sizes_of_rows_are_those_of_numpy(kind, cols):
    """From any tensor of a list on, with norms of 0 and below, and gains of both signs."""
    random, counts, backend = np.random.default_rng(1), (160, 96, 48), CudaBackend(EmulatedDevice())
    norm, gain = random.standard_normal(cols).astype(np.float32), random.standard_normal(32).astype(np.float32)
    norm[3] = 0.0
    made = [cuda_checks.made_tensor(random, str(rows), rows, cols, kind) for rows in counts]
    weight, *vectors = backend.load(made), *(backend.load([cuda_checks.stored("vector", values, F32)]) for values in (norm, gain))
    cuda_checks.open_state(backend, cols)
    expected = np.linalg.norm(np.concatenate([tensor.values() for tensor in made]).astype(np.float64) * norm, axis=1)
    assert np.allclose(backend.ready._row_sizes(vectors[0], weight, 256, 48), expected[256:], rtol=1e-5)
    found = backend.ready._row_sizes(vectors[0], weight, 128, 128, vectors[1])   # the end of one tensor, all of the next
    assert np.allclose(found, expected[128:256] * np.tile(np.abs(gain), 4), rtol=1e-5)
    backend.device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("value_heads", [4, 6])
def test_a_block_waits_for_smaller_numbers_alone(sms, value_heads):
    """The emulator runs one block after the other, and stops where a word is not there."""
    for card in (replace(CARD, num_sms=sms), replace(SMALL_CARD, num_sms=sms)):
        bench = open_bench(card, 2, value_heads)
        check_company(bench, 2, ((1,), (1, 1), (1,) * 3, (1,) * 5, (2,), (3, 1)))
        assert bench.was_left
        bench.backend.device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("counts", [(1,), (1, 1), (1, 1, 1), (2,), (16, 16, 3), (1,) * 18], ids=str)
def test_heads_that_end_inside_a_record(counts):
    """Three heads are six units, of which the next stage reads eight; new memory of this device holds no numbers."""
    random, bench = np.random.default_rng(2), open_bench(key_heads=1, value_heads=3)
    backend, count, width = bench.backend, sum(counts), 3 * 128
    made = cuda_checks.made_tensor(random, "out", 72, width, Q4_G64)
    weight, x = backend.load([made]), backend.upload(np.zeros((count, 72), np.float32))
    rows = bench.rows(count)
    expected = np.concatenate([bench.expected(part) for part in np.split(rows, np.cumsum(counts)[:-1])])
    assert ready_units(width) == 8 and ready_bytes(count, width) == -(-count // 16) * 8 * READY_BYTES
    out = run(bench, rows, counts)
    assert backend.ready.of(out) is not None
    backend.add_linear(weight, out, x)
    assert relative_error(backend.download(x), expected @ made.values().T) < cuda_checks.TENSOR_CORE_TOLERANCE + READY_TOLERANCE
    assert relative_error(bench.taken(out), expected) < READY_TOLERANCE
    backend.device.check_guards()


ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
ALL_ONES = np.uint32(0xFFFFFFFF)
"""The number that is none whose complement is an empty word."""


@pytest.mark.long
@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["flow", "many"])
@pytest.mark.parametrize("counts", [(1,), (1, 1), (1,) * 6, (6,), (3, 3)], ids=str)
def test_numbers_that_are_none_reach_nobody_else_and_hold_nobody_up(card, counts):
    bench = open_bench(card)
    good = bench.rows(sum(counts))
    clean = bench.taken(run(bench, good, counts)).copy()
    for value in (*ODD, ALL_ONES.view(np.float32)):
        rows = good.copy()
        rows[-1] = value
        found = bench.taken(run(bench, rows, counts))   # and that every word was taken
        assert bench.was_left and np.array_equal(found[:-1], clean[:-1])
        assert value != 0 or not found[-1].any()   # silu(z) is 0
        assert np.array_equal(bench.taken(run(bench, good, counts)), clean)


@pytest.mark.long
def test_layers_with_and_without_a_scale_take_turns():
    """In one buffer: what the layer before has left there is not taken for what this one gives."""
    bench = open_bench()
    wild = bench.backend.load([cuda_checks.stored("norm", np.full(128, 1e30, np.float32), F32)])
    other = SimpleNamespace(**vars(bench.layer) | {"norm": wild})
    rows = bench.rows(2)
    expected = bench.expected(rows)
    for before, layer in ((bench.layer, other), (other, bench.layer), (other, other), (bench.layer, bench.layer)):
        state = bench.backend.allocate_state(bench.config, 1, 1, "fp16", 2, 8, 16)
        run(bench, rows, (2,), state, before)
        out = run(bench, rows, (2,), state, layer, 1)
        assert relative_error(bench.taken(out), expected) < READY_TOLERANCE
        assert bench.was_left == (layer is bench.layer)


@pytest.mark.long
def test_a_second_state_begins_with_empty_words():
    """Scratch memory is made anew with it, where anything may have lain."""
    bench = open_bench()
    rows = bench.rows(3)
    first = bench.taken(run(bench, rows, (1, 1, 1)))
    run(bench, rows, (1, 1, 1))   # nobody takes it
    bench.backend.allocate_state(bench.config, 1, 1, "fp16", 3, 16, 16)
    assert bench.backend.ready.of(bench.out) is None
    assert np.array_equal(bench.taken(run(bench, rows, (1, 1, 1))), first)
    bench.backend.device.check_guards()
