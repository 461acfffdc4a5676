"""The prefix cache: which states are kept, which one a request resumes from, and why no better one was there.

Only states that prefill computed are kept, at multiples of 64, so that a warm answer has the bits of a cold one:

    system    the last multiple in the system block            shared by conversations
    turn      the last one before the newest message           the newest message is edited, or gets another reminder
    stable    the last one that the next turn sends again      the next turn
    prompt    the last one in the prompt                       a tool loop, the same request again
    ring      every RING_STEP                                  an edit in the middle of a long conversation
    partial   where a prefill was cut off by a cancel, if that is a multiple

Blocks are shared by reference, recurrent state is copied (see `snapshots`). Where blocks run short on the device, the end of a
conversation goes to host memory as a whole (`host_cache`), and comes back with its next turn. Owned by the engine thread; `to_dict` may be
called from any.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.engine.arrival import Arrivals
from q27app.engine.block_pool import BlockPool
from q27app.engine.disk_cache import DiskCache
from q27app.engine.host_cache import HostCache
from q27app.engine.leaving import Leaving
from q27app.engine.prefix_cache import Match
from q27app.engine.request import FinishReason, Request, Reuse
from q27app.engine.sequence import Sequence, Status
from q27app.engine.snapshots import Snapshot, SnapshotStore, common_length
from q27app.kernels.backend import State
from q27app.kernels.batch import BLOCK_POSITIONS

log = logging.getLogger("q27app.engine")

RING_STEP = 4096
MAX_RECENT = 32
MAX_LAST_WRITES = 2
EXPORTED_BLOCKS = 32
"""Blocks that a spare step copies to the host, so that a request that comes waits for no more."""
WRITER_WAIT_S = 0.01
WANTED_BY_DISK = ("system", "settled")


@dataclass
class Export:
    """A state on its way to the disk: blocks uint8 [n / 64, block_bytes], the first `done` of them copied."""

    snapshot: Snapshot
    kind: str
    blocks: np.ndarray
    done: int = 0


class SnapshotCache:
    """See the module, and `prefix_cache.PrefixCache`. device_slots: slots of the state that belong to snapshots alone.

    host_bytes: recurrent state in host memory, most. disk: where entries survive the process, or None. host: where states go
    whose blocks are needed, or None."""

    def __init__(
        self, state: State, blocks: BlockPool, device_slots: Seq[int] = (), host_bytes: int = 1 << 30,
        disk: DiskCache | None = None, ring_step: int = RING_STEP, host: HostCache | None = None,
    ) -> None:
        self._state, self._blocks, self._disk, self._ring_step = state, blocks, disk, ring_step
        self.store = SnapshotStore(state, blocks, device_slots, host_bytes)
        if host is not None:
            self.store.leaving = Leaving(state, self.store, host)
        self._recent: deque[tuple[np.ndarray, int]] = deque(maxlen=MAX_RECENT)
        self._asked: tuple[Request, Reuse] | None = None
        self._prepared: Request | None = None
        self._arrivals = None if disk is None else Arrivals(state, self.store, blocks, disk)
        self._export: Export | None = None
        self._reuse: dict[str, Reuse] = {}
        self._lent: dict[Sequence, list[tuple[int, int]]] = {}
        self._to_disk: deque[Snapshot] = deque(maxlen=8)
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._num_reused = self._num_settled = 0

    # what admission asks

    def match(self, request: Request) -> Match | None:
        prompt = _ids_of(request)
        if prompt is None:
            return None
        found = self.store.deepest(prompt, len(prompt))
        self._asked = (request, self._explained(request, prompt, found))
        if found is None:
            return None
        self.store.touch(found)
        return Match(found.num_tokens, found.blocks, lambda slot: self.store.restore(found, slot))

    def prepares(self, request: Request, wait_s: float) -> bool:
        """A longer state than those on the device is looked for once a request: in host memory, then the longest whole one on
        disk."""
        if self._prepared is request:
            return False
        prompt, arrivals = _ids_of(request), self._arrivals
        if prompt is None:
            return False
        if arrivals is not None:
            arrivals.turn_to(request, prompt)
        if self.store.leaving is not None and not (arrivals is not None and arrivals.is_for(request)):
            self.store.leaving.bring_back(prompt)
        if arrivals is not None and arrivals.prepares(request, prompt, wait_s):
            return True
        self._prepared = request
        return False

    def stops(self, request: Request) -> Seq[int]:
        if not request.cache:
            return ()
        if self._asked is not None and self._asked[0] is request:
            self._count(request, self._asked[1])
        prompt = _ids_of(request)
        self._asked = self._prepared = None
        if prompt is None:
            self._misses["memory"] += 1
            log.warning("host memory has ended: what is kept of the prompt of request %s is not looked for", request.id)
            return ()
        return [mark for mark in self._marks(request) if self.store.at(prompt[:mark]) is None]

    def _count(self, request: Request, reuse: Reuse) -> None:
        if request.is_background:
            return
        self._reuse[request.id] = reuse
        if reuse.num_tokens:
            self._hits[reuse.kind] += 1
        if reuse.reason:
            self._misses[reuse.reason] += 1
        self._num_reused += reuse.num_tokens

    def _marks(self, request: Request) -> dict[int, str]:
        """Multiples of 64 within the prompt where a state is worth keeping -> its kind."""
        size = len(request.prompt)
        marks = {position: "ring" for position in range(self._ring_step, size + 1, self._ring_step)}
        kinds = (("prompt", size), ("turn", request.turn_len), ("stable", request.stable_len), ("system", request.system_len))
        for kind, length in kinds:
            marks[min(length, size) // BLOCK_POSITIONS * BLOCK_POSITIONS] = kind
        if request.is_background:
            marks[size // BLOCK_POSITIONS * BLOCK_POSITIONS] = "settled"
        marks.pop(0, None)
        return marks

    # what it is told

    def lend(self, sequence: Sequence, positions: Seq[int]) -> list[tuple[int, int]]:
        lent: list[tuple[int, int]] = []
        for position in positions:
            slot = self.store.lend()
            if slot is None:
                break
            lent.append((position, slot))
        self._lent[sequence] = lent
        return lent

    def computed(self, sequence: Sequence) -> None:
        request, length = sequence.request, sequence.num_computed
        for position, slot in self._lent.pop(sequence, ()):
            self._keep(sequence, self._marks(request).get(position, "ring"), position, slot)
        sequence.reuse = self._reuse.pop(request.id, sequence.reuse)
        self._num_settled += request.is_background
        if length in sequence.stops:
            self._keep(sequence, self._marks(request).get(length, "ring"), length)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A prefill that was cancelled between two passes leaves what it computed."""
        request = sequence.request
        sequence.reuse = self._reuse.pop(request.id, sequence.reuse)
        for _, slot in self._lent.pop(sequence, ()):
            self.store.give_back(slot)
        if not request.cache:
            return
        if sequence.status is Status.PREFILLING and reason is FinishReason.CANCELLED:
            self._keep(sequence, "partial", sequence.num_computed)
        if not request.is_background and sequence.num_computed >= sequence.num_prompt:
            text = _text_of(sequence, len(sequence.tokens))
            if text is not None:   # it only serves to tell reasons
                self._recent.append((text, request.system_len))

    def _keep(self, sequence: Sequence, kind: str, length: int, lent: int | None = None) -> None:
        """The state after `length` tokens, which is the sequence's own or lies in a lent slot."""
        is_usable = not length % BLOCK_POSITIONS and 0 < length <= sequence.num_prompt and length > sequence.num_cached
        tokens = _text_of(sequence, length) if is_usable else None
        if is_usable and tokens is None:
            self.store.lose(length, "on the device")
        if tokens is None or self.store.at(tokens) is not None:
            if lent is not None:
                self.store.give_back(lent)
            return
        blocks = sequence.blocks[:length // BLOCK_POSITIONS]
        kept = self.store.take(tokens, blocks, sequence.slot, kind) if lent is None else self.store.take_lent(tokens, blocks, lent, kind)
        if kept is not None and self._disk is not None and kind in WANTED_BY_DISK:
            self._to_disk.append(kept)

    def reclaim(self, num_blocks: int, num_slots: int) -> None:
        """Snapshots hold none of the slots that requests take, so without a free one nothing is given up."""
        del num_slots
        if self._arrivals is not None and self._blocks.num_free < num_blocks:
            self._arrivals.stop()   # whoever is admitted now does not wait for it
        self.store.reclaim(num_blocks)

    def owned_blocks(self) -> Iterable[np.ndarray]:
        return [*(snapshot.blocks for snapshot in self.store), *(() if self._arrivals is None else self._arrivals.owned_blocks())]

    def owned_slots(self) -> Iterable[int]:
        return ()

    def settles(self, tokens: np.ndarray) -> bool:
        """Whether a state of exactly these tokens is kept; if so it counts as the end of a turn from now on."""
        kept = self.store.at(tokens)
        if kept is not None and self._disk is not None and kept not in self._to_disk:
            self._to_disk.append(kept)
        return kept is not None

    # why

    def _explained(self, request: Request, prompt: np.ndarray, found: Snapshot | None) -> Reuse:
        """What was reused, of how much that an earlier request held, and where the prompt left it."""
        shared, best = 0, None
        for tokens, system_len in self._recent:
            length = common_length(tokens, prompt)
            if length > shared:
                shared, best = length, (tokens, system_len)
        num, kind = (0, "") if found is None else (found.num_tokens, found.kind)
        if best is None or shared < BLOCK_POSITIONS:
            return Reuse(num, kind, num, reason="" if num else "new")
        tokens, system_len = best
        is_same = shared > system_len if system_len else 2 * shared >= len(tokens)
        possible = max(num, min(len(tokens), len(prompt)) if is_same else shared)
        reason = "" if 2 * num >= possible else "diverged" if 2 * shared < possible else "not_kept"
        expected = int(tokens[shared]) if shared < len(tokens) else -1
        given = int(prompt[shared]) if shared < len(prompt) else -1
        return Reuse(num, kind, possible, reason, shared, expected, given)

    # disk

    @property
    def has_spare_work(self) -> bool:
        return (self._has_disk_work or self._arrivals is not None and self._arrivals.has_spare_work
                or self.store.leaving is not None and self.store.leaving.has_work)

    @property
    def _has_disk_work(self) -> bool:
        return self._disk is not None and (self._export is not None or bool(self._to_disk) and self._disk.is_free)

    def spare_step(self) -> None:
        """Copy a piece of a state from disk, to host memory, or for the disk's writer, and hand it over when it is whole. Called when
        nobody waits."""
        if self._arrivals is not None and self._arrivals.has_spare_work:
            self._arrivals.spare_step()
        elif self.store.leaving is not None and self.store.leaving.has_work:
            self.store.leaving.step()
        else:
            self._disk_step()

    def arrive(self, seconds: float) -> None:
        """Let the states come that are read from disk before anybody asks, at most so long."""
        until = time.monotonic() + seconds
        while self._arrivals is not None and self._arrivals.has_spare_work and time.monotonic() < until:
            self._arrivals.spare_step()

    def _disk_step(self) -> None:
        if self._disk is None or not self._has_disk_work:
            return
        export, self._export = self._export, None
        snapshot = self._to_disk.popleft() if export is None else export.snapshot
        try:
            self._export = self._begin_export(snapshot) if export is None else self._continued(export, self._disk)
        except MemoryError:
            self.store.lose(snapshot.num_tokens, "on disk")

    def _continued(self, export: Export, disk: DiskCache) -> Export | None:
        """With some blocks more; None when it is over. Raises MemoryError."""
        snapshot = export.snapshot
        if self.store.at(snapshot.tokens) is not snapshot:
            return None
        stop = min(export.done + EXPORTED_BLOCKS, len(snapshot.blocks))
        export.blocks[export.done:stop] = self._state.export_blocks(snapshot.blocks[export.done:stop].tolist())
        export.done = stop
        if stop < len(snapshot.blocks):
            return export
        if self.store.is_there(snapshot):
            disk.write(snapshot.tokens, export.kind, self.store.export(snapshot), export.blocks)
        return None

    def _begin_export(self, snapshot: Snapshot) -> Export | None:
        kind = "system" if snapshot.kind == "system" else "turn"
        if self._disk is None or self.store.at(snapshot.tokens) is not snapshot or not self._disk.wants(snapshot.tokens, kind):
            return None
        return Export(snapshot, kind, np.empty((len(snapshot.blocks), self._state.block_bytes), np.uint8))

    def give_up(self) -> None:
        self._to_disk.clear()
        self._export = None

    def close(self) -> None:
        """Write the latest of what waits for the disk, forget the rest."""
        while len(self._to_disk) > MAX_LAST_WRITES:
            self._to_disk.popleft()
        if self._arrivals is not None:
            self._arrivals.stop()
        if self._disk is not None:
            while (self._to_disk or self._export) and not self._disk.is_off:
                self._disk_step() if self._has_disk_work else time.sleep(WRITER_WAIT_S)
            self._disk.close()
        if self.store.leaving is not None:
            self.store.leaving.host.clear()
        self.store.clear()

    def to_dict(self) -> dict[str, Any]:
        """For /status."""
        values: dict[str, Any] = {
            "snapshots": self.store.count, "evicted": self.store.num_evicted, "lost": self.store.num_lost, "hits": dict(self._hits),
            "misses": dict(self._misses), "reused_tokens": self._num_reused, "settled_chunks": self._num_settled,
        }
        tiers = {"disk": self._disk, "host": None if self.store.leaving is None else self.store.leaving.host}
        return values | {name: tier.to_dict() for name, tier in tiers.items() if tier is not None}


def _ids_of(request: Request) -> np.ndarray | None:
    """Its prompt, int32 [n]. None: there is no memory for it, and all of it is computed."""
    try:
        return request.prompt_ids
    except MemoryError:
        return None


def _text_of(sequence: Sequence, length: int) -> np.ndarray | None:
    """The first `length` tokens, int32; None if there is no memory for them."""
    try:
        prompt = sequence.request.prompt_ids[:length]
        return np.concatenate([prompt, np.array(sequence.tokens[len(prompt):length], np.int32)])
    except MemoryError:
        return None
