"""Drawing tokens and checksums by the CUDA kernels, which run on the CPU (tests/kernels/emulation), against NumPy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from q27app.kernels import reference
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.reference_sample import sample_rows
from q27app.weights.dtypes import F16, Q4_G64
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import needs_compiler
from tests.kernels.made import make_batch

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(6, np.float32)}, {}, {"top_k": np.full(6, 7, np.int32)}, {"top_p": np.full(6, 0.7, np.float32)},
    {"min_p": np.full(6, 0.1, np.float32)},
    {"top_k": np.full(6, 40, np.int32), "top_p": np.full(6, 0.9, np.float32), "num_logprobs": np.full(6, 3, np.int32)},
    {"presence": np.full(6, 2, np.float32), "frequency": np.full(6, 0.5, np.float32), "penalty_starts": np.arange(7, dtype=np.int32) * 2,
     "penalty_ids": np.arange(12, dtype=np.int32), "penalty_counts": np.ones(12, np.int32)},
], ids=["greedy", "plain", "top_k", "top_p", "min_p", "both, logprobs", "penalties"])
def test_sampling_equals_numpy(device, changes, vocab=200):
    backend = CudaBackend(device)
    random = np.random.default_rng(11)
    logits = (4 * random.standard_normal((6, vocab))).astype(np.float32)
    logits[0, 10] = logits[0, 20] = logits[0].max() + 1
    backend.batch = SimpleNamespace(num_seqs=1)
    cuda_checks.open_state(backend, 256)
    backend.batch = SimpleNamespace(num_seqs=6)
    rows = cuda_checks.sampling_rows(6, **changes)
    backend.sample(backend.upload(logits), rows)
    found = backend.result()
    tokens, margins, logprobs = sample_rows(logits, rows)
    assert found.tokens.tolist() == tokens.tolist()
    np.testing.assert_allclose(found.margins, margins, rtol=1e-6)
    for mine, theirs in zip(found.logprobs, logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_allclose([mine[0], *mine[2]], [theirs[0], *theirs[2]], rtol=1e-5, atol=1e-5)
            assert mine[1].tolist() == theirs[1].tolist()


@pytest.mark.parametrize("changes", [
    {"temperature": np.full(6, 30, np.float32), "top_p": np.full(6, 0.99, np.float32)},
    {"top_k": np.array([0, 5, 0, 64, 65, 1], np.int32), "top_p": np.array([1, 1, 0.5, 0.9, 0.9, 0.9], np.float32),
     "temperature": np.array([0, 1, 1, 1, 1, 1], np.float32), "min_p": np.array([0, 0, 0, 0.01, 0, 0], np.float32)},
], ids=["more than the list", "mixed"])
def test_cuts_of_a_larger_vocabulary_equal_numpy(monkeypatch, device, changes):
    """More ids than a list holds; what a bound leaves out is never kept."""
    monkeypatch.setattr(cuda_checks, "NANO", cuda_checks.replace(cuda_checks.NANO, vocab_size=6000))
    test_sampling_equals_numpy(device, changes, 6000)


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(6, np.float32)}, {"top_k": np.full(6, 40, np.int32), "top_p": np.full(6, 0.9, np.float32)}], ids=["greedy", "both"])
def test_a_vocabulary_that_is_no_multiple_of_four_is_sampled_alike(monkeypatch, device, changes):
    monkeypatch.setattr(cuda_checks, "NANO", cuda_checks.replace(cuda_checks.NANO, vocab_size=203))
    test_sampling_equals_numpy(device, changes, 203)


def test_accepted_rows_are_counted_for_every_sequence(device):
    backend = CudaBackend(device)
    state, starts = cuda_checks.open_state(backend, 256), np.array([0, 1, 4, 5, 21], np.int32)
    for wrong in (None, 2, 6, 12, 20):
        batch = make_batch("verify", [[7], [7, 1, 2], [7], [7, *range(1, 16)]], [0, 0, 0, 0], [0, 0, 0, 0], [[0]] * 4, None, True)
        drawn = np.roll(batch.tokens, -1)
        if wrong is not None:
            drawn[wrong - 1] = 99
        backend.begin(batch, state)
        sampler = backend._sampler
        sampler._rows = len(drawn)
        device.upload(sampler.tokens, drawn.astype(np.int32))
        backend.accept()
        found = device.download(sampler.accepted, 16).view(np.int32).tolist()
        wanted = [next((row - first for row in range(first + 1, end) if drawn[row - 1] != batch.tokens[row]), end - first)
                  for first, end in zip(starts, starts[1:])]
        assert found == wanted and (wrong is None) == (found == [1, 3, 1, 16]), (wrong, found, wanted)


def test_checksums_are_those_of_the_memory_and_see_a_changed_bit(device):
    backend = CudaBackend(device)
    random = np.random.default_rng(4)
    tensors = [cuda_checks.made_tensor(random, name, 37, 64, dtype) for name, dtype in (("a", Q4_G64), ("b", F16))]
    weights = [backend.load([tensor]) for tensor in tensors]
    before = backend.checksums()
    assert before == [(tensor.name, reference.checksum(device.download(weight.address, weight.nbytes).view(np.uint32)))
                      for tensor, weight in zip(tensors, weights)]
    word = device.download(weights[1].address + 40, 4)
    word[2] ^= 16
    device.upload(weights[1].address + 40, word)
    after = backend.checksums()
    assert after[0] == before[0] and after[1] != before[1]
