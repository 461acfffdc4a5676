"""An entry's payload on its way into memory: read and checked by several threads, chunk by chunk, from its beginning on.

Only bytes that are right are ever told of (`num_bytes`), so whoever takes them may begin before the last has come. Whether all of them
are right is known when the reading `is_over`.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from concurrent.futures import Executor, Future, wait

import numpy as np

from q27app.engine import disk_entry
from q27app.engine.disk_entry import READERS, DiskEntry, fill, head_of, is_digest
from q27app.kernels.batch import BLOCK_POSITIONS

log = logging.getLogger("q27app.engine")

WANTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system had too little of; the file may be right."""


class Reading:
    """Begins at once. readers: does the work; when it is shut down before that is done the reading is over and damaged."""

    def __init__(self, entry: DiskEntry, readers: Executor) -> None:
        self.entry = entry
        self._readers = readers
        self._chunk = disk_entry.CHUNK
        self._data = np.zeros(0, np.uint8)
        self._is_right = [False] * len(entry.digests)
        self._next = self._num_right = 0
        self._changed = threading.Condition()
        self.is_over = self.is_damaged = self._is_stopped = False
        self.is_files_fault = False
        """It is damaged because the file is, or has gone, and not for want of memory or threads, or because it was stopped."""
        self._began = time.perf_counter()
        self.seconds = 0.0
        try:
            readers.submit(self._begin)
        except RuntimeError:   # no thread was to be had; one may still come to it later
            self._is_stopped = True
            self._end(is_damaged=True, is_files_fault=False)

    @property
    def num_bytes(self) -> int:
        """Bytes from the beginning of the payload that are there and right."""
        return min(self._num_right * self._chunk, len(self._data))

    @property
    def num_blocks(self) -> int:
        """Blocks that are there and right."""
        if self.is_over and not self.is_damaged:
            return self.entry.num_tokens // BLOCK_POSITIONS
        return max(0, self.num_bytes - self.entry.slot_bytes) // max(1, self.entry.block_bytes)

    def slot(self) -> np.ndarray:
        """uint8 [slot_bytes], right where num_bytes says so."""
        return self._data[:self.entry.slot_bytes]

    def blocks(self, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start, block_bytes], the first of num_blocks."""
        size, first = self.entry.block_bytes, self.entry.slot_bytes
        return self._data[first + start * size:first + stop * size].reshape(stop - start, size)

    def wait(self, num_bytes: int, seconds: float) -> None:
        """Until more than num_bytes are right or it is over, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.num_bytes > num_bytes, seconds)

    def stop(self) -> None:
        """Nobody wants it: no other chunk is begun, and it ends as damaged unless all are right."""
        with self._changed:
            self._is_stopped, self._next = True, len(self._is_right)

    # reader threads

    def _begin(self) -> None:
        entry, count = self.entry, len(self.entry.digests)
        if self._is_stopped:
            return self._end(is_damaged=True, is_files_fault=False)
        try:
            with open(entry.path, "rb", buffering=0) as file:
                again = head_of(entry.path, file, entry.fingerprint)
                if again is None or again.digests != entry.digests or not np.array_equal(again.tokens, entry.tokens):
                    return self._end(is_damaged=True, is_files_fault=again is None)   # else another process has written it anew
                self._data = np.empty(entry.slot_bytes + entry.num_tokens // BLOCK_POSITIONS * entry.block_bytes, np.uint8)
                helpers: list[Future] = []
                try:
                    for _ in range(min(READERS, count) - 1):
                        helpers.append(self._readers.submit(self._work, file.fileno()))
                    self._work(file.fileno())
                finally:
                    with self._changed:
                        self._next = len(self._is_right)
                    begun = [helper for helper in helpers if not helper.cancel()]   # the others have nothing left to do
                    wait(begun)   # they read this file
                for helper in begun:
                    helper.result()
            self._end(is_damaged=not all(self._is_right), is_files_fault=not self._is_stopped)
        except OSError as error:
            self._end(is_damaged=True, is_files_fault=error.errno not in WANTS)
        except RuntimeError:   # no threads are left: nobody wants it any more
            self._end(is_damaged=True, is_files_fault=False)
        except Exception:  # what memory or the system does not give for it ends nobody's request
            log.exception("the disk cache could not read the entry %s", entry.path.name)
            self._end(is_damaged=True, is_files_fault=False)

    def _work(self, descriptor: int) -> None:
        """Read and check chunks until none is left or one is wrong."""
        view = memoryview(self._data)
        while True:
            with self._changed:
                index, self._next = self._next, self._next + 1
            if index >= len(self._is_right):
                return
            start = index * self._chunk
            chunk = view[start:start + self._chunk]
            if not (fill(descriptor, self.entry.payload_offset + start, chunk) and is_digest(chunk, self.entry.digests[index])):
                with self._changed:
                    self._next = len(self._is_right)
                return
            with self._changed:
                self._is_right[index] = True
                while self._num_right < len(self._is_right) and self._is_right[self._num_right]:
                    self._num_right += 1
                self._changed.notify_all()

    def _end(self, is_damaged: bool, is_files_fault: bool = True) -> None:
        with self._changed:
            self.is_files_fault = is_damaged and is_files_fault
            self.seconds = time.perf_counter() - self._began
            self.is_damaged, self.is_over = is_damaged, True
            self._changed.notify_all()
