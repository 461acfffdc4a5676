"""What happens between loading and the first request: every usual shape of a pass is run, recorded and timed, so that no request
waits for a recording and the depth of drafts is chosen by measured prices from the first step on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from q27app.engine.depth import PassPrices
from q27app.engine.request import SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.kernels.backend import State
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch, Phase

TIMES = 3
"""Runs of a shape: plainly, recorded, timed."""


def warm_up(model: Any, state: State, num_slots: int, max_draft: int, drafts_mtp: bool, prices: PassPrices) -> None:
    """Run passes of one sequence with 1 to 1 + max_draft rows, plain decodes of several sequences, and draft steps.

    model: `model.forward.Model`; the slots are empty afterwards. max_draft 0: no drafts. drafts_mtp: the draft layer is used.
    """
    count = min(num_slots, state.num_blocks, MAX_DECODE_ROWS)
    for rows in range(1, 2 + max_draft):
        phase: Phase = "verify" if rows > 1 else "decode"
        prices.record_pass(rows, _timed(lambda: _forward(model, state, _batch(phase, [rows]), drafts_mtp)))
    for together in range(2, count + 1):
        _timed(lambda: _forward(model, state, _batch("decode", [1] * together), drafts_mtp))
    for together in range(1, count + 1 if drafts_mtp else 1):
        steps = min(4, MAX_DECODE_ROWS - 1)
        draws = sampling_rows([LogitRow(SamplingParams(), 2)] * together, model.config.vocab_size)
        limits = np.full(together, steps, np.int32)
        ms = _timed(lambda: model.draft_chain(_batch("draft", [1] * together), state, True, steps, draws, limits)) / steps
        if together == 1:
            prices.record_step(ms)
    for slot in range(count):
        state.clear_slot(slot)


def _timed(run: Callable[[], Any]) -> float:
    """Milliseconds of the last of TIMES runs, each of which waits for its end."""
    for _ in range(TIMES):
        started = time.monotonic()
        run()
    return (time.monotonic() - started) * 1e3


def _forward(model: Any, state: State, batch: Batch, warms_mtp: bool) -> None:
    model.forward(batch, state, warms_mtp)
    model.backend.download(model.final.rows(1))


def _batch(phase: Phase, lengths: list[int]) -> Batch:
    """Sequence i in slot i and block i, from position 1: nobody decodes at 0."""
    rows = sum(lengths)
    return Batch(
        phase=phase,
        tokens=np.zeros(rows, np.int32),
        positions=np.concatenate([np.arange(1, 1 + length) for length in lengths]).astype(np.int32),
        row_starts=np.cumsum([0, *lengths]).astype(np.int32),
        slots=np.arange(len(lengths), dtype=np.int32),
        block_tables=np.arange(len(lengths), dtype=np.int32)[:, None],
        logit_rows=np.arange(rows, dtype=np.int32),
        deferred=phase == "verify",
    )
