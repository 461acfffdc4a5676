"""What a network says on a corpus, on disk: a folder with one header and one file for each chunk of each document.

    capture.json            form, vocabulary, corpus (fingerprint, names and lengths), who computed it
    00012-00000256.npz      document 12, positions 256 ..: the arrays of `divergence.Rows`

A chunk is written aside, fsynced and renamed, so each is whole or absent, and an interrupted capture goes on with the
documents that lack a chunk. Two captures of one corpus can be compared anywhere, without the models.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from q27app.bench.corpus import Document, fingerprint
from q27app.bench.divergence import Form, Rows, encode, parse_form
from q27app.bench.feeder import CHUNK, Feeder
from q27app.errors import FileFormatError, Q27Error, UsageError

HEADER = "capture.json"
VERSION = 1
MAX_HEADER_BYTES = 64 << 20


class Capture:
    """An open capture. header: see the module."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder, self.header = folder, header
        self.form: Form = parse_form(header["form"])
        self.documents = [(str(name), int(length)) for name, length in header["documents"]]

    def chunk_path(self, document: int, start: int) -> Path:
        return self.folder / f"{document:05d}-{start:08d}.npz"

    def is_complete(self, document: int) -> bool:
        return all(self.chunk_path(document, start).exists() for start in range(0, self.documents[document][1], CHUNK))

    def num_complete(self) -> int:
        return sum(self.is_complete(document) for document in range(len(self.documents)))

    def rows(self, document: int) -> Iterator[Rows]:
        """The chunks of a document, in order. Raises FileFormatError for a damaged or missing one."""
        for start in range(0, self.documents[document][1], CHUNK):
            yield self._read(self.chunk_path(document, start), min(CHUNK, self.documents[document][1] - start))

    def _read(self, path: Path, count: int) -> Rows:
        width = {"exact": self.header["vocab_size"], "full": self.header["vocab_size"]}.get(
            self.form.name, min(self.form.k, self.header["vocab_size"]))
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            found = Rows(self.form, arrays.pop("best"), arrays.pop("following"), arrays.pop("values"), **arrays)
            shapes = [found.best.shape == (count,), found.following.shape == (count,), found.values.shape == (count, width),
                      self.form.name != "top" or (found.ids.shape == (count, width) and found.tail.shape == (count,))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise FileFormatError(f"{path} is missing or damaged: {str(error)[:200]}", "Delete it and capture again.") from error
        if not all(shapes):
            raise FileFormatError(f"{path} does not hold {count} positions of form {self.form}.", "Delete it and capture again.")
        return found

    def write(self, document: int, start: int, rows: Rows) -> None:
        """Keep a chunk. Raises Q27Error where the disk refuses."""
        data = io.BytesIO()
        np.savez(data, **rows.arrays())
        _write(self.chunk_path(document, start), data.getvalue())


def _write(path: Path, data: bytes) -> None:
    aside = path.with_suffix(".part")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise Q27Error(f"{path}: cannot be written: {error.strerror}.", "Is the disk full?") from error


def cost_bytes(documents: Sequence[Document], vocab_size: int, form: Form) -> int:
    """What a capture takes on the disk, but for a few hundred bytes a chunk."""
    return sum(len(document.tokens) for document in documents) * form.row_bytes(vocab_size)


def open_capture(folder: Path) -> Capture:
    """One that exists. Raises FileFormatError."""
    path = folder / HEADER
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise FileFormatError(f"{path} is too large for the header of a capture.")
        header = json.loads(path.read_bytes())
        if header["version"] != VERSION:
            raise FileFormatError(f"{folder} is a capture of version {header['version']}, expected {VERSION}.", "Capture again.")
        if not 0 < int(header["vocab_size"]) < 2**24:
            raise ValueError("vocab_size")
        return Capture(folder, header)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{folder} is not a capture: {str(error)[:200]}", "q27app bench capture makes one.") from error


def make_capture(folder: Path, documents: Sequence[Document], vocab_size: int, form: Form, about: Mapping[str, Any]) -> Capture:
    """A new capture, or the one that stands there if it is of the same corpus, form and network. about: who computes it.
    Raises UsageError."""
    header = {"version": VERSION, "form": str(form), "vocab_size": vocab_size, "corpus": fingerprint(documents),
              "documents": [[document.name, len(document.tokens)] for document in documents], "about": dict(about)}
    if (folder / HEADER).exists():
        found = open_capture(folder)
        other = [name for name in ("form", "vocab_size", "corpus") if found.header.get(name) != header[name]]
        other += [name for name in ("model", "kv", "backend") if found.header["about"].get(name) != about.get(name)]
        if other:
            raise UsageError(f"{folder} holds a capture of another {other[0]}.", "Name another folder.")
        return found
    need, free = cost_bytes(documents, vocab_size, form), shutil.disk_usage(_existing(folder)).free
    if need > free:
        raise UsageError(f"{folder}: the capture takes {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free.",
                         "Take fewer tokens (--limit), or a smaller form such as --form top64.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}.") from error
    _write(folder / HEADER, json.dumps(header).encode())
    return Capture(folder, header)


def fill_capture(capture: Capture, feeder: Feeder, documents: Sequence[Document], say: Callable[[str], None]) -> None:
    """Compute what is missing."""
    for number, document in enumerate(documents):
        if capture.is_complete(number):
            continue
        for index, rows in enumerate(encoded(feeder, document, capture.form)):
            if not capture.chunk_path(number, index * CHUNK).exists():
                capture.write(number, index * CHUNK, rows)
        say(f"captured {number + 1} of {len(documents)}: {document.name}, {len(document.tokens)} tokens")


def encoded(feeder: Feeder, document: Document, form: Form, reference: Capture | None = None, number: int = 0) -> Iterator[Rows]:
    """What a network says on a document, in chunks of CHUNK positions. reference: whose ids a top form takes, and the
    document's number there."""
    following = document.following
    theirs = reference.rows(number) if reference is not None and form.name == "top" else None
    for index, logits in enumerate(feeder.logits(document.tokens)):
        ids = next(theirs).ids if theirs is not None else None
        yield encode(logits, following[index * CHUNK:index * CHUNK + len(logits)], form, ids)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
