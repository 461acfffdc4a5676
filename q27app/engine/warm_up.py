"""Every usual shape of a pass is run, recorded and timed while nobody waits, so that no request waits for a recording, for a kernel
that is loaded at its first use, and the depth of drafts is chosen by measured prices from the first step on. Contexts are short here, but
for the likeliest shapes that launch otherwise in a deep one (`Backend.depth_group`): they are run there too.

Likely shapes come first; a step is one shape, some 30 ms on a card. Owned by the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from q27app.engine.block_pool import BlockPool, blocks_of
from q27app.engine.depth import PassPrices
from q27app.engine.request import SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.slot_pool import SlotPool
from q27app.errors import OutOfMemory
from q27app.kernels.backend import State
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch, Phase, in_flight

TIMES = 3
"""Runs of a shape: plainly, recorded, timed."""
PREFILLS = (64, 128, 256, 512)
"""Rows of the prefills; each is run twice, the second time is taken."""
USUAL_DEPTHS = (5, 7, 4, 6, 3, 8, 2, 1)
"""Drafts of a pass as long as its text is not copied, the likeliest numbers first: what `depth` chooses in a conversation's first
hundred steps where three to nineteen of twenty are right, with a price of a pass that grows little up to 8 rows."""
PRICED_FIRST = 2
"""After so many of them: what a pass costs from GROUP_ROWS + 1 rows on."""
GROUP_ROWS = 8
"""Rows that tensor cores take at once: one more is dearer by far than a straight line says, later ones again are not. No answer is to
find that out by trying."""
FEW_STEPS = 2
"""Chains whose lengths differ by less tell no price of a step."""
STEPS = 4
"""Draft steps of a chain that is timed."""
SAMPLERS = (SamplingParams(), SamplingParams(temperature=1.0, top_k=20, top_p=0.9))
"""A greedy row, and one that runs every kernel of a draw."""
MOST_RECORDED = 1 + len(SAMPLERS)
"""Recordings of a shape: a pass, and chains behind it."""

Shape = tuple[Literal["prefill", "rows", "price", "deep", "draft"], tuple[int, ...]]
"""What is run, and the rows of each sequence. price: rows without the chains behind them. deep: rows at the window's end."""


def usual_shapes(num_slots: int, max_draft: int, drafts_mtp: bool, most_rows: int = PREFILLS[-1]) -> list[Shape]:
    """Shapes of a server with num_slots slots, the likeliest first. max_draft 0: no drafts. drafts_mtp: the draft layer is used.
    most_rows: of a prefill.

    Of several sequences with drafts those with as many drafts each: there are too many others, and a recording takes memory."""
    count = min(num_slots, MAX_DECODE_ROWS)
    deepest = min(max_draft, MAX_DECODE_ROWS - 1)
    shapes: list[Shape] = [("prefill", PREFILLS[:1]), ("rows", (1,))]
    shapes += [("draft", (1,))] if drafts_mtp else []
    depths = sorted(range(1, deepest + 1), key=lambda depth: (USUAL_DEPTHS + (depth,)).index(depth))
    num_usual = sum(depth in USUAL_DEPTHS for depth in depths)
    shapes += [("rows", (1 + depth,)) for depth in depths[:PRICED_FIRST]]
    shapes += [("price", (rows,)) for rows in sorted({GROUP_ROWS + 1, 1 + deepest}) if GROUP_ROWS < rows <= 1 + deepest]
    shapes += [("rows", (1 + depth,)) for depth in depths[PRICED_FIRST:num_usual]]
    shapes += [("prefill", (rows,)) for rows in PREFILLS if rows <= most_rows for _ in range(1 + (rows > PREFILLS[0]))]
    shapes += [("deep", (1 + depth,)) for depth in depths[:num_usual]]
    shapes += [("rows", (1 + depth,)) for depth in depths[num_usual:]]
    for together in range(2, count + 1):
        shapes += [("rows", (1,) * together)] + ([("draft", (1,) * together)] if drafts_mtp else [])
    for together in range(2, count + 1):
        for each in range(2, min(MAX_DECODE_ROWS // together, 1 + deepest) + 1):
            shapes.append(("rows", (each,) * together))
    return shapes


class WarmUp:
    """The shapes of a loaded model that are still to be run. model: `model.forward.Model`. slots, blocks: those of requests,
    borrowed for a step; blocks of kept states are never touched. window: most tokens of a request."""

    def __init__(self, model: Any, state: State, slots: SlotPool, blocks: BlockPool, max_draft: int, drafts_mtp: bool,
                 prices: PassPrices, window: int = 0) -> None:
        self._model, self._state, self._slots, self._blocks, self._window = model, state, slots, blocks, window
        self._drafts_mtp, self._prices = drafts_mtp, prices
        self._ahead: tuple[int, float] | None = None
        """Steps and milliseconds of the first chain behind a pass, of one sequence."""
        self._is_narrow = drafts_mtp and bool(model.rare_ids[1])
        self.prefill_ms: dict[int, list[float]] = {}
        """Rows of a prefill -> milliseconds of each run."""
        self._shapes = deque(usual_shapes(slots.num_slots, max_draft, drafts_mtp, model.max_rows))
        self.num_run = 0

    @property
    def has_work(self) -> bool:
        return bool(self._shapes)

    @property
    def num_left(self) -> int:
        return len(self._shapes)

    def step(self) -> None:
        """Run the next shape, if slots and blocks for it are free; else it is given up, and so are all where a recording would take the
        place of a likelier one's. Nobody waits for anything."""
        replays = self._model.replays
        if replays.limit and len(replays) + MOST_RECORDED > replays.limit:
            self._shapes.clear()
            return
        kind, lengths = self._shapes.popleft()
        reach = max(lengths) + (STEPS if kind == "draft" else 0)
        width = blocks_of(1 + reach)
        blocks = self._blocks.allocate(width * len(lengths))
        if blocks is None or self._slots.num_free < len(lengths):
            self._blocks.release(np.zeros(0, np.int32) if blocks is None else blocks)
            return
        slots = [slot for slot in (self._slots.allocate() for _ in lengths) if slot is not None]
        try:
            for slot in slots:
                self._state.clear_slot(slot)
            self.num_run += self._run(kind, lengths, slots, blocks.reshape(len(lengths), width))
            for slot in slots:
                self._state.clear_slot(slot)
        except OutOfMemory:
            self._shapes.clear()
        finally:
            for slot in slots:
                self._slots.release(slot)
            self._blocks.release(blocks)

    def _run(self, kind: str, lengths: tuple[int, ...], slots: list[int], tables: np.ndarray) -> bool:
        """Whether there was anything to run."""
        is_alone = len(lengths) == 1
        if kind == "deep":
            return self._run_deep(lengths, slots, tables)
        if kind == "draft":
            draws = sampling_rows([LogitRow(SamplingParams(), 2)] * len(lengths), self._model.config.vocab_size)
            limits = np.full(len(lengths), STEPS, np.int32)
            batch = _batch("draft", lengths, slots, tables)
            ms = _timed(lambda: self._model.draft_chain(batch, self._state, True, STEPS, draws, limits, self._is_narrow)) / STEPS
            if is_alone:
                self._prices.record_step(ms)
            return True
        phase: Phase = "prefill" if kind == "prefill" else "verify" if max(lengths) > 1 else "decode"
        batch = _batch(phase, lengths, slots, tables)
        if phase == "prefill":
            started = time.monotonic()
            self._forward(batch)
            self.prefill_ms.setdefault(batch.num_rows, []).append((time.monotonic() - started) * 1e3)
        else:
            ms = _timed(lambda: self._forward(batch))
            if is_alone:
                self._prices.record_pass(batch.num_rows, ms)
            goes_on = self._model.backend.is_ahead and kind == "rows"
            if goes_on and self._drafts_mtp and phase == "verify":
                self._run_ahead(batch)
            elif goes_on and phase == "decode":
                self._run_behind(batch)
        return True

    def _run_behind(self, batch: Batch) -> None:
        """A pass started behind another one, whose draws are its tokens."""
        backend, count = self._model.backend, batch.num_rows
        draws = sampling_rows([LogitRow(SamplingParams(), 2)] * count, self._model.config.vocab_size)
        behind = replace(batch, tokens=np.array([in_flight(row) for row in range(count)], np.int32))
        backend.sample(self._model.forward(batch, self._state, self._drafts_mtp), draws)
        backend.hold()
        backend.sample(self._model.forward(behind, self._state, self._drafts_mtp), draws)
        for _ in (batch, behind):
            backend.result()

    def _run_deep(self, lengths: tuple[int, ...], slots: list[int], tables: np.ndarray) -> bool:
        """A pass at the window's end, if it launches otherwise there: plainly, then recorded. All blocks of a sequence are one, for
        what it attends is of no account, nor is its price one of most passes."""
        whole = np.repeat(tables[:, :1], blocks_of(self._window), axis=1)
        start, backend = self._window - max(lengths), self._model.backend
        if start <= 1:
            return False
        batch = _batch("verify", lengths, slots, whole, start)
        backend.begin(batch, self._state)
        if backend.depth_group(batch) == backend.depth_group(_batch("verify", lengths, slots, whole)):
            return False
        for _ in range(2):
            self._forward(batch)
        return True

    def _run_ahead(self, batch: Batch) -> None:
        """Chains behind a pass, as many steps as its drafts. What a step more takes is the price of one."""
        model, steps = self._model, batch.num_rows // batch.num_seqs - 1
        for params in SAMPLERS:
            rows = sampling_rows([LogitRow(params, 0)] * batch.num_seqs, model.config.vocab_size)
            for _ in range(TIMES):
                self._forward(batch)
                started = time.monotonic()
                model.draft_ahead(self._state, steps, rows, self._is_narrow)
                model.backend.drafted()
                ms = (time.monotonic() - started) * 1e3
                model.backend.result()
            if batch.num_seqs == 1 and params is SAMPLERS[0]:
                self._ahead = self._ahead or (steps, ms)
                more = steps - self._ahead[0]
                if abs(more) >= FEW_STEPS:
                    self._prices.record_step(max(0.0, (ms - self._ahead[1]) / more))

    def _forward(self, batch: Batch) -> None:
        """A pass and its draws."""
        backend, config = self._model.backend, self._model.config
        logits = self._model.forward(batch, self._state, self._drafts_mtp)
        for params in SAMPLERS[:1 + (batch.phase == "prefill")]:
            backend.sample(logits, sampling_rows([LogitRow(params, 2)] * len(batch.logit_rows), config.vocab_size))
            if batch.deferred:
                backend.accept()
                backend.commit()
            backend.result()


def _timed(run: Callable[[], Any]) -> float:
    """Milliseconds of the last of TIMES runs, each of which waits for its end."""
    for _ in range(TIMES):
        started = time.monotonic()
        run()
    return (time.monotonic() - started) * 1e3


def _batch(phase: Phase, lengths: Seq[int], slots: list[int], tables: np.ndarray, start: int = 1) -> Batch:
    """Sequences in these slots, tables int32 [sequences, blocks] their blocks; rows from position `start`, for nobody decodes at 0, a
    prefill from 0."""
    rows, start = sum(lengths), start if phase != "prefill" else 0
    return Batch(
        phase=phase,
        tokens=np.zeros(rows, np.int32),
        positions=np.concatenate([np.arange(start, start + length) for length in lengths]).astype(np.int32),
        row_starts=np.cumsum([0, *lengths]).astype(np.int32),
        slots=np.array(slots, np.int32),
        block_tables=tables.astype(np.int32),
        logit_rows=np.array([rows - 1], np.int32) if phase == "prefill" else np.arange(rows, dtype=np.int32),
        deferred=phase == "verify",
    )
