"""Rows that gate_up, attention and the delta rule leave ready for the next stage: their scale, and both stages one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels import cuda_ready
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_ready import gated_scale, product_scale, value_scale
from q27app.kernels.kv_formats import kv_format
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler

COLS = 256


def test_no_product_of_normed_rows_reaches_the_largest_half():
    """The worst rows: along the gate's row, the up's, and between."""
    random = np.random.default_rng(0)
    for hidden, size in ((64, 1e-3), (512, 1.0), (5120, 30.0)):
        gate, up = (random.standard_normal((40, hidden)) * size for _ in range(2))
        gate[3] = up[3]   # what bends both at once
        scale = product_scale(np.linalg.norm(gate, axis=1) * np.linalg.norm(up, axis=1), hidden)
        assert scale > 0 and np.log2(scale) == round(np.log2(scale))
        for x in (*gate, *up, *(gate + up)):
            x = x / np.sqrt(np.square(x).mean())
            assert np.abs(gate @ x * (up @ x)).max() * scale <= cuda_ready.TOP
        x = gate[3] / np.sqrt(np.square(gate[3]).mean())
        assert abs(gate[3] @ x * (up[3] @ x)) * scale > cuda_ready.TOP / 4


def test_no_head_of_the_delta_rule_reaches_the_largest_half():
    """The worst: all of a head in one number, whose gate's row is the input's direction."""
    random, dim = np.random.default_rng(0), 128
    for hidden, size in ((64, 1e-3), (512, 1.0), (5120, 30.0)):
        z, norm = random.standard_normal((dim, hidden)) * size, 1 + random.standard_normal(dim) / 5
        scale = gated_scale(np.linalg.norm(z, axis=1) * np.abs(norm), hidden, dim)
        assert scale > 0 and np.log2(scale) == round(np.log2(scale))
        largest = 0.0
        for column, x in enumerate(z):
            gate, o = z @ (x / np.sqrt(np.square(x).mean())), 0.01 * random.standard_normal(dim)
            o[column] = 5.0
            left = o / np.sqrt(np.square(o).mean()) * norm * gate / (1 + np.exp(-np.maximum(gate, -700.0)))
            largest = max(largest, np.abs(left).max())
        assert cuda_ready.TOP / 4 < largest * scale <= cuda_ready.TOP


@pytest.mark.parametrize("sizes", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [1e-40, 1e-40], [1e4] + [1.0] * 999, [1e30, 1.0]])
def test_a_scale_that_does_not_do_for_all_rows_is_none(sizes):
    assert product_scale(np.array(sizes, np.float32), 1024) == 0.0


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("width, dtype, last, peak, card", [
    (512, Q4_G64, Q4_G64, 1.0, CARD), (192, Q4_G64, Q4_G64, 1.0, SMALL_CARD), (128, Q8_G128, Q8_G128, 1.0, CARD), (320, F16, Q4_G64, 1.0, CARD),
    (92, F32, F32, 1.0, CARD), (344, Q4_G64, F16, 1.0, CARD), (512, F16, Q4_G64, 1e4, CARD),
], ids=["q4", "q4 odd", "q8 odd", "f16 and q4", "f32", "q4 and f16", "too far apart"])
def test_both_stages_equal_numpy_and_keep_a_rows_bits(width, dtype, last, peak, card):
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    both = cuda_checks.Both(backend, COLS, width, dtype, last, peak)
    backend.empty((96, COLS), "float32", "x")
    state = cuda_checks.open_state(backend, COLS)
    error = cuda_checks.check_both(both, state, (1, 2, 3, 8, 9, 16, 17, 35))
    assert error < (cuda_checks.TWO_STAGES_TOLERANCE if peak == 1.0 else 1e-3)   # there a single product is nearly all of a row
    assert both.is_ready == (peak == 1.0)
    random, row = np.random.default_rng(7), np.ones(COLS, np.float32)
    assert both.run(state, cuda_checks.rows_with_peaks(random, 5, COLS, row), looks=True)[1] < cuda_checks.TENSOR_CORE_TOLERANCE
    assert not both.is_ready   # downloaded: they lie where they always did
    both.run(state, cuda_checks.rows_with_peaks(random, 5, COLS, row))
    assert both.run(state, cuda_checks.rows_with_peaks(random, 20, COLS, row), "prefill")[1] < cuda_checks.TWO_STAGES_TOLERANCE
    device.check_guards()


def test_no_value_that_a_format_keeps_reaches_the_largest_half():
    """The worst rows: along one value's row, and along a whole block's; values that a format makes larger, and those near its smallest."""
    random = np.random.default_rng(0)
    for hidden, size in ((64, 1e-3), (512, 1.0)):
        rows = random.standard_normal((256, hidden)) * size
        rows[40:60] = rows[40] * np.linspace(0.5, 1.0, 20)[:, None]
        for form in ("fp16", "fp8", "turbo5k", "turbo3"):
            codec = kv_format(form).value
            scale = value_scale(np.linalg.norm(rows, axis=1), hidden, codec.multiple)
            assert scale > 0 and np.log2(scale) == round(np.log2(scale))
            x = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True))
            values = codec.turn_back(codec.decode(codec.encode((x @ rows.T).astype(np.float32))))
            assert np.abs(values).max() * scale <= cuda_ready.TOP


@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize("size", [0.0, np.nan, np.inf, 1e6])
def test_values_without_a_scale_stay_floats(size, block):
    assert value_scale(np.array([size] + [size if size != 1e6 else 1.0] * 255, np.float32), 1024, block) == 0.0
