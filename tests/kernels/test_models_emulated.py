"""Small models on the CUDA kernels, which run on the CPU (tests/kernels/emulation), against NumPy: whole lives, states, rows together and alone."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.dtypes import F16, Q4_G64
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


@pytest.mark.parametrize("kv_format", ["fp16", "fp8", "turbo5k"])
def test_a_model_equals_numpy_through_its_life(device, kv_format):
    """A number near a threshold may get another code than NumPy's: that is the error of the small formats here."""
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, kv_format)
    errors = cuda_checks.check_model(expected, found)
    assert max(errors.values()) < (2e-3 if kv_format == "fp16" else 2e-2), errors


def test_states_kept_within_a_prefill_are_those_of_its_parts(device):
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, F16)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 256)
    cuda_checks.check_keeps(cuda_checks.Lines(model, 4, 16, "fp16", 64))


def test_a_quantised_model_equals_numpy_through_its_life(device):
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, Q4_G64, "fp16")
    errors = cuda_checks.check_model(expected, found, prompt=20)
    assert max(errors.values()) < 2e-3, errors


def test_a_decode_pass_behind_another_takes_what_that_one_drew(device):
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, F16)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 64)
    cuda_checks.check_pass_behind(cuda_checks.Lines(model, 2, 4, "fp16", 16), cuda_checks.sampling_rows(2, temperature=np.array([0, 0.8], np.float32)))


@pytest.mark.parametrize("dtype", [F16, Q4_G64])
def test_rows_decoded_together_leave_what_rows_decoded_singly_leave(device, dtype):
    """How an answer is computed again: slot, keys and values, logits after the last row."""
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, dtype)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 64)
    tokens, found = [int(token) for token in np.random.default_rng(2).integers(0, 100, 40)], []
    for size in (1, 5, 16):
        lines = cuda_checks.Lines(model, 1, 4, "fp16", 16)
        lines.feed(0, tokens[:9])
        for start in range(9, 40, size):
            logits = lines.feed(0, tokens[start:start + size], "decode")
        entries = lines.state.export_blocks(list(lines.tables[0])[:1])
        found.append((lines.state.export_slot(0).tobytes(), entries.tobytes(), logits[-1].tobytes()))
        lines.state.release()
    assert found[0] == found[1] == found[2]
