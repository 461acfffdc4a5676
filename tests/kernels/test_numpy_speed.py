"""How fast the NumPy backend reads a coding agent's first prompt and writes, in the demo's geometry.

Rates come from the process's own processor time, so that what else runs on the machine matters little: prefill on two cores that
share its tiles evenly, decode on one. On an idle machine of two cores the clock shows somewhat less.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels.numpy_workers import num_workers
from tests.kernels import made
from tests.pace import slowness

PROMPT = 30_000
CHUNK = 512
BUNDLED = replace(made.DEMO, hidden_size=256, intermediate_size=256, vocab_size=5888, num_heads=2, delta_key_heads=1,
                  delta_value_heads=3)


@pytest.mark.long
@pytest.mark.parametrize("config, prefill, decode", [(BUNDLED, 600, 60), (made.DEMO, 400, 60)], ids=["bundled", "wide"])
def test_tokens_a_second(config, prefill, decode, long_scale, capsys):
    """prefill: at least, over the first 30,000 tokens; decode: at least, in a short text."""
    length = max(CHUNK, int(PROMPT * long_scale) // CHUNK * CHUNK)
    lines = made.Lines(made.dense_model(config), 2, length // 32 + 8)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, length)

    def rate(count, work, threads=1):
        processor, clock = time.process_time(), time.perf_counter()
        work()
        return count * threads / (time.process_time() - processor), count / (time.perf_counter() - clock)

    def read():
        for start in range(0, length, CHUNK):
            lines.feed(0, tokens[start:start + CHUNK], logit_rows=[CHUNK - 1])

    def write(slot):
        for token in tokens[:32]:
            lines.feed(slot, [token], "decode")

    lines.feed(1, tokens[:64])
    found = {"prefill": rate(length, read, min(2, num_workers())), "decode": rate(32, lambda: write(1)), "decode at the end": rate(32, lambda: write(0))}
    with capsys.disabled():
        for name, (processor, clock) in found.items():
            print(f"\n{name:18} {length} tokens: {processor:7.1f} tokens/s of processor time, {clock:7.1f} by the clock", end="")
    slow = slowness()
    assert found["prefill"][0] >= prefill / slow
    assert found["decode"][0] >= decode / slow
