"""A pass, from the scheduler's Work to the model and back: arrays in, drawn tokens out.

`start` launches, `finish` waits: between the two the device computes and the host has time. Every pass is finished before the
next one is started. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from q27app.engine.block_pool import blocks_of
from q27app.engine.request import TokenLogprobs
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.sequence import Sequence
from q27app.engine.work import Drawn, Part, Work
from q27app.errors import Q27Error, no_host_memory
from q27app.kernels.backend import Backend, Buffer, State
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch, Keep, Sampled


GoAhead = Callable[[list[Sequence], list[int]], None]


class RunsBatches(Protocol):
    """What the runner needs of `model.forward.Model`. final: [rows, hidden] of the last pass."""

    backend: Backend
    final: Buffer
    num_fresh: int
    """Passes so far that took longer than the next ones of their shape will, because they were recorded."""

    def forward(self, batch: Batch, state: State, warm_mtp: bool = True) -> Buffer: ...


@dataclass(frozen=True)
class Pass:
    """A pass that was started. places: which rows have logits, part by part."""

    work: Work
    places: list[range]
    logits: Buffer

    @property
    def draws(self) -> bool:
        return any(map(len, self.places))


class Runner:
    """warm_mtp: passes also write the draft layer's keys and values. go_ahead: see `Drafter.go_ahead`."""

    def __init__(self, model: RunsBatches, state: State, vocab_size: int, warm_mtp: bool = False,
                 go_ahead: GoAhead | None = None) -> None:
        self.model, self.state, self.vocab_size, self.warm_mtp = model, state, vocab_size, warm_mtp
        self._go_ahead = go_ahead

    def open(self, slot: int, restore: Callable[[int], None] | None) -> None:
        """Make a slot ready for a sequence: empty, or as a snapshot has it."""
        if restore is None:
            self.state.clear_slot(slot)
        else:
            restore(slot)

    @property
    def is_ahead(self) -> bool:
        """Whether the device computes while the host does something else between `start` and `finish`."""
        return self.model.backend.is_ahead

    @property
    def num_fresh(self) -> int:
        return self.model.num_fresh

    def start(self, work: Work, goes_ahead: bool = True) -> Pass:
        """Launch a pass and its draws. A deferred pass waits for `commit`, unless it commits what is accepted. Raises Q27Error.
        goes_ahead: drafts for the pass behind it may be begun."""
        backend = self.model.backend
        places = _logit_places(work)
        batch = make_batch(work, [row for place in places for row in place])
        running = Pass(work, places, self.model.forward(batch, self.state, self.warm_mtp))
        if running.draws:
            self.draw(running)
            if work.is_deferred:
                backend.accept()
                if work.commits_what_is_accepted:
                    backend.commit()
            if goes_ahead and self._go_ahead is not None and work.phase != "prefill" and _draws_alone(work):
                self._go_ahead([part.sequence for part in work.parts], [part.num_drafts for part in work.parts])
        return running

    def draw(self, running: Pass) -> None:
        """Draw from the logits of the newest pass; again, if masks have changed since."""
        rows = [row for part, place in zip(running.work.parts, running.places, strict=True) for row in _logit_rows(part, len(place))]
        self.model.backend.sample(running.logits, sampling_rows(rows, self.vocab_size))

    def start_behind(self, work: Work) -> Pass:
        """Launch a decode pass behind the one that was started, whose draws are its tokens. `finish` that one next. Raises Q27Error;
        then the draws of that one are lost."""
        self.model.backend.hold()
        try:
            return self.start(work, goes_ahead=False)
        except Q27Error:
            self.model.backend.result()
            raise

    def finish(self, running: Pass) -> list[Drawn]:
        """Wait for a pass; one result a part. Raises Q27Error."""
        backend, work, places = self.model.backend, running.work, running.places
        if not running.draws:
            backend.download(self.model.final.rows(1))
            return [Drawn([]) for _ in work.parts]
        result = backend.result()
        ends = accumulate(len(place) for place in places)
        drawn = [_drawn(part, result, index, end) for index, (part, end) in enumerate(zip(work.parts, ends, strict=True))]
        if work.phase == "prefill" and work.parts[0].sequence.request.prompt_logits:
            drawn = [Drawn(drawn[0].tokens, drawn[0].logprobs, self._whole(running.logits))]
        return drawn

    def _whole(self, logits: Buffer) -> np.ndarray:
        try:
            return self.model.backend.download(logits)
        except MemoryError as error:
            raise no_host_memory(f"the logits of {logits.shape[0]} prompt tokens", error) from error

    def commit(self, num_rows: list[int]) -> None:
        """Fold the first num_rows[i] rows of each part of the deferred pass into its slot."""
        self.model.backend.commit(np.array(num_rows, np.int32))


def _draws_alone(work: Work) -> bool:
    """Each part is a pending token and its drafts."""
    return all(part.draws and len(part.tokens) == 1 + part.num_drafts for part in work.parts)


def make_batch(work: Work, logit_rows: list[int]) -> Batch:
    """The arrays of a pass."""
    parts = work.parts
    spare = 0 if work.phase == "prefill" else 2 * MAX_DECODE_ROWS  # a chain may be begun behind the pass
    needed = [min(len(part.sequence.blocks), blocks_of(part.start + len(part.tokens) + spare)) for part in parts]
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
        keeps=tuple(Keep(index, position - part.start, slot) for index, part in enumerate(parts) for position, slot in part.keeps),
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
