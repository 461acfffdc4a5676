"""Chains of drafts by the CUDA kernels, which run on the CPU (tests/kernels/emulation), against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.weights.dtypes import F16
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import needs_compiler
from tests.kernels.made import make_batch

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(3, np.float32)}, {},
    {"presence": np.full(3, 2, np.float32), "frequency": np.full(3, 0.5, np.float32), "penalty_starts": np.array([0, 2, 2, 5], np.int32),
     "penalty_ids": np.arange(5, dtype=np.int32), "penalty_counts": np.ones(5, np.int32)},
], ids=["greedy", "plain", "penalties"])
def test_a_chain_of_drafts_equals_numpy(device, changes):
    """Steps queued on the device against the same steps in NumPy: tokens, and places that do not pass a limit."""
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")
    limits, rows, results = np.array([4, 1, 3], np.int32), cuda_checks.sampling_rows(3, **changes), []
    for lines in (expected, found):
        for slot in range(3):
            lines.feed(slot, list(range(5 + slot, 60)))
            lines.reserve(slot, 128)
        batch = make_batch("draft", [[3]] * 3, lines.lengths[:3], [0, 1, 2], lines.tables[:3])
        results.append(lines.model.draft_chain(batch, lines.state, True, 4, rows, limits))
    for row, limit in enumerate(limits.tolist()):
        assert results[0].tokens[:limit, row].tolist() == results[1].tokens[:limit, row].tolist()
        np.testing.assert_allclose(results[1].margins[:limit, row], results[0].margins[:limit, row], rtol=0.02, atol=0.02)
    words = found.model.backend.device.download(found.model.backend.area.at("positions"), 12).view(np.int32)
    assert (words - found.lengths[:3]).tolist() == [3, 0, 2]


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(2, np.float32)}, {}, {"temperature": np.full(2, 30, np.float32), "top_p": np.full(2, 0.99, np.float32)},
    {"top_k": np.full(2, 3, np.int32)},
    {"masks": np.concatenate([np.zeros((2, 8), np.uint32), np.full((2, 42), 0xFFFFFFFF, np.uint32)], 1)},
], ids=["greedy", "plain", "more than the list", "top_k", "rare ones allowed alone but for the last"])
def test_narrow_drafts_equal_numpy_and_are_never_rare(device, changes):
    config = cuda_checks.replace(cuda_checks.NANO, vocab_size=9600 if "top_p" in changes else 1600)
    common = 7040 if "top_p" in changes else 256
    expected, found = cuda_checks.pair_of_lines(device, config, F16, "fp16", common_ids=common)
    rare, rows, results = (common, config.vocab_size - 512), cuda_checks.sampling_rows(2, **changes), []
    for lines in (expected, found):
        assert lines.model.rare_ids == rare
        for slot in range(2):
            lines.feed(slot, list(range(5 + slot, 60)))
            lines.reserve(slot, 128)
        batch = make_batch("draft", [[3]] * 2, lines.lengths[:2], [0, 1], lines.tables[:2])
        for is_narrow in (False, True):   # what the whole head left in the logits is not looked at
            results.append(lines.model.draft_chain(batch, lines.state, True, 4, rows, np.full(2, 4, np.int32), is_narrow))
    for whole, narrow in zip(results[:2], results[2:]):
        assert whole.tokens.tolist() == narrow.tokens.tolist()
        np.testing.assert_allclose(narrow.margins, whole.margins, rtol=0.02, atol=0.02)
    assert ((results[3].tokens < rare[0]) | (results[3].tokens >= rare[1])).all()
    if "temperature" not in changes and "masks" not in changes:
        assert ((results[2].tokens >= rare[0]) & (results[2].tokens < rare[1])).any()
