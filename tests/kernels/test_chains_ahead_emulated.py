"""Chains of drafts begun ahead of a pass's result, by the CUDA kernels on the CPU (tests/kernels/emulation), against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels.batch import in_flight
from q27app.weights.dtypes import F16
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import needs_compiler
from tests.kernels.made import make_batch

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


def greedy_text(lines, slot: int, token: int, count: int) -> list[int]:
    """What greedy decoding says from a pending token on, that token first."""
    out = [token]
    for _ in range(count):
        out.append(int(lines.feed(slot, out[-1:], "decode")[0].argmax()))
    return out


def run_ahead(lines, texts: list[list[int]], steps: int, is_late: bool) -> tuple[list, list]:
    """A verify pass with one right draft for sequence 0 and none for 1, chains begun ahead, and the pass that takes them,
    sequence 1 first and sequence 0 with fewer. Accepted counts and drawn tokens of both passes. is_late: the first pass is
    committed when its result is known and the chains have run."""
    model, backend = lines.model, lines.model.backend
    told, rows = [], cuda_checks.sampling_rows(2, temperature=np.zeros(2, np.float32))

    def verify(parts: list[list[int]], slots: list[int]):
        batch = make_batch("verify", parts, [lines.lengths[slot] for slot in slots], slots, [lines.tables[slot] for slot in slots], None, True)
        count = batch.num_rows
        backend.sample(model.forward(batch, lines.state), cuda_checks.sampling_rows(count, temperature=np.zeros(count, np.float32)))
        backend.accept()

    for slot in range(2):
        lines.feed(slot, PROMPTS[slot])
        lines.reserve(slot, 128)
    wrong = (texts[0][2] + 1) % model.config.vocab_size
    verify([[*texts[0][:2], wrong], [texts[1][0], (texts[1][1] + 1) % model.config.vocab_size]], [0, 1])
    if not is_late:
        backend.commit()
    model.draft_ahead(lines.state, steps, rows)
    told.append(backend.result())
    if is_late:
        backend.commit(told[0].accepted)
    lines.lengths[0], lines.lengths[1] = lines.lengths[0] + 2, lines.lengths[1] + 1
    verify([[texts[1][1]] + [in_flight(1)] * steps, [texts[0][2]] + [in_flight(0)] * (steps - 1)], [1, 0])
    told.append(backend.result())
    return [one.accepted.tolist() for one in told], [one.tokens.tolist() for one in told]


PROMPTS = [list(range(5, 60)), list(range(9, 71))]


@pytest.mark.parametrize("is_late", [False, True])
def test_chains_that_are_begun_ahead_equal_numpy_and_those_that_wait(device, is_late):
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")
    waiting, plain = (cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")[0] for _ in range(2))
    texts = []
    for slot in range(2):
        plain.feed(slot, PROMPTS[slot])
        texts.append(greedy_text(plain, slot, 3 + slot, 3))
    for lines in (expected, found):
        accepted, tokens = run_ahead(lines, texts, 3, is_late)
        assert accepted[0] == [2, 1]
        assert tokens[0][:2] == texts[0][1:3] and tokens[0][3] == texts[1][1]
        assert tokens[1][0] == texts[1][2] and tokens[1][4] == texts[0][3]
        drafts = lines.model.backend.drafted().tokens
        for slot, text, known in ((0, texts[0], 2), (1, texts[1], 1)):
            if lines is expected:
                waiting.feed(slot, PROMPTS[slot])
                for token in text[:known]:
                    waiting.feed(slot, [token], "decode")
                waiting.reserve(slot, 128)
                batch = make_batch("draft", [[text[known]]], [waiting.lengths[slot]], [slot], [waiting.tables[slot]])
                chain = waiting.model.draft_chain(batch, waiting.state, True, 3, cuda_checks.sampling_rows(1, temperature=np.zeros(1, np.float32)),
                                                  np.array([3], np.int32))
                assert drafts[:, slot].tolist() == chain.tokens[:, 0].tolist()
        kept = drafts if lines is expected else kept
        assert drafts.tolist() == kept.tolist()
