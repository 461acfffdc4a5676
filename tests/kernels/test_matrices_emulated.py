"""The matrix stages of the CUDA backend on the CPU, thread by thread (tests/kernels/emulation), against NumPy at a small size."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels import reference
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_ready import product_scale
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.made import make_batch, relative_error

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["wide", "99 KiB"])
@pytest.mark.parametrize("mix", cuda_checks.MIXES)
def test_matrix_stages_equal_numpy_and_keep_a_rows_bits(card, mix):
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES[mix], 256, 1)
    backend.empty((96, 256), "float32", "x")
    state = cuda_checks.open_state(backend, 256)
    for phase, counts in (("decode", (1, 2, 3, 9)), ("prefill", (1, 70))):
        assert cuda_checks.check_linear(backend, state, stage, phase, counts) < cuda_checks.TENSOR_CORE_TOLERANCE
    device.check_guards()


def test_two_rows_side_by_side_that_are_longer_than_what_is_kept_of_them():
    """Columns past 6,144 are read a second time (Norm::KEEP)."""
    device = EmulatedDevice()
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES["mix"], 6400, 1)
    backend.empty((96, 6400), "float32", "x")
    assert cuda_checks.check_linear(backend, cuda_checks.open_state(backend, 6400), stage, "decode", (1, 2, 3)) < cuda_checks.TENSOR_CORE_TOLERANCE
    device.check_guards()


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["wide", "99 KiB"])
def test_a_prompt_meets_f16_matrices_without_its_rounding(card):
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES["f16"], 256, 1)
    x = cuda_checks.rows_with_peaks(np.random.default_rng(2), 70, 256, np.ones(256, np.float32))
    backend.empty((70, 256), "float32", "x")
    backend.begin(make_batch("prefill", [[0] * 70], [0], [0], [[0, 1]]), cuda_checks.open_state(backend, 256))
    y = backend.upload(np.full((70, 50), np.nan, np.float32))
    backend.project(stage.norm, stage.weight, backend.upload(x), y)
    assert relative_error(backend.download(y), reference.project(stage.norm_values, stage.values, x, 1e-6)) < 2e-6
    device.check_guards()


def rounded_gate_up(stage: cuda_checks.Stage, x: np.ndarray, is_prefill: bool) -> np.ndarray:
    """gate_up in float64, but for activations in fp16, each row scaled so that its largest number is 2^14. Prefill has the weights in
    fp16 too, the row family the products, those of every second four columns a sixteenth of the others."""
    rows = x.astype(np.float64)
    rows *= stage.norm_values / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6)
    scale = 16384 / np.abs(rows).max(1, keepdims=True)
    values = stage.values.astype(np.float16) if is_prefill else stage.values
    gate, up = np.split((rows * scale).astype(np.float16).astype(np.float64) / scale @ values.astype(np.float64).T, 2, axis=1)
    products = gate / (1 + np.exp(-gate)) * up
    if is_prefill:
        return products
    sizes = np.linalg.norm((stage.values * stage.norm_values).astype(np.float64).reshape(2, -1, stage.cols), axis=2).prod(axis=0)
    scales = product_scale(sizes, stage.cols) / np.where(np.arange(products.shape[1]) & 4, 16, 1)
    return (products * scales).astype(np.float16) / scales


@pytest.mark.parametrize("phase, rows", [("decode", 12), ("prefill", 1), ("prefill", 17)])
def test_a_pair_is_as_far_from_numpy_as_its_roundings_to_fp16(phase, rows):
    """The 5e-4 are reached by the prefill of one of these rows: by chance, in a product of two sums with the error of fp16 each."""
    device = EmulatedDevice(CARD)
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES["pair"], 640, 1)
    backend.empty((96, 640), "float32", "x")
    random = np.random.default_rng(7)
    x = cuda_checks.rows_with_peaks(random, rows, 640, random.standard_normal(640).astype(np.float32))
    backend.begin(make_batch(phase, [[0] * rows], [0], [0], [[0]]), cuda_checks.open_state(backend, 640))
    found, error = stage.run(x)
    assert error < cuda_checks.TENSOR_CORE_TOLERANCE
    assert relative_error(found, rounded_gate_up(stage, x, phase == "prefill")) < error / 10
