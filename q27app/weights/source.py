"""What a conversion reads from: files opened once, read at offsets, and tensors that give rows as float32.

Files are read with `pread` and not mapped: the pages of a 50 GB checkpoint then never count as this process's memory,
and a file that is cut while it is read gives an error and not a bus fault. Every length comes from the file and is
checked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from q27app.errors import FileFormatError

MAX_DIMENSION = 1 << 40
"""No dimension or product of dimensions of a tensor is larger; keeps all arithmetic below 2^63."""

MAX_JSON_VALUES = 3_000_000
"""Bounds what the parser builds from a hostile text to some hundred MB; a tokenizer file has half a million."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that is read by rows.

    shape: row-major, the innermost dimension last. rows: the first dimension, or 1 for a vector; cols: everything else.
    nbytes: bytes in the file. read(start, stop) -> float32 [stop - start, cols], a fresh array; may be called from
    several threads; raises FileFormatError if the file ends early.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[int, int], np.ndarray]

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def cols(self) -> int:
        return prod(self.shape[1:]) if len(self.shape) > 1 else prod(self.shape)


class SourceFile:
    """A regular file, open for reading at offsets from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._fd = -1
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise FileFormatError(f"{path} is not a regular file.", "Give a checkpoint's file or folder.")
            self._fd = os.open(path, os.O_RDONLY)
            self.size = os.fstat(self._fd).st_size
        except OSError as problem:
            raise FileFormatError(f"{path} cannot be opened: {problem.strerror}.") from problem

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from `offset`, writable and the caller's own."""
        out = np.empty(nbytes, np.uint8)
        view, done = memoryview(out), 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as problem:
                raise FileFormatError(
                    f"{self.path} cannot be read at byte {offset + done}: {problem.strerror}.") from problem
            if count <= 0:
                raise FileFormatError(
                    f"{self.path} ends at byte {offset + done}, not at {offset + nbytes}; it was cut while being read."
                )
            done += count
        return out

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class Source:
    """An opened checkpoint: metadata and tensors by name, as the file names them. Owns the open files."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]
    files: list[SourceFile] = field(default_factory=list)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def float_reader(file: SourceFile, offset: int, kind: str, cols: int) -> Callable[[int, int], np.ndarray]:
    """read(start, stop) for rows of `cols` values of kind "F32", "F16" or "BF16", the first row at byte `offset`."""
    width = cols * (4 if kind == "F32" else 2)

    def read(start: int, stop: int) -> np.ndarray:
        raw = file.read(offset + start * width, (stop - start) * width)
        if kind == "F32":
            values = raw.view("<f4")
        elif kind == "F16":
            values = raw.view("<f2").astype(np.float32)
        else:
            values = np.zeros((stop - start) * cols, np.float32)
            values.view("<u2")[1::2] = raw.view("<u2")
        return values.reshape(stop - start, cols)

    return read


def refuse_overlaps(file: SourceFile, spans: list[tuple[int, int, str]]) -> None:
    """spans: (first byte, byte after the last, tensor name). FileFormatError names two tensors that share bytes."""
    spans = sorted(span for span in spans if span[1] > span[0])
    for before, after in zip(spans, spans[1:]):
        if after[0] < before[1]:
            raise FileFormatError(
                f"{file.path}: tensors {before[2]} (bytes {before[0]} to {before[1]}) and {after[2]} "
                f"(from byte {after[0]}) overlap.", "The file is damaged; download it again.")


def parse_json_object(text: bytes, where: str, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """The JSON object in `text`. FileFormatError, beginning with `where`, for anything else, also for repeated keys."""
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    commas = text.count(b",")
    if commas > max_values:
        raise FileFormatError(f"{where} holds more than {commas} values, expected at most {max_values}.")
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:200]
        raise FileFormatError(f"{where} is not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{where} holds a JSON {type(value).__name__}, expected an object.")
    return value


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The whole file, of at most max_bytes. FileFormatError if it is longer or cannot be read."""
    file = SourceFile(path)
    try:
        if file.size > max_bytes:
            raise FileFormatError(f"{path} has {file.size} bytes, expected at most {max_bytes}.")
        return file.read(0, file.size).tobytes()
    finally:
        file.close()
