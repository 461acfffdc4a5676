"""States that survive the process: a folder of entry files with a byte budget, written behind by a thread of its own.

The engine thread asks (`candidates`, `begin_read`, `wants`, `write`); reader threads read what was asked for, the writer thread
writes, one entry at a time, and evicts the least recently used ones, whoever wrote them. The most recent entries are read when the
cache is opened, before anybody asks. Several processes may share a folder: a file that vanishes is a miss, one that appears is found
when the folder has changed. A folder that cannot be used switches the cache off with one log line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from q27app.engine.disk_entry import (
    KINDS, MAGIC, READERS, DiskEntry, entries_of, entry_name, is_of_older_layout, layout_of, read_head, remove_leftovers, write_entry,
)
from q27app.engine.disk_reading import Reading
from q27app.errors import why
from q27app.kernels.batch import BLOCK_POSITIONS

log = logging.getLogger("q27app.engine")

MIN_TOKENS = 512
STEP_TOKENS = 2048
EARLY = 4
"""Entries that are read when the cache is opened."""
MAX_EARLY_BYTES = 4 << 30
MAX_INDEXED = 4096


class DiskCache:
    """folder: made if missing, for its owner only. fingerprint: 32 bytes; entries of others are invisible.

    budget: bytes of all entries together. min_tokens: shorter states are not written. step: a turn's state is written only
    if none of the same conversation is there that is less than `step` tokens shorter. early_bytes: most memory of what is read before
    anybody asks."""

    def __init__(self, folder: Path, fingerprint: bytes, budget: int, min_tokens: int = MIN_TOKENS,
                 step: int = STEP_TOKENS, early_bytes: int = MAX_EARLY_BYTES) -> None:
        assert len(fingerprint) == 32
        self.folder, self._fingerprint, self._budget = folder, fingerprint, budget
        self._min_tokens, self._step, self._early_bytes = min_tokens, step, early_bytes
        self._entries: dict[str, DiskEntry] = {}
        self._rejected: dict[str, int] = {}
        self._folder_time = -1
        self._queue: SimpleQueue[tuple[np.ndarray, str, np.ndarray, np.ndarray] | None] = SimpleQueue()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self.num_written = self.num_read = self.num_failed = 0
        self._is_off = not self._open()
        self._thread = threading.Thread(target=self._write_behind, name="q27app-disk-cache", daemon=True)
        self._readers = ThreadPoolExecutor(READERS, "q27app-disk-reader")
        self._early: list[Reading] = []
        if not self._is_off:
            self._thread.start()

    def _open(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            log.error("the disk cache is off: %s cannot be used: %s", self.folder, why(error))
            return False
        remove_leftovers(self.folder)
        remove_older(self.folder)
        evict(self.folder, self._budget)
        self._refresh()
        return True

    # engine thread

    def _refresh(self) -> None:
        """Read the heads of entries that have appeared since, forget those that are gone."""
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            changed = -1
        if changed == self._folder_time:
            return
        self._folder_time = changed
        names = {path.name: path for path in entries_of(self.folder)}
        self._entries = {name: entry for name, entry in self._entries.items() if name in names}
        self._rejected = {name: when for name, when in self._rejected.items() if name in names}
        for name, path in names.items():
            if name not in self._entries and len(self._entries) < MAX_INDEXED:
                self._index(name, path)

    def _index(self, name: str, path: Path) -> None:
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return
        if self._rejected.get(name) == written:
            return
        try:
            entry = read_head(path, self._fingerprint)
        except MemoryError:
            self.num_failed += 1
            log.warning("host memory has ended: the disk cache's entry %s is not looked for until its folder changes", name)
            return
        if entry is None:
            self._rejected[name] = written
        else:
            self._entries[name] = entry

    def candidates(self, prompt: np.ndarray, least: int) -> Iterator[DiskEntry]:
        """Entries of at least `least` tokens and fewer than the prompt that it begins with, the longest first."""
        if self._is_off:
            return
        self._refresh()
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.num_tokens):
            if least <= entry.num_tokens < len(prompt) and np.array_equal(entry.tokens, prompt[:entry.num_tokens]):
                yield entry

    def read_early(self, slot_bytes: int, block_bytes: int, max_blocks: int) -> None:
        """Begin to read the most recent entries that have these sizes and at most so many blocks: the first request will probably
        want one."""
        room, files = self._early_bytes, [] if self._is_off else sorted(_files(self.folder), reverse=True)
        for _, size, path in files:
            entry = self._entries.get(path.name)
            if (entry is not None and (entry.slot_bytes, entry.block_bytes) == (slot_bytes, block_bytes)
                    and entry.num_tokens <= BLOCK_POSITIONS * max_blocks and size <= room and len(self._early) < EARLY):
                room -= size
                self._early.append(Reading(entry, self._readers))

    def take_early(self) -> Reading | None:
        """The most recent one of those that `read_early` began and nobody has asked for."""
        return self._early.pop(0) if self._early else None

    def put_early(self, reading: Reading) -> None:
        """It will be taken again, unless memory is for others."""
        if len(self._early) < EARLY and sum(known.entry.num_bytes for known in (*self._early, reading)) <= self._early_bytes:
            self._early.insert(0, reading)
        else:
            reading.stop()

    @property
    def has_early(self) -> bool:
        return bool(self._early)

    def begin_read(self, entry: DiskEntry) -> Reading:
        """Read an entry while the engine goes on, unless that has begun; `end_read` takes it when it is over."""
        known = next((reading for reading in self._early if reading.entry.path == entry.path), None)
        if known is None:
            return Reading(entry, self._readers)
        self._early.remove(known)
        return known

    def end_read(self, reading: Reading) -> bool:
        """Whether an entry was read whole; one that is gone or damaged is deleted, and one that could not be read is not looked for until
        the folder changes. Called once the reading is over."""
        entry = reading.entry
        if reading.is_damaged:
            self.num_failed += 1
            self._entries.pop(entry.path.name, None)
            if reading.is_files_fault:
                log.warning("the disk cache's entry %s is damaged or gone", entry.path.name)
                with contextlib.suppress(OSError):
                    entry.path.unlink()
            return False
        self.num_read += 1
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        return True

    @property
    def is_off(self) -> bool:
        """The folder cannot be used, or the cache was closed."""
        return self._is_off

    @property
    def is_free(self) -> bool:
        """The writer has nothing to do."""
        return not self._is_off and self._num_waiting == 0

    def wants(self, tokens: np.ndarray, kind: str) -> bool:
        """Whether a state is worth a file: long enough, new, and far enough from one that is there."""
        if self._is_off or len(tokens) < self._min_tokens:
            return False
        self._refresh()
        if entry_name(self._fingerprint, np.ascontiguousarray(tokens, "<i4")) in self._entries:
            return False
        near = len(tokens) - self._step
        return kind == "system" or not any(
            near < entry.num_tokens <= len(tokens) and np.array_equal(entry.tokens, tokens[:entry.num_tokens])
            for entry in self._entries.values() if entry.kind == "turn")

    def write(self, tokens: np.ndarray, kind: str, slot: np.ndarray, blocks: np.ndarray) -> None:
        """Queue a state for the writer. slot: uint8 [slot_bytes]; blocks: uint8 [n / 64, block_bytes]; both are kept."""
        assert kind in KINDS
        with self._lock:
            self._num_waiting += 1
        self._queue.put((tokens, kind, slot, blocks))

    def close(self) -> None:
        """Finish what is queued, end the thread."""
        for reading in self._early:
            reading.stop()
        self._early.clear()
        self._readers.shutdown(wait=True, cancel_futures=True)
        if not self._is_off and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(60)
        self._is_off = True

    def to_dict(self) -> dict[str, Any]:
        """For /status."""
        entries = list(self._entries.values())
        return {"is_on": not self._is_off, "entries": len(entries), "bytes": sum(entry.num_bytes for entry in entries),
                "written": self.num_written, "read": self.num_read, "failed": self.num_failed}

    # writer thread

    def _write_behind(self) -> None:
        while (item := self._queue.get()) is not None:
            tokens, kind, slot, blocks = item
            try:
                write_entry(self.folder, self._fingerprint, kind, tokens, slot, blocks)
                evict(self.folder, self._budget)
                self.num_written += 1
            except Exception as error:  # whatever it is, the next one may be written
                self.num_failed += 1
                log.warning("the disk cache could not write an entry: %s", why(error))
            finally:
                del item, slot, blocks
                with self._lock:
                    self._num_waiting -= 1


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """(time of last use, bytes, path) of every entry."""
    found = []
    for path in entries_of(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    return found


def evict(folder: Path, budget: int) -> int:
    """Delete entries until the others fit into `budget` bytes, those that nobody can read any more first, then the least recently used
    ones; returns how many."""
    files = _files(folder)
    total, count = sum(size for _, size, _ in files), 0
    if total <= budget:
        return 0
    for _, size, path in sorted(files, key=lambda file: (not is_of_older_layout(file[2]), *file)):
        if total <= budget:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
        total -= size
    return count


def remove_older(folder: Path) -> int:
    """Delete what earlier versions of this program have written in layouts that are read no more; returns how many."""
    count, freed = _delete([file for file in _files(folder) if is_of_older_layout(file[2])])
    if count:
        log.info("%d entries of the disk cache, %.2f GB, had an older layout and were deleted", count, freed / 1e9)
    return count


def _delete(files: list[tuple[int, int, Path]]) -> tuple[int, int]:
    """Those that can be deleted: (how many, bytes)."""
    count = freed = 0
    for _, size, path in files:
        with contextlib.suppress(OSError):
            path.unlink()
            count, freed = count + 1, freed + size
    return count, freed


def describe(folder: Path) -> list[dict[str, Any]]:
    """Every entry, the most recently used first: name, kind, tokens, bytes, used_at, fingerprint (8 digits).

    kind: "turn", "system", "older" or "newer" (a layout that another version reads), "damaged"."""
    rows = []
    for used, size, path in sorted(_files(folder), reverse=True):
        entry = read_head(path)
        rows.append({
            "name": path.name, "kind": entry.kind if entry else _why_not(path), "tokens": entry.num_tokens if entry else 0,
            "bytes": size, "used_at": used / 1e9, "fingerprint": entry.fingerprint.hex()[:8] if entry else "",
        })
    return rows


def _why_not(path: Path) -> str:
    """What an entry is that cannot be read."""
    layout, ours = layout_of(path), int(MAGIC[-1:])
    return "damaged" if layout is None or layout == ours else "older" if layout < ours else "newer"


def clear(folder: Path) -> tuple[int, int]:
    """Delete every entry and leftover; (how many, bytes)."""
    count, freed = _delete(_files(folder))
    return count + remove_leftovers(folder), freed
