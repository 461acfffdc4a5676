"""How states come from disk: blocks and a slot are filled while the rest of the entry is still read and checked. They become a snapshot
when all of it is right; else they are given back, and nobody has seen them. Blocks that are free are taken at once; kept states go for
an entry only when all of it is known to be right.

    prepares    a request comes that an entry is of use for: its admission waits, who runs goes on
    spare_step  nobody waits, and the entries that were read when the cache was opened get free blocks

Owned by the engine thread, as part of the prefix cache.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from q27app.engine.block_pool import BlockPool
from q27app.engine.disk_cache import DiskCache
from q27app.engine.disk_entry import DiskEntry
from q27app.engine.disk_reading import Reading
from q27app.engine.request import Request
from q27app.engine.snapshots import Snapshot, SnapshotStore
from q27app.kernels.backend import State
from q27app.kernels.batch import BLOCK_POSITIONS

log = logging.getLogger("q27app.engine")

IMPORTED_BLOCKS = 64
"""Blocks that are copied to the device at once, so that who runs waits for no more."""
SPARE_WAIT_S = 0.005
"""How long a spare step waits for the disk: a request that comes meanwhile waits as long."""


class Arrival:
    """One state on its way. blocks: those that a kept state has already, then those to be filled; all of them are in use."""

    def __init__(self, state: State, store: SnapshotStore, reading: Reading) -> None:
        self._state, self._store, self.reading = state, store, reading
        self._slot: int | None = None
        self.blocks, self._done = np.zeros(0, np.int32), 0
        self.has_room = self._has_slot = self._is_refused = False
        self._began = time.perf_counter()

    @property
    def found(self) -> Snapshot | None:
        """The longest kept state that it goes on from."""
        tokens = self.reading.entry.tokens
        return self._store.deepest(tokens, len(tokens))

    @property
    def num_missing(self) -> int:
        """Blocks to be filled."""
        found = self.found
        return self.reading.entry.num_tokens // BLOCK_POSITIONS - (0 if found is None else len(found.blocks))

    def take_room(self) -> None:
        """Blocks, for which kept states may go, and a slot if one is free."""
        found = self.found
        blocks = self._store.room_for(self.reading.entry.num_tokens, found)
        if blocks is None:
            self._is_refused = True
            return
        self.blocks, self._done, self.has_room = blocks, 0 if found is None else len(found.blocks), True
        self._slot = self._store.lend_free()

    def step(self, wait_s: float) -> bool:
        """Copy some of what has come; where nothing has, wait for it. Whether more is to come."""
        reading = self.reading
        if not self._copy() and not reading.is_over:
            reading.wait(reading.num_bytes, wait_s)
            self._copy()
        is_whole = self._has_slot and self._done == len(self.blocks)
        return not reading.is_damaged and not (reading.is_over and (is_whole or self._is_refused))

    def _copy(self) -> bool:
        reading = self.reading
        if not self.has_room:
            if reading.is_over and not reading.is_damaged:
                self.take_room()
            return self.has_room
        if not self._has_slot:
            self._has_slot = reading.num_bytes >= reading.entry.slot_bytes
            if self._has_slot and self._slot is not None:
                self._state.import_slot(self._slot, reading.slot())
            return self._has_slot
        stop = min(reading.num_blocks, self._done + IMPORTED_BLOCKS)
        if stop <= self._done:
            return False
        self._state.import_blocks(self.blocks[self._done:stop].tolist(), reading.blocks(self._done, stop))
        self._done = stop
        return True

    def become_snapshot(self) -> bool:
        """All of it is right and copied. Whether there was room for it."""
        tokens, slot = self.reading.entry.tokens, self._slot
        try:
            data = self.reading.slot().copy() if slot is None else None   # a part would hold the whole
        except MemoryError:
            self._store.lose(len(tokens), "in host memory")
            self.give_back()
            return False
        log.info("a state of %d tokens came from disk: read and checked in %.0f ms, here after %.0f", len(tokens),
                 1e3 * self.reading.seconds, 1e3 * (time.perf_counter() - self._began))
        return self._store.adopt(tokens, self.blocks, "disk", data, slot) is not None

    def give_back(self) -> None:
        """Nobody will see it: slot and blocks are for others again."""
        if self._slot is not None:
            self._store.give_back(self._slot)
        self._store.release(self.blocks)


class Arrivals:
    """See the module. blocks: the pool that the store's blocks are of."""

    def __init__(self, state: State, store: SnapshotStore, blocks: BlockPool, disk: DiskCache) -> None:
        self._state, self._store, self._blocks, self._disk = state, store, blocks, disk
        self._now: Arrival | None = None
        self._for: Request | None = None
        """Who waits for it; None: nobody, it comes early."""
        disk.read_early(state.slot_bytes, state.block_bytes, blocks.num_blocks)

    def is_for(self, request: Request) -> bool:
        """Whether this request's state is on its way."""
        return self._now is not None and self._for is request

    def turn_to(self, request: Request, prompt: np.ndarray) -> None:
        """What is on its way is for this request, if it is of use; else it makes room."""
        if self._now is None or self._for is request:
            return
        best = self._best(prompt)
        if self._for is None and best is not None and best.path == self._now.reading.entry.path:
            self._for = request
        else:
            self.stop()   # who asked for that one has gone, or nobody has

    def prepares(self, request: Request, prompt: np.ndarray, wait_s: float) -> bool:
        """The longest whole entry for a request is on its way; waits at most wait_s seconds for more of it."""
        self.turn_to(request, prompt)
        if self._now is None:
            entry = self._best(prompt)
            if entry is None or not self._start(self._disk.begin_read(entry)):
                return False
            self._for = request
            return True
        return self._step(wait_s) or self._now is not None and not self._finish()

    def _best(self, prompt: np.ndarray) -> DiskEntry | None:
        """The longest entry beyond the longest state that is kept. A fingerprint stands for the sizes of an entry, but only a file's
        head says that it has that one."""
        found = self._store.deepest(prompt, len(prompt))
        least = BLOCK_POSITIONS + (0 if found is None else found.num_tokens)
        ours = self._state.slot_bytes, self._state.block_bytes
        fitting = (entry for entry in self._disk.candidates(prompt, least) if (entry.slot_bytes, entry.block_bytes) == ours)
        return next(fitting, None)

    def _start(self, reading: Reading, is_early: bool = False) -> bool:
        """is_early: nobody waits for it, and no kept state may go for it."""
        arrival = Arrival(self._state, self._store, reading)
        is_free = self._has_free_blocks(arrival)
        if not is_free and (is_early or not self._store.has_room(arrival.num_missing, arrival.found)):
            reading.stop()
            return False
        if is_free:
            arrival.take_room()
        self._now = arrival
        return True

    def _has_free_blocks(self, arrival: Arrival) -> bool:
        """Nothing needs to go for it."""
        return self._blocks.num_free >= arrival.num_missing

    def _step(self, wait_s: float) -> bool:
        """Whether more is to come. Where there is no memory to copy it, it is given up."""
        arrival = self._now
        assert arrival is not None
        try:
            return arrival.step(wait_s)
        except MemoryError:
            self._now = None
            self._store.lose(arrival.reading.entry.num_tokens, "on the device")
            arrival.reading.stop()
            arrival.give_back()
            return False

    def _finish(self) -> bool:
        """No more is to come. False: it was damaged, another one may be there."""
        arrival, self._now = self._now, None
        assert arrival is not None
        is_right = self._disk.end_read(arrival.reading)
        if is_right and arrival.has_room and self._store.at(arrival.reading.entry.tokens) is None:   # who runs may have come there meanwhile
            arrival.become_snapshot()
        else:
            arrival.give_back()
        return is_right

    @property
    def has_spare_work(self) -> bool:
        return self._now is not None or self._disk.has_early

    def spare_step(self) -> None:
        """A piece of what comes early: into blocks that are free, nothing goes for it. Nobody waits, so who asked for what is on its way
        has gone; it may come back."""
        self._for = None
        if self._now is not None and not (self._now.has_room or self._has_free_blocks(self._now)):
            self.stop()   # kept states go for somebody who waits, and for nobody else
        if self._now is not None:
            if not self._step(SPARE_WAIT_S) and self._now is not None:
                self._finish()
            return
        reading = self._disk.take_early()
        if reading is None:
            return
        if self._store.at(reading.entry.tokens) is not None:
            reading.stop()
        else:
            self._start(reading, is_early=True)

    def stop(self) -> None:
        """Give back what has come of a state, if one is on its way; one that comes early begins again later, of another no more is
        read."""
        arrival, self._now = self._now, None
        if arrival is not None:
            if self._for is None:
                self._disk.put_early(arrival.reading)
            else:
                arrival.reading.stop()
            arrival.give_back()

    def owned_blocks(self) -> list[np.ndarray]:
        return [] if self._now is None else [self._now.blocks]
