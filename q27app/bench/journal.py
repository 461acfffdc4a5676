"""What a measurement has found so far, in a file that survives any end of the process.

A journal is JSON lines: a header with the benchmark's name, its settings and the first stamp, then rows, each with a key.
Every line is written at once and fsynced, so after a kill at any moment only the line being written can be torn; it is
cut off when the journal is opened again. A row whose key is there is not measured again. Another run of other settings
cannot write into the file, and neither can two processes at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from q27app.errors import FileFormatError, Q27Error, UsageError

MAX_BYTES = 1 << 30
"""A journal that is larger is not read."""


class Journal:
    """An open journal. rows: key -> row, in the order of measurement."""

    def __init__(self, path: Path, bench: str, settings: Mapping[str, Any], stamp: Mapping[str, Any]) -> None:
        """Open or go on. Raises UsageError if the file is another's, FileFormatError if it is no journal."""
        self.path, self.bench = path, bench
        self.settings = json.loads(json.dumps(settings))
        self.stamp: dict[str, Any] = dict(stamp)
        self.rows: dict[str, dict[str, Any]] = {}
        self.num_kept = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}.", "Name another file with --out.") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        if not self.num_kept and not self._has_header:
            self._append({"bench": bench, "settings": self.settings, "stamp": self.stamp})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def has(self, key: str) -> bool:
        return key in self.rows

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.rows]

    def add(self, key: str, **values: Any) -> dict[str, Any]:
        """Keep a row: it is on the disk when this returns."""
        row = {"key": key, "at": round(time.time(), 3), **values}
        self._append(row)
        self.rows[key] = row
        return row

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{self.path}: another benchmark writes into it.", "Wait for it, or name another file.") from error

    def _read(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size > MAX_BYTES:
            raise FileFormatError(f"{self.path} has {size} bytes, a journal at most {MAX_BYTES}.", "Name another file.")
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        self._has_header = bool(lines)
        if lines:
            self._check_header(lines[0])
        if not lines and data and not b'{"bench": '.startswith(data[:10]):
            raise self._not_ours("it does not begin with a header")
        if whole < len(data):
            os.ftruncate(self._file.fileno(), whole)
        for number, line in enumerate(lines[1:], 2):
            row = self._object(line, number)
            if not isinstance(row.get("key"), str):
                raise self._not_ours(f"line {number} has no key")
            self.rows[row["key"]] = row
        self.num_kept = len(self.rows)

    def _check_header(self, line: bytes) -> None:
        header = self._object(line, 1)
        if "bench" not in header or not isinstance(header.get("settings"), dict):
            raise self._not_ours("it does not begin with a header")
        if header["bench"] != self.bench:
            raise UsageError(f"{self.path} is of bench {header['bench']}, not of {self.bench}.", "Name another file.")
        old = header["settings"]
        other = sorted(name for name in old.keys() | self.settings.keys() if old.get(name) != self.settings.get(name))
        if other:
            name = other[0]
            raise UsageError(f"{self.path} was measured with {name} {json.dumps(old.get(name))[:80]}, now it is "
                             f"{json.dumps(self.settings.get(name))[:80]}.", "Use the same settings to go on, or name another file.")
        self.stamp = header.get("stamp") or self.stamp

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise self._not_ours(f"line {number} is not JSON") from error
        if not isinstance(value, dict):
            raise self._not_ours(f"line {number} is not an object")
        return value

    def _not_ours(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self.path} is not the journal of a benchmark: {why}.", "Name another file with --out.")

    def _append(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise Q27Error(f"{self.path}: cannot be written: {error.strerror}.", "Is the disk full?") from error


def read_journal(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, rows) of a journal, a torn last line left out. Raises UsageError, FileFormatError."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from error
    lines = data[:data.rfind(b"\n") + 1].splitlines()
    try:
        values = [json.loads(line) for line in lines]
    except ValueError as error:
        raise FileFormatError(f"{path} is not the journal of a benchmark: {error}.") from error
    if not values or not isinstance(values[0], dict) or "bench" not in values[0]:
        raise FileFormatError(f"{path} is not the journal of a benchmark: it does not begin with a header.")
    return values[0], values[1:]
