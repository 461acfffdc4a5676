"""Reads a `.q27` file: metadata and named arrays over a read-only memory map. `writer` writes the same layout.

The file, version 1, little endian (`pad` = zeros up to the next multiple of 256 from the file's start):

    u32 magic 0x46373251 ("Q27F"), u32 version, u32 number of tensors, u32 length of the metadata
    metadata: a JSON object in UTF-8
    tensor table, a record for each tensor:
        u16 length of the name, name; u8 format code (`dtypes`); u8 number of dimensions; u64 for each, columns last;
        u64 data offset, u64 data size, u64 scale offset, u64 scale size    offsets count from the data section
    pad; data section: for each tensor its data, pad, and where the format has scales the scales, pad

A format without scales has scale offset and size 0. Offsets are multiples of 256, blobs do not overlap, and the file
ends with the last blob or its pad. The metadata that `writer` writes ends with the key CHECKSUM_KEY, the SHA-256 of
everything before the data section with the 64 digits themselves taken as zeros; where the key is there it must be
right.

Nothing a file says about itself is believed before it is compared with the file's size, so memory stays below a small
multiple of the header. Every defect is a `FileFormatError` with the file, the tensor, what was found and what was
expected. The arrays are views of the map: they stay valid after `close` as long as somebody holds them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from q27app.errors import FileFormatError, why
from q27app.weights.codecs import decode, first_not_finite
from q27app.weights.dtypes import DTYPES_BY_CODE, F16, F32, DType, require_readable, row_bytes, scales_per_row
from q27app.weights.metadata import MAX_METADATA_BYTES, parse_metadata

MAGIC = 0x46373251
VERSION = 1
ALIGNMENT = 256
HEADER = struct.Struct("<IIII")
CHECKSUM_KEY = "q27app.header_sha256"
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 256
SHORTEST_RECORD = 2 + 1 + 2 + 8 + 32

_DAMAGED = "The file is damaged or incomplete; download or convert it again."


@dataclass(frozen=True, eq=False)
class Tensor:
    """One named array in its stored form.

    shape: (cols,) or (rows, cols). data: uint8 [rows, row_bytes], read-only. scales: float16 [rows, groups] or None.
    source: the file's name, for errors.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: np.ndarray
    scales: np.ndarray | None = None
    source: str = ""

    @property
    def rows(self) -> int:
        """1 for a one-dimensional tensor."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def values(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start..stop as float32 [rows, cols]; a one-dimensional tensor gives all of its [cols].

        FileFormatError: a scale or an unquantised value that is not finite.
        """
        if len(self.shape) == 1:
            start, stop = 0, 1
        scales = None if self.scales is None else self.scales[start:stop]
        data = self.data[start:stop]
        self._refuse_not_finite(data, scales, start)
        where = f"{self.source}: {self.name}" if self.source else self.name
        values = decode(self.dtype, data, scales, self.cols, where)
        return values if len(self.shape) == 2 else values.reshape(-1)

    def check_scales(self) -> None:
        """FileFormatError if a scale, or a value of F32 and F16, is not finite. Reads nothing else."""
        self._refuse_not_finite(self.data, self.scales, 0)

    def _refuse_not_finite(self, data: np.ndarray, scales: np.ndarray | None, start: int) -> None:
        stored = scales
        if self.dtype in (F32, F16):
            stored = data.view(np.float32 if self.dtype is F32 else np.float16)
        bad = first_not_finite(stored) if stored is not None else None
        if bad is not None:
            row, col = bad
            kind = "value" if scales is None else "scale"
            raise FileFormatError(
                f"{self.source or 'tensor'}: {self.name}: {kind} {col} of row {start + row} is {stored[row, col]}; "
                "expected a finite number.",
                _DAMAGED,
            )


class Container:
    """An open `.q27` file: `path`, `metadata` (without the checksum) and `tensors` by name in file order.

    A context manager; `close` drops the tensors and unmaps the file as soon as no array refers to it.
    """

    def __init__(
        self, path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor], mapping: mmap.mmap | None = None
    ):
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._mapping = mapping
        self.file_bytes = len(mapping) if mapping is not None else 0

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.tensors = {}
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                pass  # arrays still refer to it; the last of them unmaps it

    def check_scales(self) -> None:
        """FileFormatError naming the first tensor with a scale or an unquantised value that is not finite.

        Reads the scales (3% of a Q4 file) and the F32 and F16 tensors.
        """
        for tensor in self.tensors.values():
            tensor.check_scales()


@dataclass(frozen=True)
class _Record:
    """One line of the tensor table, checked by itself: sizes agree with format and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: range
    scales: range


def open_container(path: str | os.PathLike[str]) -> Container:
    """Map `path` and check everything that does not need the data. FileFormatError says what is wrong with it."""
    path = Path(path)
    mapping = _map(path)
    try:
        metadata, records, data_start = _read_header(mapping, str(path))
    except BaseException:
        mapping.close()
        raise
    file = np.frombuffer(mapping, np.uint8)
    tensors = {}
    for record in records:
        rows = record.shape[0] if len(record.shape) == 2 else 1
        data = file[data_start + record.data.start : data_start + record.data.stop].reshape(rows, -1)
        scales = None
        if record.scales:
            scales = (
                file[data_start + record.scales.start : data_start + record.scales.stop].view("<f2").reshape(rows, -1)
            )
        tensors[record.name] = Tensor(record.name, record.dtype, record.shape, data, scales, path.name)
    del file
    return Container(path, metadata, tensors, mapping)


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileFormatError(f"{path} is not a regular file; expected a .q27 model file.")
        if status.st_size < HEADER.size:
            raise FileFormatError(f"{path}: {status.st_size} bytes; a .q27 header alone has {HEADER.size}.", _DAMAGED)
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist; expected a .q27 model file.") from None
    except (OSError, ValueError) as problem:
        raise FileFormatError(f"{path} cannot be opened: {why(problem)}.") from problem


def _read_header(mapping: mmap.mmap, file: str) -> tuple[dict[str, Any], list[_Record], int]:
    """Metadata, checked records and the offset of the data section."""
    magic, version, num_tensors, metadata_bytes = HEADER.unpack_from(mapping)
    if magic != MAGIC:
        raise FileFormatError(
            f"{file}: starts with {bytes(mapping[:4])!r}, expected b'Q27F'; this is not a .q27 file.",
            "Convert other formats first: q27app convert SOURCE DESTINATION --tier q4s",
        )
    if version != VERSION:
        raise FileFormatError(f"{file}: .q27 version {version}, expected {VERSION}.", "A newer q27app may read it.")
    size = len(mapping)
    table_start = HEADER.size + metadata_bytes
    if metadata_bytes > MAX_METADATA_BYTES or table_start > size:
        limit = min(MAX_METADATA_BYTES, size - HEADER.size)
        raise FileFormatError(
            f"{file}: the header announces {metadata_bytes} bytes of metadata, at most {limit} are possible.", _DAMAGED
        )
    room = (size - table_start) // SHORTEST_RECORD
    if not 1 <= num_tensors <= min(MAX_TENSORS, room):
        raise FileFormatError(
            f"{file}: the header announces {num_tensors} tensors, expected 1 to {min(MAX_TENSORS, room)} "
            f"({size - table_start} bytes are left for them).",
            _DAMAGED,
        )
    text = mapping[HEADER.size : table_start]
    metadata = parse_metadata(text, file)
    records, table_end = _read_table(mapping, table_start, num_tensors, file)
    data_start = table_end + -table_end % ALIGNMENT
    _check_layout(records, data_start, size, file)
    digest = metadata.pop(CHECKSUM_KEY, None)
    if digest is not None and digest != header_checksum(mapping[:data_start], table_start):
        raise FileFormatError(
            f"{file}: the header's checksum does not match its content ({CHECKSUM_KEY} is {digest!r}).", _DAMAGED
        )
    return metadata, records, data_start


def header_checksum(header: bytes, table_start: int) -> str:
    """SHA-256, in hex, of everything before the data section, its own digits at the metadata's end taken as zeros."""
    digits = slice(table_start - 2 - 64, table_start - 2)
    blank = bytearray(header)
    blank[digits] = b"0" * len(blank[digits])
    return hashlib.sha256(blank).hexdigest()


def _read_table(mapping: mmap.mmap, start: int, count: int, file: str) -> tuple[list[_Record], int]:
    records: list[_Record] = []
    names: set[str] = set()
    for index in range(count):
        previous = f"after {records[-1].name}" if records else "first"
        record, start = _read_record(mapping, start, f"{file}: tensor {index} ({previous})", file)
        if record.name in names:
            raise FileFormatError(
                f"{file}: {record.name} occurs twice in the tensor table, expected unique names.", _DAMAGED
            )
        names.add(record.name)
        records.append(record)
    return records, start


def _read_record(mapping: mmap.mmap, start: int, where: str, file: str) -> tuple[_Record, int]:
    """The record at `start` and the offset after it."""

    def take(layout: str) -> tuple[int, ...]:
        nonlocal start
        end = start + struct.calcsize(layout)
        if end > len(mapping):
            raise FileFormatError(
                f"{where}: the file ends at {len(mapping)} inside the tensor table, expected at least {end} bytes.",
                _DAMAGED,
            )
        values = struct.unpack_from(layout, mapping, start)
        start = end
        return values

    (name_bytes,) = take("<H")
    if not 1 <= name_bytes <= MAX_NAME_BYTES:
        raise FileFormatError(f"{where}: its name has {name_bytes} bytes, expected 1 to {MAX_NAME_BYTES}.", _DAMAGED)
    (raw,) = take(f"<{name_bytes}s")
    try:
        name = bytes(raw).decode("utf-8")  # type: ignore[arg-type]
    except UnicodeDecodeError:
        raise FileFormatError(f"{where}: its name {raw!r} is not UTF-8.", _DAMAGED) from None
    if not name.isprintable():
        raise FileFormatError(f"{where}: its name {name!r} has characters that cannot be printed.", _DAMAGED)
    where = f"{file}: {name}"
    code, num_dims = take("<BB")
    if code not in DTYPES_BY_CODE:
        raise FileFormatError(f"{where}: format code {code}, expected 0 to {max(DTYPES_BY_CODE)}.", _DAMAGED)
    dtype = DTYPES_BY_CODE[code]
    require_readable(dtype, where)
    if num_dims not in (1, 2):
        raise FileFormatError(f"{where}: {num_dims} dimensions, expected 1 or 2.", _DAMAGED)
    shape = take(f"<{num_dims}Q")
    sizes = take("<QQQQ")
    return _check_record(name, dtype, shape, sizes, where), start


def _check_record(name: str, dtype: DType, shape: tuple[int, ...], sizes: tuple[int, ...], where: str) -> _Record:
    """Compare a record's sizes with its format and shape; Python's integers cannot overflow."""
    if 0 in shape:
        raise FileFormatError(f"{where}: shape {list(shape)}, expected dimensions of at least 1.", _DAMAGED)
    if dtype.group and len(shape) != 2:
        raise FileFormatError(f"{where}: {dtype.name} with shape {list(shape)}, expected [rows, cols].", _DAMAGED)
    rows, cols = (shape[0] if len(shape) == 2 else 1), shape[-1]
    try:
        data_bytes, scale_bytes = rows * row_bytes(dtype, cols), rows * scales_per_row(dtype, cols) * dtype.scale_bytes
    except FileFormatError as problem:
        raise FileFormatError(f"{where} {list(shape)}: {problem.message}", _DAMAGED) from None
    data_offset, data_size, scale_offset, scale_size = sizes
    for kind, found, expected in (("data", data_size, data_bytes), ("scales", scale_size, scale_bytes)):
        if found != expected:
            raise FileFormatError(
                f"{where}: {found} bytes of {kind}, expected {expected} for {dtype.name} {list(shape)}.", _DAMAGED
            )
    if bool(scale_offset) != bool(dtype.group):
        expected_offset = "a multiple of 256 above 0" if dtype.group else "0 (the format has no scales)"
        raise FileFormatError(f"{where}: scale offset {scale_offset}, expected {expected_offset}.", _DAMAGED)
    for kind, offset in (("data", data_offset), ("scale", scale_offset)):
        if offset % ALIGNMENT:
            raise FileFormatError(f"{where}: {kind} offset {offset}, expected a multiple of {ALIGNMENT}.", _DAMAGED)
    data, scales = (data_offset, data_offset + data_size), (scale_offset, scale_offset + scale_size)
    for kind, (_, end) in (("data", data), ("scales", scales)):
        if end > 0xFFFFFFFFFFFFFFFF:
            raise FileFormatError(f"{where}: its {kind} end at {end}, beyond 64 bits.", _DAMAGED)
    return _Record(name, dtype, shape, range(*data), range(*scales))


def _check_layout(records: list[_Record], data_start: int, size: int, file: str) -> None:
    """Blobs lie inside the file, do not overlap, and the file ends with the last."""
    blobs = sorted(_blobs(records))
    room = max(0, size - data_start)
    for (_, end, name), (offset, _, other) in zip(blobs, blobs[1:]):
        if offset < end:
            raise FileFormatError(
                f"{file}: {name} ends at {end}, but {other} starts at {offset}; expected no overlap.", _DAMAGED
            )
    for _, end, name in blobs:
        if end > room:
            raise FileFormatError(
                f"{file}: {name} ends at {end} of the data section, which has {room} bytes.", _DAMAGED
            )
    end = data_start + blobs[-1][1]
    padded = end + -end % ALIGNMENT
    if size not in (end, padded):
        raise FileFormatError(
            f"{file}: {size} bytes, but the last tensor ends at {end} (padded {padded}); expected nothing after it.",
            _DAMAGED,
        )


def _blobs(records: list[_Record]) -> Iterator[tuple[int, int, str]]:
    for record in records:
        yield record.data.start, record.data.stop, f"the data of {record.name}"
        if record.scales:
            yield record.scales.start, record.scales.stop, f"the scales of {record.name}"
