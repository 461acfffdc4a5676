"""How fast the bundled model answers through the engine on the NumPy backend: a coding agent's first prompt, then its answer.

Rates come from the process's own processor time, so that what else runs on the machine matters little: reading is shared by two
cores, writing is one core's work. On a quiet machine of two cores the clock shows about the same.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import Request, SamplingParams
from q27app.kernels.numpy_workers import num_workers
from q27app.paths import demo_model
from tests.engine.toy import Desk
from tests.pace import slowness

PROMPT, SHORT, WRITTEN, CHUNK = 30_000, 64, 96, 512


def rate(desk: Desk, prompt: list[int], max_tokens: int) -> float:
    """Seconds of processor time of one request, end of text not minded."""
    answer = desk.submit(Request(f"of {len(prompt)} and {max_tokens}", tuple(prompt), SamplingParams(max_tokens=max_tokens)))
    begin = time.process_time()
    desk.run()
    assert len(answer.tokens) == max_tokens
    return time.process_time() - begin


@pytest.mark.long
def test_the_bundled_model_reads_and_writes_fast_enough(long_scale, capsys):
    """At least 400 tokens/s over the first 30,000 and 60 tokens/s in a short text, on two cores."""
    length = max(CHUNK, int(PROMPT * long_scale))
    loaded = open_model(EngineConfig(demo_model(), "numpy", context=length + 512, slots=2, prefill_chunk=CHUNK), lambda share: None)
    desk, tokens = Desk(loaded), [int(token) for token in np.random.default_rng(0).integers(0, 4000, length)]
    rate(desk, tokens[:SHORT], 2)
    read = length * min(2, num_workers()) / rate(desk, tokens[1:length + 1] + tokens[:1], 1)
    begun = rate(desk, tokens[2:SHORT], 1)
    written = WRITTEN / (rate(desk, tokens[3:SHORT], WRITTEN + 1) - begun)
    with capsys.disabled():
        print(f"\nbundled model: {length} tokens read at {read:.0f} tokens/s, {WRITTEN} written at {written:.0f}", end="")
    slow = slowness()
    assert read >= 400 / slow
    assert written >= 60 / slow
