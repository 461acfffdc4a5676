"""How states leave the device with their blocks, and come back: what lies between the snapshots there and the host's entries.

    leave        blocks are needed now: what the host has not yet of a state is copied, as far as the system gives memory, then it goes
    step         nobody waits and blocks run short: what will go next is copied ahead, a piece a step, into room made for it
    bring_back   the longest entry that a prompt begins with gets blocks again

Owned by the engine thread, as part of the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from q27app.engine.host_cache import HostCache, HostEntry
from q27app.engine.snapshots import Snapshot, SnapshotStore
from q27app.kernels.backend import State
from q27app.kernels.batch import BLOCK_POSITIONS


@dataclass
class Copy:
    """A state on its way. pieces: by the block that they begin with, without a gap."""

    snapshot: Snapshot
    pieces: dict[int, np.ndarray]

    @property
    def next(self) -> int:
        """The block after those that are there."""
        return max((start + len(piece) for start, piece in self.pieces.items()), default=0)


class Leaving:
    """See the module."""

    def __init__(self, state: State, store: SnapshotStore, host: HostCache) -> None:
        self._state, self._store, self.host = state, store, host
        self._copy: Copy | None = None
        self._clock = -1
        """Of the store, when nothing in it was left to be copied."""
        self._tried: set[Snapshot] = set()
        """Copied since. Where the host has not room for all the first one to go gets it, and what fits beside that."""

    def leave(self, snapshot: Snapshot) -> None:
        copy, self._copy = self._copy, None
        if self._wants(snapshot) and self._store.is_there(snapshot):
            try:
                self._keep(snapshot, copy.pieces if copy is not None and copy.snapshot is snapshot else {})
            except MemoryError:
                self._store.lose(snapshot.num_tokens, "with its keys and values in host memory")

    def _wants(self, snapshot: Snapshot) -> bool:
        num_bytes = self._state.slot_bytes + len(snapshot.blocks) * self._state.block_bytes
        return self.host.holds(num_bytes) and self.host.wants(snapshot.tokens)

    def _keep(self, snapshot: Snapshot, pieces: dict[int, np.ndarray]) -> None:
        def export(start: int, stop: int) -> np.ndarray:
            return pieces[start] if start in pieces else self._state.export_blocks(snapshot.blocks[start:stop].tolist())

        self.host.keep(snapshot.tokens, self._store.export(snapshot), export, self._state.block_bytes, snapshot.kind == "system")

    @property
    def has_work(self) -> bool:
        """There is something to copy ahead of need."""
        if self._copy is None and self._store.is_short and self._clock != self._store.clock:
            snapshot = self._store.oldest_last(lambda one: one not in self._tried and self._wants(one))
            self._copy = None if snapshot is None else self._begin(snapshot)
            if self._copy is None:
                self._clock = self._store.clock
                self._tried.clear()
        return self._copy is not None

    def _begin(self, snapshot: Snapshot) -> Copy | None:
        common = self.host.make_room(snapshot.tokens, self._state.slot_bytes, self._state.block_bytes, evicts=not self._tried)
        return None if common is None else Copy(snapshot, {self.host.piece * index: piece for index, piece in enumerate(common)})

    def step(self) -> None:
        """Copy a piece more. Where there is no memory for it, there may be some when the state goes."""
        copy = self._copy
        if copy is None:
            return
        try:
            self._step(copy)
        except MemoryError:
            self._copy = None
            self._tried.add(copy.snapshot)

    def _step(self, copy: Copy) -> None:
        snapshot, start = copy.snapshot, copy.next
        if self._store.at(snapshot.tokens) is not snapshot:
            self._copy = None
        elif start < len(snapshot.blocks):
            copy.pieces[start] = self._state.export_blocks(snapshot.blocks[start:start + self.host.piece].tolist())
        else:
            self._copy = None
            self._tried.add(snapshot)
            self._keep(snapshot, copy.pieces)

    def bring_back(self, prompt: np.ndarray) -> None:
        """Give blocks to the longest state in host memory that the prompt begins with, if the device has none as long."""
        found = self._store.deepest(prompt, len(prompt))
        num_shared = 0 if found is None else len(found.blocks)
        entry = self.host.deepest(prompt, BLOCK_POSITIONS * (1 + num_shared))
        blocks = None if entry is None else self._store.room_for(entry.num_tokens, found)
        if entry is None or blocks is None:
            return
        try:
            self._import(entry, blocks, num_shared)
        except MemoryError:
            self._store.release(blocks)
            self._store.lose(entry.num_tokens, "on the device")
            return
        if self._store.adopt(entry.tokens, blocks, "host", entry.slot) is not None:
            self.host.num_used += 1

    def _import(self, entry: HostEntry, blocks: np.ndarray, num_shared: int) -> None:
        """Copy the pieces of an entry to its blocks, but for the first num_shared."""
        size = self.host.piece
        for start in range(num_shared // size * size, entry.num_tokens // BLOCK_POSITIONS, size):
            piece, skipped = entry.pieces[start // size], max(0, num_shared - start)
            self._state.import_blocks(blocks[start + skipped:start + len(piece)].tolist(), piece[skipped:])
