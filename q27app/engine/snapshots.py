"""Snapshots: the state of a sequence after a multiple of 64 positions, found again by comparing tokens.

A snapshot holds its KV blocks by reference, one owner among others, and a copy of the recurrent slot: in one of the
store's own device slots while there are any, else in host memory. When either is full the least recently used one moves
down or goes. Device slots are freed ahead of need, beside the passes. A state for which the system gives no host memory is not
kept, and nothing else changes by that. Owned by the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from q27app.engine.block_pool import BlockPool
from q27app.engine.host_cache import begins_with
from q27app.kernels.backend import SlotExport, State
from q27app.kernels.batch import BLOCK_POSITIONS

log = logging.getLogger("q27app.engine")

MAX_SNAPSHOTS = 4096
SPARE_SLOTS = 2
"""Device slots that are kept free for the next states, where there are four times as many."""


@dataclass(eq=False)
class Snapshot:
    """tokens: int32 [n], n a multiple of 64; blocks: int32 [n / 64]. slot: device slot or -1; data: uint8 [slot_bytes] then.

    kind: "system", "ring", "prompt", "settled", "host" or "disk", the reason why it was taken. used: grows with each use."""

    tokens: np.ndarray
    blocks: np.ndarray
    kind: str
    slot: int = -1
    data: np.ndarray | None = None
    export: SlotExport | None = None
    """Set from the moment it is on its way to the host until its data is asked for."""
    used: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def common_length(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two int32 vectors begin with alike."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


class LeavesDevice(Protocol):
    """Told each state whose blocks are about to go while no other state goes on from it."""

    def leave(self, snapshot: Snapshot) -> None: ...


class SnapshotStore:
    """device_slots: slots of the state that nobody else uses. host_bytes: most bytes of recurrent state in host memory."""

    def __init__(self, state: State, blocks: BlockPool, device_slots: Seq[int], host_bytes: int) -> None:
        self._state, self._blocks = state, blocks
        self._free_slots = list(device_slots)
        self._host_limit = max(0, host_bytes // max(1, state.slot_bytes))
        self._num_spare = min(SPARE_SLOTS, len(self._free_slots) // 4) if self._host_limit else 0
        self._leaving: list[Snapshot] = []
        if self._num_spare:
            state.reserve_exports()
        self.leaving: LeavesDevice | None = None
        self._clock = 0
        self._by_length: dict[int, list[Snapshot]] = {}
        self.count = 0
        self.num_evicted = self.num_lost = 0

    def __iter__(self) -> Iterator[Snapshot]:
        return (snapshot for group in self._by_length.values() for snapshot in group)

    @property
    def num_host(self) -> int:
        """Snapshots whose recurrent state lies in host memory."""
        return sum(snapshot.slot < 0 for snapshot in self)

    def deepest(self, tokens: np.ndarray, below: int) -> Snapshot | None:
        """The longest snapshot of fewer than `below` tokens that `tokens` begins with, every token compared. One that was lost on its
        way to the host is dropped."""
        for length in sorted((length for length in self._by_length if length < below and length <= len(tokens)), reverse=True):
            for snapshot in list(self._by_length[length]):
                if (np.array_equal(snapshot.tokens[-BLOCK_POSITIONS:], tokens[length - BLOCK_POSITIONS:length])
                        and np.array_equal(snapshot.tokens, tokens[:length])):
                    if self.is_there(snapshot):
                        return snapshot
                    self.drop(snapshot)
        return None

    def at(self, tokens: np.ndarray) -> Snapshot | None:
        """The snapshot of exactly these tokens."""
        group = self._by_length.get(len(tokens), ())
        return next((snapshot for snapshot in group if np.array_equal(snapshot.tokens, tokens)), None)

    def touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.used = self._clock

    def take(self, tokens: np.ndarray, blocks: np.ndarray, slot: int, kind: str) -> Snapshot | None:
        """Keep the state that `slot` holds after `tokens`; None if there is room for none."""
        self._collect()
        if not self._free_slots and not self._demote() and not self._host_room():
            return None
        kept = Snapshot(tokens, blocks.copy(), kind)
        if self._free_slots:
            kept.slot = self._free_slots.pop()
            self._state.copy_slot(slot, kept.slot)
        else:
            try:
                kept.data = self._state.export_slot(slot)
            except MemoryError:
                self.lose(kept.num_tokens, "in host memory")
                return None
        self._blocks.share(kept.blocks)
        self._spare()
        return self._keep(kept)

    def lend(self) -> int | None:
        """A device slot for a state that is about to be computed: `take_lent` or `give_back` follows. None if there is none."""
        self._collect()
        if not self._free_slots:
            self._demote()
        return self._free_slots.pop() if self._free_slots else None

    def lend_free(self) -> int | None:
        """A device slot that nobody needs soon, else None: no state leaves the device for it."""
        self._collect()
        return self._free_slots.pop() if len(self._free_slots) > self._num_spare else None

    def give_back(self, slot: int) -> None:
        self._free_slots.append(slot)

    def take_lent(self, tokens: np.ndarray, blocks: np.ndarray, slot: int, kind: str) -> Snapshot:
        """Keep the state that a pass has put into a lent slot."""
        self._blocks.share(blocks)
        self._spare()
        return self._keep(Snapshot(tokens, blocks.copy(), kind, slot))

    def adopt(self, tokens: np.ndarray, blocks: np.ndarray, kind: str, data: np.ndarray | None, slot: int | None = None) -> Snapshot | None:
        """Keep a state that was read from elsewhere, its recurrent part as host bytes or in a lent slot. blocks: in use already; the
        snapshot becomes their owner, or they are given back and None is returned."""
        if slot is None and not self._host_room():
            self._blocks.release(blocks)
            return None
        return self._keep(Snapshot(tokens, blocks, kind, -1 if slot is None else slot, data))

    def _keep(self, snapshot: Snapshot) -> Snapshot:
        self._by_length.setdefault(snapshot.num_tokens, []).append(snapshot)
        self.count += 1
        self.touch(snapshot)
        return snapshot

    def _spare(self) -> None:
        """Send the least recently used states to the host until enough slots are free or on the way to be."""
        while len(self._free_slots) + len(self._leaving) < self._num_spare:
            candidates = [snapshot for snapshot in self if snapshot.slot >= 0 and snapshot.export is None]
            oldest = min(candidates, key=lambda snapshot: snapshot.used, default=None)
            export = None if oldest is None or not self._host_room() else self._state.begin_export(oldest.slot)
            if oldest is None or export is None:
                return
            oldest.export = export
            self._leaving.append(oldest)

    def _collect(self, waits: bool = False) -> None:
        """Slots that their states have left are free. waits: for the first one."""
        for snapshot in list(self._leaving):
            assert snapshot.export is not None
            if waits and snapshot is self._leaving[0]:
                snapshot.export.leave()
            if snapshot.export.has_left():
                self._leaving.remove(snapshot)
                self._free_slots.append(snapshot.slot)
                snapshot.slot = -1

    def is_there(self, snapshot: Snapshot) -> bool:
        """Whether its recurrent state can be had; one that has left the device is waited for. False: it was lost on its way."""
        export = snapshot.export
        if snapshot.slot < 0 and export is not None:
            snapshot.export = None
            try:
                snapshot.data = export.data()
            except MemoryError:
                self.lose(snapshot.num_tokens, "in host memory")
        return snapshot.slot >= 0 or snapshot.data is not None

    def _data(self, snapshot: Snapshot) -> np.ndarray:
        """The recurrent state of one that is not on the device. Raises MemoryError if it was lost."""
        if not self.is_there(snapshot):
            raise MemoryError("the state was lost on its way to host memory")
        assert snapshot.data is not None
        return snapshot.data

    def lose(self, num_tokens: int, where: str) -> None:
        """The system gave no host memory, and so a state is not kept somewhere: count it and tell of it."""
        self.num_lost += 1
        log.warning("host memory has ended: a state of %d tokens is not kept %s. Close other programs, or set cache.host_mb to less",
                    num_tokens, where)

    def _demote(self) -> bool:
        """Move the device's least recently used state to the host; False if the store has no device slots."""
        if self._leaving:
            self._collect(waits=True)
            return True
        candidates = [snapshot for snapshot in self if snapshot.slot >= 0]
        if not candidates or not self._host_limit:
            if candidates:
                self.drop(min(candidates, key=lambda snapshot: snapshot.used))
            return bool(candidates)
        self._host_room()
        oldest = min(candidates, key=lambda snapshot: snapshot.used)
        try:
            oldest.data = self._state.export_slot(oldest.slot)
        except MemoryError:
            self.lose(oldest.num_tokens, "in host memory")
            self.drop(oldest)
            return True
        self._free_slots.append(oldest.slot)
        oldest.slot = -1
        return True

    def _host_room(self) -> bool:
        """Make room for one more state in host memory; False if the budget holds none at all."""
        if not self._host_limit:
            return False
        while self.num_host >= self._host_limit or self.count >= MAX_SNAPSHOTS:
            self.drop(min((snapshot for snapshot in self if snapshot.slot < 0), key=lambda snapshot: snapshot.used))
            self.num_evicted += 1
        return True

    def restore(self, snapshot: Snapshot, slot: int) -> None:
        """Fill `slot` with the recurrent state of a snapshot that is there."""
        if snapshot.slot >= 0:
            self._state.copy_slot(snapshot.slot, slot)
        else:
            self._state.import_slot(slot, self._data(snapshot))

    def export(self, snapshot: Snapshot) -> np.ndarray:
        """uint8 [slot_bytes]: the recurrent state in host memory. Raises MemoryError."""
        return self._state.export_slot(snapshot.slot) if snapshot.slot >= 0 else self._data(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        group = self._by_length[snapshot.num_tokens]
        group.remove(snapshot)
        if not group:
            del self._by_length[snapshot.num_tokens]
        self.count -= 1
        self._blocks.release(snapshot.blocks)
        if snapshot in self._leaving:
            self._leaving.remove(snapshot)
            assert snapshot.export is not None
            snapshot.export.leave()
        if snapshot.slot >= 0:
            self._free_slots.append(snapshot.slot)

    def reclaim(self, num_blocks: int) -> None:
        """Drop the least recently used until so many blocks are free; nothing if that cannot be reached."""
        if self._blocks.num_free >= num_blocks or not self.has_room(num_blocks):
            return
        for snapshot in sorted(self, key=lambda snapshot: snapshot.used):
            if self._blocks.num_free >= num_blocks:
                return
            if self.leaving is not None and self._is_last(snapshot):
                self.leaving.leave(snapshot)
            self.drop(snapshot)
            self.num_evicted += 1

    def has_room(self, num_blocks: int, found: Snapshot | None = None) -> bool:
        """Whether so many blocks are free, or would be if no state were kept. found: whose blocks are to stay."""
        return self._blocks.num_free >= num_blocks or self._reachable(found) >= num_blocks

    def room_for(self, num_tokens: int, found: Snapshot | None) -> np.ndarray | None:
        """int32 [n / 64]: blocks of a state that goes on from a kept one, whose blocks come first and get one more owner; None if there
        are too few."""
        shared = np.zeros(0, np.int32) if found is None else found.blocks
        if found is not None:
            self.touch(found)   # it is the last one to go for what goes on from it
        missing = num_tokens // BLOCK_POSITIONS - len(shared)
        self._blocks.share(shared)
        self.reclaim(missing)
        own = self._blocks.allocate(missing)
        if own is None:
            self._blocks.release(shared)
            return None
        return np.concatenate([shared, own])

    def release(self, blocks: np.ndarray) -> None:
        """Those that `room_for` gave are needed no more."""
        self._blocks.release(blocks)

    @property
    def is_short(self) -> bool:
        """Blocks will soon be needed that states hold."""
        return 2 * self._blocks.num_free < self._blocks.num_blocks

    @property
    def clock(self) -> int:
        """Grows whenever a state is kept or used."""
        return self._clock

    def oldest_last(self, wanted: Callable[[Snapshot], bool]) -> Snapshot | None:
        """The least recently used of those that no other goes on from and that are wanted."""
        order = sorted(self, key=lambda snapshot: snapshot.used)
        return next((snapshot for snapshot in order if wanted(snapshot) and self._is_last(snapshot)), None)

    def _is_last(self, snapshot: Snapshot) -> bool:
        return not any(other.num_tokens > snapshot.num_tokens and begins_with(other.tokens, snapshot.tokens) for other in self)

    def _reachable(self, found: Snapshot | None) -> int:
        """Blocks that would be free without any snapshot, but for those of one."""
        own = np.zeros(self._blocks.num_blocks, np.int32)
        for snapshot in self:
            own[snapshot.blocks] += 1
        if found is not None:
            own[found.blocks] = 0
        return self._blocks.num_free + self._blocks.owned_alone(own)

    def clear(self) -> None:
        for snapshot in list(self):
            self.drop(snapshot)
        self._state.end_exports()
