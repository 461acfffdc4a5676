"""Who runs next: admission, prefill in chunks, decode in rounds, and what a pass's result changes.

    waiting     in order of arrival; the first is admitted when a slot and the blocks for its prompt and its whole answer
                are free, so an admitted sequence never runs out of memory
    prefilling  in order of arrival, as many as a pass holds; who has had a whole chunk goes behind the others. A part ends at a
                multiple of 64, with the prompt, or at a stop where the prefix cache wants the state and has no slot to lend
    running     a round gives each of them one pass; up to 16 rows go through one pass. Between two chunks of prefill lies
                a whole round, so a running stream waits for at most one chunk, which is then short enough (`pace`)

Owned by the engine thread. `finish` is the only way out for a sequence, and makes its one final event.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence as Seq

import numpy as np

from q27app.engine.block_pool import BlockPool, blocks_of
from q27app.engine.cut import Cut
from q27app.engine.drafter import Drafter, shares_of
from q27app.engine.masks import masks_for
from q27app.engine.pace import BACKGROUND_GAP_MS, GAP_MS, PrefillPace
from q27app.engine.prefix_cache import Match, PrefixCache
from q27app.engine.request import FinishReason, TokenEvent, TokenLogprobs, is_open
from q27app.engine.sequence import Sequence, Status
from q27app.engine.slot_pool import SlotPool
from q27app.engine.work import Drawn, Part, Work
from q27app.errors import OutOfMemory, Q27Error, no_host_memory
from q27app.kernels.batch import BLOCK_POSITIONS, MAX_DECODE_ROWS

READ_WAIT_S = 0.02
"""How long a step waits for the disk when there is nothing else to do."""
MAX_STRETCH, MAX_BURST = 2.5, 8192
"""A gap of running streams may be so many times as long, while no more prompt tokens than that are to be read."""


class Scheduler:
    """events: (sequence, event) pairs to deliver, in order; whoever delivers takes them out."""

    def __init__(
        self, slots: SlotPool, blocks: BlockPool, prefill_chunk: int, vocab_size: int,
        drafter: Drafter | None = None, prefix_cache: PrefixCache | None = None,
    ) -> None:
        assert prefill_chunk > 0 and prefill_chunk % BLOCK_POSITIONS == 0, prefill_chunk
        self.slots, self.blocks = slots, blocks
        self.prefill_chunk, self.vocab_size = prefill_chunk, vocab_size
        self.drafter, self.prefix_cache = drafter, prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.events: deque[tuple[Sequence, TokenEvent]] = deque()
        self._round: deque[Sequence] = deque()
        self._is_prefill_next = True
        self.pace = PrefillPace()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def decodes_next(self) -> bool:
        """The next pass is one of those who run, unless somebody comes."""
        return bool(self.running) and not self.waiting and not (self.prefilling and self._is_prefill_next)

    # admission

    def admit(self) -> Iterator[tuple[Sequence, Match | None]]:
        """Give slots and blocks to those who wait, in order; the caller prepares each one's slot as it comes."""
        while self.waiting:
            sequence = self.waiting[0]
            if self._prepares(sequence):
                return
            match = self._match(sequence)
            if not self._take(sequence, match):
                if self.prefilling or self.running:
                    return
                self.finish(sequence, FinishReason.ERROR, self._never_fits(sequence))
                continue
            self.waiting.popleft()
            sequence.status, sequence.admitted_at = Status.PREFILLING, time.monotonic()
            self.prefilling.append(sequence)
            self._emit(sequence, TokenEvent(sequence.request.id, prefilled=sequence.num_cached))
            yield sequence, match

    def _prepares(self, sequence: Sequence) -> bool:
        """Its state is being read from disk. Those behind wait too: order is kept; who runs goes on meanwhile."""
        request = sequence.request
        if self.prefix_cache is None or not request.cache or request.prompt_logits:
            return False
        return self.prefix_cache.prepares(request, 0.0 if self.prefilling or self.running else READ_WAIT_S)

    def _match(self, sequence: Sequence) -> Match | None:
        request = sequence.request
        if self.prefix_cache is None or not request.cache or request.prompt_logits:
            return None
        match = self.prefix_cache.match(request)
        assert match is None or match.num_tokens < sequence.num_prompt and match.num_tokens % BLOCK_POSITIONS == 0
        return match

    def _never_fits(self, sequence: Sequence) -> OutOfMemory:
        needed = blocks_of(sequence.num_prompt + sequence.limit)
        return OutOfMemory(f"the request needs 1 slot and {needed} KV blocks; {self.slots.num_free} slots and "
                           f"{self.blocks.num_free} blocks are free while nothing runs.")

    def _take(self, sequence: Sequence, match: Match | None) -> bool:
        """Slot and blocks for the whole life of the sequence, or nothing."""
        shared = np.zeros(0, np.int32) if match is None else match.blocks
        missing = blocks_of(sequence.num_prompt + sequence.limit) - len(shared)
        self.blocks.share(shared)
        if self.prefix_cache is not None and not (self.slots.num_free and self.blocks.num_free >= missing):
            self.prefix_cache.reclaim(missing, 1)
        own = self.blocks.allocate(missing) if self.slots.num_free else None
        slot = None if own is None else self.slots.allocate()
        if own is None or slot is None:
            self.blocks.release(shared)
            return False
        sequence.slot, sequence.blocks = slot, np.concatenate([shared, own])
        if match is not None:
            sequence.num_cached = sequence.num_computed = match.num_tokens
        if self.prefix_cache is not None:
            sequence.stops = tuple(sorted(self.prefix_cache.stops(sequence.request)))
        return True

    # the next pass

    def next_work(self) -> Work | None:
        """The next pass, None if nobody holds a slot. A running sequence whose guide fails here ends."""
        while self.prefilling or self.running:
            if self.prefilling and (self._is_prefill_next or not self.running):
                self._is_prefill_next = False
                work = self._prefill_work()
            else:
                self._round.extend(() if self._round else self.running)
                work = self._decode_work()
                self._is_prefill_next = not self._round
            if work.parts:
                return work
        return None

    def _prefill_work(self) -> Work:
        """The first one's next chunk, and of others what fits beside it."""
        parts: list[Part] = []
        size = self._chunk_size()
        room = size
        for sequence in list(self.prefilling):
            is_alone, start = sequence.request.prompt_logits, sequence.num_computed
            stop = self._chunk_end(sequence, BLOCK_POSITIONS if is_alone else min(size, room))
            if stop <= start or (parts and is_alone) or len(parts) == MAX_DECODE_ROWS:
                break
            part = self._prefill_part(sequence, stop)
            if not sequence.is_finished:
                parts.append(part)
                room -= size if is_alone else len(part.tokens)
            if part.tokens and len(part.tokens) == size:
                self.prefilling.rotate(-1)
        return Work("prefill", parts)

    def _chunk_size(self) -> int:
        """Rows of the next prefill pass: all that it holds while nobody waits for it; where streams run as many as their gap
        allows, longer ones for a short while where several wait for their first token."""
        if any(sequence.request.is_background for sequence in self.prefilling):
            return self.pace.chunk(self.prefill_chunk, BACKGROUND_GAP_MS)
        if not self.running:
            return self.prefill_chunk
        left = sum(sequence.num_prompt - sequence.num_computed for sequence in self.prefilling)
        factor = min(MAX_STRETCH, 2 * (len(self.prefilling) - 1) / len(self.running)) if left <= MAX_BURST else 1.0
        return self.pace.chunk(self.prefill_chunk, GAP_MS * max(1.0, factor))

    @staticmethod
    def _chunk_end(sequence: Sequence, size: int) -> int:
        start, prompt = sequence.num_computed, sequence.num_prompt
        return prompt if prompt - start <= size else (start + size) // BLOCK_POSITIONS * BLOCK_POSITIONS

    def _prefill_part(self, sequence: Sequence, stop: int) -> Part:
        start, keeps = sequence.num_computed, []
        inner = [position for position in sequence.stops if start < position < stop]
        if inner and self.prefix_cache is not None:
            keeps = self.prefix_cache.lend(sequence, inner)
            stop = stop if len(keeps) == len(inner) else inner[len(keeps)]
        draws = stop == sequence.num_prompt and sequence.limit > 0 and not sequence.num_generated
        part = Part(sequence, start, sequence.tokens[start:stop], draws=draws, keeps=keeps)
        if draws:
            part.masks = self._masks(sequence, [])
        return part

    def _decode_work(self) -> Work:
        """Up to 16 rows of the sequences that the round has not served yet."""
        parts: list[Part] = []
        room = MAX_DECODE_ROWS
        while self._round and room:
            sequence = self._round[0]
            count = min(sequence.num_pending, MAX_DECODE_ROWS)
            if count > room:
                break
            self._round.popleft()
            start = sequence.num_computed
            parts.append(Part(sequence, start, sequence.tokens[start:start + count], draws=count == sequence.num_pending))
            room -= count
        if self.drafter is not None and room:
            self._add_drafts(parts, room)
        for part in parts:
            if part.draws:
                part.masks = self._masks(part.sequence, part.sequence.drafts)
            part.num_drafts = len(part.sequence.drafts)
            part.tokens = part.tokens + part.sequence.drafts
        parts = [part for part in parts if not part.sequence.is_finished]
        return Work("verify" if any(part.num_drafts for part in parts) else "decode", parts)

    def _add_drafts(self, parts: list[Part], room: int) -> None:
        """Rows that are left are shared alike by those who can take drafts."""
        able = [part.sequence for part in parts if part.draws and len(part.tokens) == 1 and part.sequence.room > 1]
        if not able or self.drafter is None:
            return
        shares = shares_of(room, len(able), able[0].num_steps)
        limits = [min(share, sequence.room - 1) for share, sequence in zip(shares, able, strict=True)]
        for sequence, limit, drafts in zip(able, limits, self.drafter.propose(able, limits), strict=True):
            assert len(drafts) <= limit and all(token < self.vocab_size for token in drafts), list(drafts)
            sequence.drafts = self._before_end(sequence, drafts)

    @staticmethod
    def _before_end(sequence: Sequence, drafts: Seq[int]) -> list[int]:
        """Nothing after an end-of-text token can become text, and the token itself needs no row."""
        request = sequence.request
        ends = () if request.params.ignore_eos else request.eos_ids
        return list(itertools.takewhile(lambda token: token not in ends, drafts))

    def _masks(self, sequence: Sequence, drafts: list[int]) -> list[np.ndarray | None] | None:
        """Masks of the rows to be drawn; shortens `drafts` to what they allow. A guide that fails ends its request."""
        try:
            return masks_for(sequence.request.guide, drafts, self.vocab_size)
        except Q27Error as error:
            self.finish(sequence, FinishReason.ERROR, error)
            return None

    def constrain(self, work: Work) -> bool:
        """A pass was started behind another one, with no masks: ask the guides that constrain its draws since they know what that one
        drew. Whether any does."""
        for part in work.parts:
            if not part.is_void and not is_open(part.sequence.request.guide):
                part.masks = self._masks(part.sequence, [])
        return any(part.masks is not None for part in work.parts)

    # results

    def apply(self, work: Work, drawn: Seq[Drawn], cuts: Seq[Cut | None]) -> None:
        """Move every sequence of a pass on. cuts: what becomes text of each part's run; None where nothing was drawn."""
        for part, result, cut, rows in zip(work.parts, drawn, cuts, work.rows_to_commit(cuts), strict=True):
            if part.is_void:
                continue
            if work.phase == "prefill":
                self._apply_prefill(part, result)
            else:
                self._apply_decode(part, rows)
            if cut is not None:
                self._apply_cut(part.sequence, result, cut)
            elif part.sequence.status is Status.RUNNING and part.sequence.limit == 0:
                self.finish(part.sequence, FinishReason.LENGTH)

    def _apply_prefill(self, part: Part, result: Drawn) -> None:
        sequence = part.sequence
        sequence.num_computed += len(part.tokens)
        is_done = sequence.num_computed == sequence.num_prompt
        if result.logits is not None:
            if sequence.prompt_logits is None:
                sequence.prompt_logits = _logits_array(sequence.num_prompt, self.vocab_size)
            sequence.prompt_logits[part.start:sequence.num_computed] = result.logits
        if self.prefix_cache is not None and sequence.request.cache:
            self.prefix_cache.computed(sequence)
        logits, sequence.prompt_logits = (sequence.prompt_logits, None) if is_done else (None, sequence.prompt_logits)
        if not sequence.num_generated:
            self._emit(sequence, TokenEvent(sequence.request.id, prefilled=sequence.num_computed, prompt_logits=logits))
        if is_done:
            sequence.status, sequence.prefilled_at = Status.RUNNING, sequence.prefilled_at or time.monotonic()
            self.prefilling.remove(sequence)
            self.running.append(sequence)

    def _apply_decode(self, part: Part, num_rows: int) -> None:
        sequence = part.sequence
        sequence.num_computed += num_rows
        sequence.num_steps += 1
        sequence.num_drafted += part.num_drafts
        if part.num_drafts:
            sequence.num_accepted += max(0, num_rows - 1)
            if self.drafter is not None:
                self.drafter.observe(sequence, part.num_drafts, max(0, num_rows - 1))
        sequence.drafts = []

    def _apply_cut(self, sequence: Sequence, result: Drawn, cut: Cut) -> None:
        kept = tuple(result.tokens[:cut.keep])
        tokens = kept + cut.force
        sequence.is_diverted = len(kept) < len(result.tokens) or bool(cut.force)
        sequence.append(tokens)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.request.params.logprobs is not None:
            logprobs = tuple(result.logprobs[:cut.keep]) + tuple(TokenLogprobs(token, 0.0) for token in cut.force)
        if tokens:
            forced = (False,) * len(kept) + (True,) * len(cut.force)
            self._emit(sequence, TokenEvent(sequence.request.id, tokens, forced, logprobs))
        if cut.finish is not None:
            self.finish(sequence, cut.finish, cut.error)

    def rewind(self, sequence: Sequence) -> Match | None:
        """The slot of a running sequence holds more than its text: the prompt is read again, from the best kept state on, then what
        was generated is computed again in rows that have the bits they had. The caller prepares the slot."""
        match = self._match(sequence)
        for group in (self.running, self._round):
            if sequence in group:
                group.remove(sequence)
        sequence.status, sequence.num_computed, sequence.stops = Status.PREFILLING, 0 if match is None else match.num_tokens, ()
        sequence.drafts = []
        self.prefilling.append(sequence)
        return match

    def finish(self, sequence: Sequence, reason: FinishReason, error: Q27Error | None = None) -> None:
        """End a sequence in any state but FINISHED: its one final event, its slot and blocks given back."""
        assert not sequence.is_finished, f"request {sequence.request.id} ended twice"
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            if self.prefix_cache is not None:
                self.prefix_cache.ended(sequence, reason)
            for group in (self.prefilling, self.running, self._round):
                if sequence in group:
                    group.remove(sequence)
            self.slots.release(sequence.slot)
            self.blocks.release(sequence.blocks)
            sequence.slot, sequence.blocks = -1, np.zeros(0, np.int32)
        sequence.status, sequence.drafts, sequence.draft_state = Status.FINISHED, [], None
        sequence.suffix_index = None
        sequence.prompt_logits = None
        self._emit(sequence, sequence.final_event(reason, error))

    def _emit(self, sequence: Sequence, event: TokenEvent) -> None:
        self.events.append((sequence, event))

    def sequences(self) -> list[Sequence]:
        """Everybody who has not ended."""
        return [*self.waiting, *self.prefilling, *self.running]

    def check(self) -> None:
        """AssertionError unless slots and blocks are held by exactly those who should hold them."""
        holders = [*self.prefilling, *self.running]
        cache = self.prefix_cache
        self.slots.check([*(sequence.slot for sequence in holders), *(cache.owned_slots() if cache else ())])
        self.blocks.check([*(sequence.blocks for sequence in holders), *(cache.owned_blocks() if cache else ())])
        assert all(sequence.num_pending > 0 and sequence.status is Status.RUNNING for sequence in self.running)
        assert all(sequence in self.running for sequence in self._round)


def _logits_array(num_rows: int, vocab_size: int) -> np.ndarray:
    """float32 [num_rows, vocab_size], to be filled. Raises OutOfMemory."""
    try:
        return np.empty((num_rows, vocab_size), np.float32)
    except MemoryError as error:
        raise no_host_memory(f"the logits of {num_rows} prompt tokens, {4e-9 * num_rows * vocab_size:.2f} GB", error) from error
