"""Writes a `.q27` file in one pass: table first, rows as they come, under its own name only when complete.

The layout is `container`'s. Everything goes to `.NAME.partial` beside the target, which is locked, so that two writers
of one target cannot meet and a dead writer's leftover is used again; a clean exit fsyncs it, renames it and fsyncs the
folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from q27app.errors import FileFormatError, Q27Error, UsageError, why
from q27app.weights.codecs import first_not_finite
from q27app.weights.container import (
    ALIGNMENT,
    CHECKSUM_KEY,
    HEADER,
    MAGIC,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    VERSION,
    header_checksum,
)
from q27app.weights.dtypes import DType, require_readable, row_bytes, scales_per_row
from q27app.weights.metadata import format_metadata


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that will be written. shape: (cols,), for F32 and F16 only, or (rows, cols)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def data_bytes(self) -> int:
        return self.rows * row_bytes(self.dtype, self.cols)

    @property
    def scale_bytes(self) -> int:
        return self.rows * scales_per_row(self.dtype, self.cols) * self.dtype.scale_bytes


@dataclass(frozen=True)
class _Place:
    """Where a tensor's blobs go, counted from the data section."""

    data: int
    scales: int


def data_section_bytes(entries: Iterable[TensorEntry]) -> int:
    """Bytes of the data section that holds `entries`, padding included."""
    return sum(_padded(entry.data_bytes) + _padded(entry.scale_bytes) for entry in entries)


class Writer:
    """Context manager: `write` each entry's rows in order; a clean exit commits, an exception leaves nothing behind.

    Owns the partial file. UsageError: the target exists and `overwrite` is false, or its folder cannot be written.
    FileFormatError: entries or metadata that the format cannot hold, rows that do not fit, missing rows at the end.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        entries: Iterable[TensorEntry],
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.entries = tuple(entries)
        self._overwrite = overwrite
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._file = -1
        self._current = 0
        self._rows_done = 0
        _check_entries(self.entries, str(self.path))
        self._places, data_bytes = _place(self.entries)
        self._header = _format_header(metadata, self.entries, self._places, str(self.path))
        self.file_bytes = len(self._header) + data_bytes

    def __enter__(self) -> "Writer":
        self._refuse_existing()
        self._file = _open_locked(self._partial)
        try:
            os.ftruncate(self._file, 0)
            free = shutil.disk_usage(self._partial.parent).free
            if free < self.file_bytes:
                raise Q27Error(
                    f"{self.path} needs {self.file_bytes} bytes, its disk has {free} free.", "Free some space."
                )
            self._put(0, self._header)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._discard()

    def write(self, name: str, data: np.ndarray, scales: np.ndarray | None = None) -> None:
        """Append rows to tensor `name`: data uint8 [n, row_bytes], scales float16 [n, groups] or None."""
        assert self._file >= 0, "write outside of the with block"
        if self._current == len(self.entries) or self.entries[self._current].name != name:
            wanted = "no more" if self._current == len(self.entries) else self.entries[self._current].name
            raise FileFormatError(f"{self.path}: rows of {name} where {wanted} rows were due.")
        entry, place = self.entries[self._current], self._places[self._current]
        where = f"{self.path}: {name}"
        width, groups = row_bytes(entry.dtype, entry.cols), scales_per_row(entry.dtype, entry.cols)
        _check_rows(where, "data", data, np.uint8, width)
        rows = data.shape[0]
        if not rows:
            return
        if self._rows_done + rows > entry.rows:
            raise FileFormatError(f"{where}: {self._rows_done + rows} rows, expected {entry.rows}.")
        if (scales is not None) != bool(groups):
            raise FileFormatError(
                f"{where}: {'no ' if scales is None else ''}scales given; {entry.dtype.name} has {groups} a row."
            )
        self._put(len(self._header) + place.data + self._rows_done * width, data)
        if scales is not None:
            _check_rows(where, "scales", scales, np.float16, groups)
            bad = first_not_finite(scales)
            if scales.shape[0] != rows or bad is not None:
                problem = (
                    f"scale {bad[1]} of row {self._rows_done + bad[0]} is not finite"
                    if bad
                    else f"{scales.shape[0]} rows of scales for {rows}"
                )
                raise FileFormatError(f"{where}: {problem}.")
            self._put(len(self._header) + place.scales + self._rows_done * groups * 2, scales)
        self._rows_done += rows
        if self._rows_done == entry.rows:
            self._current, self._rows_done = self._current + 1, 0

    def _put(self, offset: int, content: bytes | np.ndarray) -> None:
        view = (
            memoryview(np.ascontiguousarray(content)).cast("B")
            if isinstance(content, np.ndarray)
            else memoryview(content)
        )
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], offset + done)
        except OSError as problem:
            raise Q27Error(
                f"{self.path}: writing failed after {offset + done} of {self.file_bytes} bytes: {why(problem)}."
            ) from problem

    def _commit(self) -> None:
        if self._current < len(self.entries):
            entry = self.entries[self._current]
            raise FileFormatError(
                f"{self.path}: {entry.name} has {self._rows_done} of {entry.rows} rows; the file is not complete."
            )
        self._refuse_existing()
        try:
            os.ftruncate(self._file, self.file_bytes)
            os.fsync(self._file)
            os.replace(self._partial, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as problem:
            raise Q27Error(f"{self.path} could not be completed: {why(problem)}.") from problem
        self._close()

    def _refuse_existing(self) -> None:
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a folder; expected the name of a .q27 file.")
        if not self._overwrite and os.path.lexists(self.path):
            raise UsageError(f"{self.path} exists already.", "Choose another name, or allow overwriting (--overwrite).")

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _discard(self) -> None:
        """Remove the partial file, unless it has become the target."""
        if self._file >= 0:
            self._partial.unlink(missing_ok=True)
            self._close()


def _open_locked(partial: Path) -> int:
    """Open and lock `partial`, making it if needed; its descriptor. The lock ends with the descriptor."""
    try:
        for _ in range(100):
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(partial) and os.path.samestat(os.fstat(file), os.lstat(partial)):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # another writer finished and renamed it between open and lock
    except BlockingIOError:
        raise UsageError(
            f"{partial} is being written by another process.", "Wait for it, or choose another name."
        ) from None
    except OSError as problem:
        raise UsageError(f"{partial} cannot be written: {why(problem)}.",
                         f"Make the folder {partial.parent}, or name another place." if not partial.parent.is_dir() else
                         "Choose a place that you may write.") from problem
    raise UsageError(f"{partial} changes all the time; expected one writer.", "Stop the other writers of this file.")


def _check_rows(where: str, kind: str, array: np.ndarray, dtype: type, width: int) -> None:
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] != width:
        found = f"{array.dtype} {list(array.shape)}"
        raise FileFormatError(f"{where}: {kind} are {found}, expected {np.dtype(dtype)} [rows, {width}].")


def _check_entries(entries: tuple[TensorEntry, ...], file: str) -> None:
    if not 1 <= len(entries) <= MAX_TENSORS:
        raise FileFormatError(f"{file}: {len(entries)} tensors, expected 1 to {MAX_TENSORS}.")
    names: set[str] = set()
    for entry in entries:
        where = f"{file}: {entry.name}"
        if entry.name in names:
            raise FileFormatError(f"{where} is listed twice.")
        names.add(entry.name)
        if not 1 <= len(entry.name.encode("utf-8", "replace")) <= MAX_NAME_BYTES or not entry.name.isprintable():
            raise FileFormatError(
                f"{file}: {entry.name!r} cannot be a tensor's name (1 to {MAX_NAME_BYTES} printable bytes)."
            )
        require_readable(entry.dtype, where)
        if len(entry.shape) not in ((2,) if entry.dtype.group else (1, 2)) or min(entry.shape, default=0) < 1:
            raise FileFormatError(f"{where}: shape {list(entry.shape)} cannot be stored as {entry.dtype.name}.")
        try:
            row_bytes(entry.dtype, entry.cols)
        except FileFormatError as problem:
            raise FileFormatError(f"{where} {list(entry.shape)}: {problem.message}", problem.hint) from None


def _place(entries: tuple[TensorEntry, ...]) -> tuple[list[_Place], int]:
    """Every tensor's place, and the size of the data section."""
    places, offset = [], 0
    for entry in entries:
        scales = offset + _padded(entry.data_bytes)
        places.append(_Place(offset, scales if entry.dtype.group else 0))
        offset = scales + _padded(entry.scale_bytes)
    return places, offset


def _format_header(
    metadata: Mapping[str, Any], entries: tuple[TensorEntry, ...], places: list[_Place], file: str
) -> bytes:
    """Everything before the data section, with the checksum as the metadata's last key."""
    keys = {key: value for key, value in metadata.items() if key != CHECKSUM_KEY}
    text = format_metadata({**keys, CHECKSUM_KEY: "0" * 64}, file)
    parts = [HEADER.pack(MAGIC, VERSION, len(entries), len(text)), text]
    for entry, place in zip(entries, places):
        name = entry.name.encode("utf-8")
        parts.append(struct.pack(f"<H{len(name)}sBB", len(name), name, entry.dtype.code, len(entry.shape)))
        parts.append(struct.pack(f"<{len(entry.shape)}Q", *entry.shape))
        parts.append(struct.pack("<QQQQ", place.data, entry.data_bytes, place.scales, entry.scale_bytes))
    header = b"".join(parts)
    header += b"\0" * (-len(header) % ALIGNMENT)
    table_start = HEADER.size + len(text)
    digest = header_checksum(header, table_start).encode("ascii")
    return header[: table_start - 66] + digest + header[table_start - 2 :]


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT
