"""Reads GGUF (versions 2 and 3, little endian): metadata, tokenizer arrays, tensors.

    "GGUF" | u32 version | u64 tensors | u64 keys
    key       string name, u32 type, value       string: u64 bytes, UTF-8; array: u32 type, u64 count, values
    tensor    string name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset from the data's start
    data      begins at the next multiple of general.alignment (32)

The walk is bounded: the header by MAX_HEADER_BYTES, each count by the bytes that are left and by a budget of elements
for the whole file, so a hostile count is refused before anything is allocated for it. Blocks of quantised types are
decoded by the `gguf` library, by rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from q27app.errors import FileFormatError
from q27app.weights.source import MAX_DIMENSION, Source, SourceFile, SourceTensor, float_reader, refuse_overlaps

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 14
MAX_NAME_BYTES = 512
MAX_STRINGS = 2 << 20
"""Strings in all arrays of a file (a vocabulary of 248,320 and its merges need half a million)."""
MAX_NUMBERS = 4 << 20
"""Numbers in all arrays of a file."""
MAX_DIMENSIONS = 4
DAMAGED = "The file is damaged; download it again."
COMPANION = "Give the MTP companion file of this model."

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""GGUF type -> name, weights of a block, bytes of a block: every type that the library decodes."""


def open_gguf(path: str | Path) -> Source:
    """metadata: every key with plain values (lists for arrays); tensors by name, shapes row-major.

    Raises FileFormatError; on success the caller closes the source.
    """
    file = SourceFile(Path(path))
    try:
        walk = _Walk(file)
        tensor_count, key_count = walk.preamble()
        metadata = walk.metadata(key_count)
        tensors = _tensors(file, walk, tensor_count, metadata)
    except BaseException:
        file.close()
        raise
    return Source(file.path, metadata, tensors, [file])


class _Walk:
    """A position in the header. Every step checks that the bytes it wants are there."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.buffer = file.read(0, min(file.size, MAX_HEADER_BYTES)).tobytes()
        self.position = 0
        self.strings_left, self.numbers_left = MAX_STRINGS, MAX_NUMBERS

    def problem(self, what: str, hint: str = DAMAGED) -> FileFormatError:
        return FileFormatError(f"{self.file.path}: {what} (byte {self.position}).", hint)

    def take(self, nbytes: int, what: str) -> bytes:
        start = self.position
        if nbytes > len(self.buffer) - start:
            is_whole = len(self.buffer) == self.file.size
            reason = "the file ends" if is_whole else f"the header exceeds {MAX_HEADER_BYTES} bytes"
            raise self.problem(f"{what} needs {nbytes} bytes and {reason} after {len(self.buffer) - start}")
        self.position = start + nbytes
        return self.buffer[start:self.position]

    def unpack(self, form: str, what: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def preamble(self) -> tuple[int, int]:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            is_ours = magic == b"Q27F"
            raise self.problem("the file is a .q27 already" if is_ours else "the file does not begin with GGUF",
                               "Give a GGUF file or a Hugging Face folder.")
        version = self.unpack("I", "the version")
        if version not in (2, 3):
            raise self.problem(f"GGUF version {version}, expected 2 or 3, little endian",
                               "Convert it with a current llama.cpp.")
        tensors, keys = self.unpack("Q", "the tensor count"), self.unpack("Q", "the key count")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise self.problem(f"{tensors} tensors and {keys} keys, expected at most {MAX_TENSORS} and {MAX_KEYS}")
        return tensors, keys

    def name(self, what: str) -> str:
        length = self.unpack("Q", what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.problem(f"{what} has {length} bytes, expected 1 to {MAX_NAME_BYTES}")
        return self.text(self.take(length, what), what)

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.problem(f"{what} is not UTF-8") from None

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.name(f"the name of metadata key {index}")
            if key in values:
                raise self.problem(f"metadata key {key} stands twice")
            kind = self.unpack("I", f"the type of {key}")
            if kind == ARRAY:
                values[key] = self.array(key)
            elif kind == STRING:
                values[key] = self.text(self.take(self.unpack("Q", key), key), key)
            else:
                values[key] = self.numbers(kind, 1, key)[0]
        return values

    def array(self, key: str) -> list[Any]:
        kind, count = self.unpack("I", key), self.unpack("Q", key)
        if kind == STRING:
            self.strings_left -= count
            if self.strings_left < 0:
                raise self.problem(f"{key} claims {count} strings; a file may hold {MAX_STRINGS}")
            return self.strings(count, key)
        self.numbers_left -= count
        if self.numbers_left < 0:
            raise self.problem(f"{key} claims {count} numbers; a file may hold {MAX_NUMBERS}")
        return self.numbers(kind, count, key)

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in NUMBERS:
            raise self.problem(f"{key} has the value type {kind}, expected a number, a string or an array of these")
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        if dtype.kind == "f" and not np.isfinite(values).all():
            raise self.problem(f"{key} holds a number that is not finite")
        return (values != 0).tolist() if kind == BOOL else values.tolist()

    def strings(self, count: int, key: str) -> list[str]:
        buffer, position, end = self.buffer, self.position, len(self.buffer)
        unpack, out = struct.Struct("<Q").unpack_from, []
        if count * 8 > end - position:
            raise self.problem(f"{key} claims {count} strings in the {end - position} bytes that are left")
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > end:
                    raise self.problem(f"string {len(out)} of {key} does not end in the header")
                out.append(buffer[start:position].decode("utf-8"))
        except (struct.error, UnicodeDecodeError) as problem:
            reason = "is not UTF-8" if isinstance(problem, UnicodeDecodeError) else "lies past the end of the file"
            raise self.problem(f"string {len(out)} of {key} {reason}") from None
        self.position = position
        return out


def _tensors(file: SourceFile, walk: _Walk, count: int, metadata: dict[str, Any]) -> dict[str, SourceTensor]:
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
        raise walk.problem(f"general.alignment is {str(alignment)[:50]}, expected a multiple of 8 up to 65536")
    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(count):
        name = walk.name(f"the name of tensor {index}")
        if name in table:
            raise walk.problem(f"tensor {name} stands twice")
        num_dimensions = walk.unpack("I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise walk.problem(f"{name} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(walk.unpack("Q", name) for _ in range(num_dimensions))[::-1]
        if min(shape) < 1 or prod(shape) > MAX_DIMENSION:
            raise walk.problem(f"{name} has the impossible shape {list(shape)}")
        table[name] = (shape, walk.unpack("I", name), walk.unpack("Q", name))
    data_start = -(-walk.position // alignment) * alignment
    tensors, spans = {}, []
    for name, (shape, kind, offset) in table.items():
        if offset % alignment:
            raise walk.problem(f"{name} begins at data byte {offset}, expected a multiple of {alignment}")
        tensors[name] = tensor = _tensor(file, walk, name, shape, kind, data_start + offset)
        spans.append((data_start + offset, data_start + offset + tensor.nbytes, name))
        if data_start + offset + tensor.nbytes > file.size:
            raise walk.problem(f"{name} ends at byte {data_start + offset + tensor.nbytes}; the file has {file.size}")
    refuse_overlaps(file, spans)
    return tensors


def _tensor(file: SourceFile, walk: _Walk, name: str, shape: tuple[int, ...], kind: int, offset: int) -> SourceTensor:
    if kind not in BLOCKS:
        raise walk.problem(
            f"{name} has the GGUF type {kind}, expected one of " + ", ".join(label for label, _, _ in BLOCKS.values()),
            "Give a GGUF of another quantisation.")
    label, weights, nbytes = BLOCKS[kind]
    inner = shape[-1]
    if inner % weights:
        raise walk.problem(f"{name} is {label} with {inner} columns, expected a multiple of {weights}")
    total = prod(shape) // weights * nbytes
    if weights == 1:
        cols = prod(shape[1:]) if len(shape) > 1 else inner
        return SourceTensor(name, shape, total, float_reader(file, offset, label, cols))
    return SourceTensor(name, shape, total, _block_reader(file, name, shape, kind, offset))


def _block_reader(
    file: SourceFile, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> Callable[[int, int], np.ndarray]:
    _, weights, nbytes = BLOCKS[kind]
    cols = prod(shape[1:]) if len(shape) > 1 else shape[0]
    width = cols // weights * nbytes

    def read(start: int, stop: int) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = file.read(offset + start * width, (stop - start) * width).reshape(stop - start, width)
        with np.errstate(all="ignore"):
            values = dequantize(raw, GGMLQuantizationType(kind))
        return np.ascontiguousarray(values, np.float32).reshape(stop - start, cols)

    return read


def merge_companion(base: Source, companion: Source) -> None:
    """Add the draft layer of `companion` (a GGUF that holds only that) to `base`, which then owns its files too.

    token_embd, output_norm and output of the companion are copies and ignored. FileFormatError for anything else that
    both files hold, for a block that is not the one after the base's last, and for another architecture.
    """
    key = "general.architecture"
    if companion.metadata.get(key) != base.metadata.get(key):
        raise FileFormatError(
            f"{companion.path}: {key} is {companion.metadata.get(key)!r}, expected that of {base.path.name}, "
            f"{base.metadata.get(key)!r}.")
    added = {name: tensor for name, tensor in companion.tensors.items() if name.startswith("blk.")}
    if not any(".nextn." in name for name in added):
        raise FileFormatError(f"{companion.path} holds no draft layer (no tensor blk.N.nextn.*).", COMPANION)
    for name in companion.tensors:
        if name not in added and name not in ("token_embd.weight", "output_norm.weight", "output.weight"):
            raise FileFormatError(f"{companion.path}: tensor {name} does not belong to a draft layer.", COMPANION)
        if name in added and name in base.tensors:
            raise FileFormatError(f"{companion.path}: tensor {name} is also in {base.path.name}.", COMPANION)
    base.tensors.update(added)
    base.files.extend(companion.files)
    for name in ("nextn_predict_layers", "block_count"):
        full = f"{base.metadata.get(key)}.{name}"
        if full in companion.metadata:
            base.metadata[full] = companion.metadata[full]
