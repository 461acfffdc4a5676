"""A pass, from the scheduler's Work to the model and back: arrays in, drawn tokens out.

Every pass ends in one wait, so the engine never runs ahead of the device. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np

from q27app.engine.block_pool import blocks_of
from q27app.engine.request import TokenLogprobs
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.scheduler import Drawn, Part, Work
from q27app.kernels.backend import Backend, Buffer, State
from q27app.kernels.batch import Batch, Sampled


class RunsBatches(Protocol):
    """What the runner needs of `model.forward.Model`. final: [rows, hidden] of the last pass."""

    backend: Backend
    final: Buffer

    def forward(self, batch: Batch, state: State, warm_mtp: bool = True) -> Buffer: ...


class Runner:
    """warm_mtp: passes also write the draft layer's keys and values."""

    def __init__(self, model: RunsBatches, state: State, vocab_size: int, warm_mtp: bool = False) -> None:
        self.model, self.state, self.vocab_size, self.warm_mtp = model, state, vocab_size, warm_mtp

    def open(self, slot: int, restore: Callable[[int], None] | None) -> None:
        """Make a slot ready for a sequence: empty, or as a snapshot has it."""
        if restore is None:
            self.state.clear_slot(slot)
        else:
            restore(slot)

    def run(self, work: Work) -> list[Drawn]:
        """Compute a pass and draw; one result a part. A deferred pass waits for `commit`, unless it commits what is accepted.

        Raises Q27Error."""
        backend = self.model.backend
        places = _logit_places(work)
        batch = make_batch(work, [row for place in places for row in place])
        logits = self.model.forward(batch, self.state, self.warm_mtp)
        if not len(batch.logit_rows):
            backend.download(self.model.final.rows(1))
            return [Drawn([]) for _ in work.parts]
        rows = [row for part, place in zip(work.parts, places, strict=True) for row in _logit_rows(part, len(place))]
        backend.sample(logits, sampling_rows(rows, self.vocab_size))
        if work.is_deferred:
            backend.accept()
            if work.commits_what_is_accepted:
                backend.commit()
        result = backend.result()
        ends = accumulate(len(place) for place in places)
        drawn = [_drawn(part, result, index, end) for index, (part, end) in enumerate(zip(work.parts, ends, strict=True))]
        if work.phase == "prefill" and work.parts[0].sequence.request.prompt_logits:
            drawn = [Drawn(drawn[0].tokens, drawn[0].logprobs, backend.download(logits))]
        return drawn

    def commit(self, num_rows: list[int]) -> None:
        """Fold the first num_rows[i] rows of each part of the deferred pass into its slot."""
        self.model.backend.commit(np.array(num_rows, np.int32))


def make_batch(work: Work, logit_rows: list[int]) -> Batch:
    """The arrays of a pass."""
    parts = work.parts
    needed = [blocks_of(part.start + len(part.tokens)) for part in parts]
    tables = np.full((len(parts), max(needed)), -1, np.int32)
    for row, part, count in zip(tables, parts, needed, strict=True):
        row[:count] = part.sequence.blocks[:count]
    return Batch(
        phase=work.phase,
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        positions=np.array([position for part in parts
                            for position in range(part.start, part.start + len(part.tokens))], np.int32),
        row_starts=np.array([0, *accumulate(len(part.tokens) for part in parts)], np.int32),
        slots=np.array([part.sequence.slot for part in parts], np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        deferred=work.is_deferred,
    )


def _logit_places(work: Work) -> list[range]:
    """Which rows of the pass want logits, part by part. A verify pass wants all; others the last known row that draws."""
    places, start = [], 0
    for part in work.parts:
        stop = start + len(part.tokens)
        wants_all = work.is_deferred or (work.phase == "prefill" and part.sequence.request.prompt_logits)
        places.append(range(start if wants_all else stop - 1 if part.draws else stop, stop))
        start = stop
    return places


def _logit_rows(part: Part, count: int) -> list[LogitRow]:
    """What to draw with after the last `count` rows of a part; the draws of those before its last known row are ignored."""
    sequence = part.sequence
    num_ignored = count - (part.num_drafts + 1 if part.draws else 0)
    first = part.start + len(part.tokens) - count + 1
    drafts = tuple(part.tokens[len(part.tokens) - part.num_drafts:])
    rows = [LogitRow(None, first + index) for index in range(num_ignored)]
    for index in range(count - num_ignored):
        mask = part.masks[index] if part.masks else None
        rows.append(LogitRow(sequence.request.params, first + num_ignored + index, sequence.counts, drafts[:index], mask))
    return rows


def _drawn(part: Part, result: Sampled, index: int, stop: int) -> Drawn:
    """The accepted run of a part whose logit rows end before `stop`."""
    if not part.draws:
        return Drawn([])
    count = int(result.accepted[index]) if part.num_drafts else 1
    first = stop - 1 - part.num_drafts
    tokens = result.tokens[first:first + count].tolist()
    if part.sequence.request.params.logprobs is None:
        return Drawn(tokens)
    return Drawn(tokens, [_named(token, result.logprobs[first + place]) for place, token in enumerate(tokens)])


def _named(token: int, entry: tuple) -> TokenLogprobs:
    logprob, ids, values = entry
    return TokenLogprobs(token, float(logprob), tuple(map(int, ids)), tuple(map(float, values)))
