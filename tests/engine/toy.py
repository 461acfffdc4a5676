"""A model that is all state: each next token hangs on the slot's recurrent hash, on every block of the past, and on the
position, so that a wrong slot, block, position, rollback or order changes the text. And a desk to run it without threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from q27app.engine.block_pool import BlockPool
from q27app.engine.limits import check_request
from q27app.engine.loading import Loaded
from q27app.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from q27app.engine.sequence import Sequence
from q27app.engine.slot_pool import SlotPool
from q27app.engine.status import Meter
from q27app.engine.stepper import Stepper
from q27app.kernels.batch import BLOCK_POSITIONS, Batch, Sampled, SamplingRows
from q27app.kernels.numpy_pass import check_batch
from q27app.kernels.reference_draft import with_drafts
from q27app.kernels.reference_sample import count_accepted, sample_rows
from tests.engine.toy_export import ToyExport

VOCAB = 61
MASK = (1 << 64) - 1
SPREAD = (np.arange(VOCAB, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def mix(*values: int) -> int:
    """64 well-mixed bits (splitmix64 over the values)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def logits_of(recurrent: int, past: int, position: int) -> np.ndarray:
    """float32 [VOCAB] of the token after `position`; past: sum of the entries at 0 .. position."""
    mixed = SPREAD ^ np.uint64(mix(recurrent, past, position))
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(6 / (1 << 24))


class ToyBuffer:
    def __init__(self, array: np.ndarray, name: str = "toy") -> None:
        self.array, self.name = array, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def rows(self, count: int) -> "ToyBuffer":
        return ToyBuffer(self.array[:count])


class ToyState:
    """Slots hold a hash and how many positions went into it; blocks hold an entry a position. Both begin as rubbish."""

    max_record_rows = 16
    take_memory: Callable[[], None] = staticmethod(lambda: None)   # before a copy takes host memory; may raise MemoryError

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self.hashes = [mix(7, slot) for slot in range(num_slots)]
        self.lengths = [-1] * num_slots
        self.entries = np.random.default_rng(1).integers(0, 1 << 63, (num_blocks, BLOCK_POSITIONS)).astype(np.uint64)

    def clear_slot(self, slot: int) -> None:
        self.hashes[slot], self.lengths[slot] = 0, 0

    def set_slot(self, slot: int, value: tuple[int, int]) -> None:
        self.hashes[slot], self.lengths[slot] = value

    def get_slot(self, slot: int) -> tuple[int, int]:
        return self.hashes[slot], self.lengths[slot]

    slot_bytes, block_bytes = 16, 8 * BLOCK_POSITIONS

    def copy_slot(self, source: int, target: int) -> None:
        self.set_slot(target, self.get_slot(source))

    def export_slot(self, slot: int) -> np.ndarray:
        self.take_memory()
        return np.array([self.hashes[slot], self.lengths[slot]], np.uint64).view(np.uint8)

    def reserve_exports(self) -> None:
        self.exports = []

    def begin_export(self, slot: int) -> "ToyExport | None":
        """At most two on their way."""
        if sum(export.read is None for export in self.exports) >= 2:
            return None
        self.exports.append(ToyExport(self, slot, self.get_slot(slot)))
        return self.exports[-1]

    def end_exports(self) -> None: ...

    def import_slot(self, slot: int, data: np.ndarray) -> None:
        first, second = data.view(np.uint64).tolist()
        self.set_slot(slot, (first, second))

    def export_blocks(self, blocks: Seq[int]) -> np.ndarray:
        self.take_memory()
        return self.entries[list(blocks)].view(np.uint8)

    def import_blocks(self, blocks: Seq[int], data: np.ndarray) -> None:
        self.take_memory()
        self.entries[list(blocks)] = np.ascontiguousarray(data).view(np.uint64)


class ToyBackend:
    name, is_ahead = "toy", True

    def __init__(self) -> None:
        self.deferred: tuple[Batch, ToyState] | None = None
        self.batch: Batch | None = None
        self.sampled: Sampled | None = None
        self.held: Sampled | None = None
        self.is_closed = False

    def download(self, buffer: ToyBuffer) -> np.ndarray:
        return buffer.array.copy()

    def sample(self, logits: ToyBuffer, rows: SamplingRows) -> None:
        assert self.batch is not None and len(logits.array) == len(rows.temperature)
        tokens, margins, logprobs = sample_rows(logits.array, rows)
        self.sampled = Sampled(tokens, margins, np.ones(self.batch.num_seqs, np.int32), logprobs)

    def accept(self) -> None:
        drawn, batch = self.sampled, self.batch
        assert drawn is not None and batch is not None and batch.phase == "verify"
        self.sampled = Sampled(drawn.tokens, drawn.margins, count_accepted(batch, drawn.tokens), drawn.logprobs)

    def result(self) -> Sampled:
        found, self.held = self.held or self.sampled, None
        assert found is not None
        return found

    def hold(self) -> None:
        self.held = self.sampled

    def commit(self, accepted: np.ndarray | None = None) -> None:
        assert self.deferred is not None, "commit without a deferred pass"
        accepted = self.sampled.accepted if accepted is None else accepted
        batch, state = self.deferred
        self.deferred = None
        for seq, count in enumerate(accepted.tolist()):
            start = int(batch.row_starts[seq])
            assert 0 <= count <= int(batch.row_starts[seq + 1]) - start
            for row in range(start, start + count):
                advance(state, int(batch.slots[seq]), int(batch.tokens[row]), int(batch.positions[row]))

    def close(self) -> None:
        self.is_closed = True


def advance(state: ToyState, slot: int, token: int, position: int) -> None:
    assert state.lengths[slot] == position, f"slot {slot} holds {state.lengths[slot]} positions, row is at {position}"
    state.hashes[slot] = mix(state.hashes[slot], token)
    state.lengths[slot] += 1


class ToyModel:
    """before: called with every batch first; may raise. passes: every batch that was run."""

    def __init__(self) -> None:
        self.backend = ToyBackend()
        self.final = ToyBuffer(np.zeros((0, 1), np.float32))
        self.passes: list[Batch] = []
        self.before: Callable[[Batch], None] = lambda batch: None
        self.num_fresh = 0

    def forward(self, batch: Batch, state: ToyState, warm_mtp: bool = True) -> ToyBuffer:
        check_batch(batch, state)
        batch = with_drafts(batch, None, self.backend.sampled)
        self.before(batch)
        self.passes.append(batch)
        self.backend.batch = batch
        self.backend.deferred = (batch, state) if batch.deferred else None
        self.final = ToyBuffer(np.zeros((batch.num_rows, 1), np.float32))
        wanted = set(batch.logit_rows.tolist())
        logits = [row for seq in range(batch.num_seqs) for row in self._sequence(batch, state, seq, wanted)]
        return ToyBuffer(np.array(logits, np.float32).reshape(len(wanted), VOCAB))

    def _sequence(self, batch: Batch, state: ToyState, seq: int, wanted: set[int]) -> list[np.ndarray]:
        slot, table, logits = int(batch.slots[seq]), batch.block_tables[seq], []
        before = state.get_slot(slot)
        for row in range(int(batch.row_starts[seq]), int(batch.row_starts[seq + 1])):
            token, position = int(batch.tokens[row]), int(batch.positions[row])
            assert 0 <= token < VOCAB
            advance(state, slot, token, position)
            for keep in batch.keeps:
                if (keep.seq, int(batch.row_starts[seq]) + keep.rows) == (seq, row + 1):
                    state.set_slot(keep.slot, state.get_slot(slot))
            block, place = divmod(position, BLOCK_POSITIONS)
            state.entries[table[block], place] = mix(token, position)
            if row in wanted:
                past = state.entries[table[:block + 1]].ravel()[:position + 1]
                logits.append(logits_of(state.hashes[slot], int(past.sum(dtype=np.uint64)), position))
        if batch.deferred:
            state.set_slot(slot, before)
        return logits


@dataclass
class ToyPlan:
    num_slots: int
    max_context: int

    def to_dict(self) -> dict[str, Any]:
        return {"num_slots": self.num_slots, "max_context": self.max_context}


def load_toy(
    slots: int = 2, max_context: int = 512, num_blocks: int | None = None, chunk: int = 64, drafter: Any = None,
    make_cache: Callable[[Loaded], Any] | None = None,
) -> Loaded:
    blocks = slots * -(-max_context // BLOCK_POSITIONS) if num_blocks is None else num_blocks
    model = ToyModel()
    loaded = Loaded(model, ToyState(slots, blocks), ToyPlan(slots, max_context), SlotPool(slots), BlockPool(blocks), VOCAB,
                    chunk, drafter, info={"name": "toy"}, close=model.backend.close)
    if make_cache is not None:
        loaded.prefix_cache = make_cache(loaded)
    return loaded


def expected_text(prompt: Seq[int], count: int, params: SamplingParams = SamplingParams()) -> list[int]:
    """The text by the definition alone, without any of the engine: penalties and masks left out."""
    recurrent, past, tokens = 0, 0, list(prompt)
    for position in range(len(prompt) + count - 1):
        token = tokens[position]
        recurrent, past = mix(recurrent, token), (past + mix(token, position)) & MASK
        if position + 1 >= len(prompt):
            rows = one_row(params, position + 1)
            tokens.append(int(sample_rows(logits_of(recurrent, past, position)[None], rows)[0][0]))
    return tokens[len(prompt):]


def one_row(params: SamplingParams, position: int) -> SamplingRows:
    def of(value: float, dtype: Any) -> np.ndarray:
        return np.array([value], dtype)

    return SamplingRows(
        of(params.temperature, np.float32), of(params.top_k, np.int32), of(params.top_p, np.float32),
        of(params.min_p, np.float32), of(0, np.float32), of(0, np.float32), of(params.seed, np.uint64),
        of(position, np.int64), np.zeros(2, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32), of(-1, np.int32))


@dataclass
class Answer:
    """What one request's receiver got. It insists on the order: nothing after the final event."""

    events: list[TokenEvent] = field(default_factory=list)

    def __call__(self, event: TokenEvent) -> None:
        assert self.finish is None, f"an event after the final one: {event}"
        self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def forced(self) -> list[bool]:
        return [flag for event in self.events for flag in event.forced]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]


class Desk:
    """A stepper with its loaded toy, driven by hand; pools are checked after every step."""

    def __init__(self, loaded: Loaded | None = None, **options: Any) -> None:
        self.loaded = loaded or load_toy(**options)
        self.model, self.state = self.loaded.model, self.loaded.state
        self.meter = Meter()
        self.stepper = Stepper(self.loaded, self.meter, lambda sequence: None, checks_pools=True)
        self.sequences: dict[str, Sequence] = {}
        self.answers: dict[str, Answer] = {}

    def submit(self, request: Request, deliver: Any = None) -> Answer:
        answer = self.answers[request.id] = deliver or Answer()
        limit = check_request(request, self.loaded.vocab_size, self.loaded.plan.max_context)
        sequence = self.sequences[request.id] = Sequence(request, answer, limit)
        self.stepper.add(sequence)
        return answer

    def ask(self, prompt: Seq[int], max_tokens: int = 20, name: str = "", guide: Any = None, eos: Seq[int] = (),
            **params: Any) -> Answer:
        name = name or f"r{len(self.sequences)}"
        return self.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), guide,
                                   tuple(eos)))

    def cancel(self, name: str) -> None:
        self.stepper.cancel(self.sequences[name])

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.stepper.has_work:
                self.stepper.step()
                self.assert_empty()
                return
            self.stepper.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def assert_empty(self) -> None:
        """Every slot and block is free again, except what snapshots hold."""
        if self.loaded.prefix_cache is None:
            assert self.loaded.slots.num_free == self.loaded.slots.num_slots
            assert self.loaded.blocks.num_free == self.loaded.blocks.num_blocks
        assert all(answer.finish is not None for answer in self.answers.values())


class ScriptedDrafter:
    """Knows each request's text and proposes it, wrong where `is_right(name, index)` says no. widths: how many at once."""

    needs_mtp = False

    def __init__(self, texts: dict[str, list[int]], is_right: Callable[[str, int], bool] = lambda name, index: True,
                 width: Callable[[str, int], int] = lambda name, index: 16) -> None:
        self.texts, self.is_right, self.width = texts, is_right, width

    def propose(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[list[int]]:
        return [self._one(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def rests(self, sequences: Seq[Sequence]) -> bool:
        return len(sequences) == 16

    def prompts_end(self, sequences: Seq[Sequence]) -> None: ...
    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None: ...
    def passed(self, rows: int, ms: float) -> None: ...

    def to_dict(self) -> dict:
        return {}

    def _one(self, sequence: Sequence, limit: int) -> list[int]:
        name, start = sequence.request.id, sequence.num_generated
        text = self.texts.get(name, [])
        count = min(limit, self.width(name, start))
        return [token if self.is_right(name, start + index) else (token + 1) % VOCAB
                for index, token in enumerate(text[start:start + count])]


@dataclass
class Say:
    """A decision."""

    keep: int
    force: tuple[int, ...] = ()
    finish: str | None = None


class TableGuide:
    """Decides at tokens, wherever a run ends. at: index of a drawn token -> (keeps it, forced ids, finish).

    Indices count what the guide was shown and kept or dropped. mask_at: index of a token to be drawn -> allowed ids."""

    def __init__(self, at: dict[int, tuple[bool, tuple[int, ...], str | None]] | None = None,
                 mask_at: Callable[[int], set[int] | None] | None = None) -> None:
        self.at, self.mask_at, self.seen = at or {}, mask_at or (lambda index: None), 0
        self.is_open = mask_at is None

    @property
    def may_divert(self) -> bool:
        keeps, force, finish = self.at.get(self.seen, (True, (), None))
        return finish is None and (not keeps or bool(force))

    def advance(self, tokens: Seq[int]) -> Say:
        for place in range(len(tokens)):
            index, self.seen = self.seen, self.seen + 1
            if index in self.at:
                keeps, force, finish = self.at[index]
                return Say(place + keeps, force, finish)
        return Say(len(tokens))

    def mask(self, prefix: Seq[int]) -> np.ndarray | None:
        allowed = self.mask_at(self.seen + len(prefix))
        if allowed is None:
            return None
        mask = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in allowed:
            mask[token // 32] |= np.uint32(1 << (token % 32))
        return mask
