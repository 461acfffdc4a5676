"""Reads a Hugging Face folder: config.json and one or several safetensors files.

    file      u64 header bytes | header, a JSON object | data
    header    name -> {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}; offsets count from the
              data's start; "__metadata__" holds text only
    folder    model.safetensors, or the shards that model.safetensors.index.json names

Nothing in a header is believed before it is checked: its length, each range, overlaps, each size against its shape.
Tensors of number types other than BF16, F16 and F32 are refused when something wants to read them, not before.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from q27app.errors import FileFormatError
from q27app.weights.source import (
    MAX_DIMENSION, Source, SourceFile, SourceTensor, float_reader, parse_json_object, read_small_file, refuse_overlaps,
)

MAX_HEADER_BYTES = 16 << 20
MAX_HEADER_VALUES = 500_000
"""Of a header's JSON; a tensor needs six, and the 27B has 1,200 tensors."""
MAX_JSON_BYTES = 16 << 20
MAX_SHARDS = 512
MAX_DIMENSIONS = 8
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
READABLE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
DAMAGED = "The file is damaged; download it again."


def open_safetensors_folder(path: str | Path) -> Source:
    """metadata: config.json as it stands; tensors: every tensor of every shard under its Hugging Face name.

    Raises FileFormatError; on success the caller closes the source.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileFormatError(f"{folder} is not a folder.",
                              "Give the folder that holds config.json and model.safetensors.")
    if not (folder / "config.json").exists():
        raise FileFormatError(f"{folder} holds no config.json.",
                              "Give the folder of a Hugging Face model, with config.json, its safetensors and its tokenizer.")
    config = parse_json_object(read_small_file(folder / "config.json", MAX_JSON_BYTES), f"{folder / 'config.json'}")
    placed = _shards(folder)
    source = Source(folder, config, {})
    try:
        for shard, names in placed.items():
            file = SourceFile(folder / shard)
            source.files.append(file)
            _add_tensors(source, file, read_header(file), names)
    except BaseException:
        source.close()
        raise
    return source


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index places in it; None: whatever the file holds."""
    index = folder / INDEX_NAME
    if not index.exists():
        if not (folder / SINGLE_NAME).exists():
            raise FileFormatError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.",
                                  "Give a Hugging Face checkpoint folder, or a GGUF file.")
        return {SINGLE_NAME: None}
    placement = parse_json_object(read_small_file(index, MAX_JSON_BYTES), str(index)).get("weight_map")
    if not isinstance(placement, dict) or not placement:
        raise FileFormatError(f"{index}: weight_map is not an object with entries.", DAMAGED)
    shards: dict[str, set[str]] = {}
    for name, shard in placement.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise FileFormatError(
                f"{index}: weight_map places {name[:100]} in {str(shard)[:100]!r}, expected the plain name "
                "of a .safetensors file in the same folder.")
        shards.setdefault(shard, set()).add(name)
    if len(shards) > MAX_SHARDS:
        raise FileFormatError(f"{index} names {len(shards)} files, expected at most {MAX_SHARDS}.")
    return dict(sorted(shards.items()))


def _is_plain_name(shard: str) -> bool:
    return (shard.endswith(".safetensors") and not shard.startswith(".") and len(shard) <= 255
            and not any(mark in shard for mark in ("/", "\\", "\0", ":")))


def read_header(file: SourceFile) -> tuple[dict[str, Any], int]:
    """The header's object and the byte at which the data begin."""
    if file.size < 8:
        raise FileFormatError(f"{file.path} has {file.size} bytes, too few for a safetensors file.", DAMAGED)
    length = int(file.read(0, 8).view("<u8")[0])
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        raise FileFormatError(
            f"{file.path}: the header claims {length} bytes; the file has {file.size}, at most {MAX_HEADER_BYTES}.",
            DAMAGED,
        )
    return parse_json_object(file.read(8, length).tobytes(), f"{file.path}: the header", MAX_HEADER_VALUES), 8 + length


def _add_tensors(source: Source, file: SourceFile, header: tuple[dict[str, Any], int], names: set[str] | None) -> None:
    entries, data_start = header
    entries.pop("__metadata__", None)
    missing = sorted((names or set()) - entries.keys())
    if missing:
        raise FileFormatError(f"{file.path}: tensor {missing[0][:200]} is missing, though {INDEX_NAME} places it here.",
                              "Download the checkpoint again.")
    spans = []
    for name, entry in entries.items():
        kind, shape, begin, end = _checked_entry(file, name, entry, file.size - data_start)
        spans.append((data_start + begin, data_start + end, name))
        if names is not None and name not in names:
            continue
        if name in source.tensors:
            raise FileFormatError(f"{file.path}: tensor {name[:200]} also stands in another shard.")
        source.tensors[name] = _tensor(file, name, kind, shape, data_start + begin, end - begin)
    refuse_overlaps(file, spans)


def _checked_entry(file: SourceFile, name: str, entry: Any, data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    def refuse(what: str) -> FileFormatError:
        return FileFormatError(f"{file.path}: tensor {name[:200]} {what}.", DAMAGED)

    fields = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    kind, shape, offsets = fields
    if not isinstance(kind, str) or not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise refuse("has no dtype, shape and data_offsets of the expected kind")
    if len(shape) > MAX_DIMENSIONS:
        raise refuse(f"has {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    if prod(shape) > MAX_DIMENSION or max(shape, default=0) > MAX_DIMENSION:
        raise refuse(f"has the impossible shape {str(shape)[:100]}")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise refuse(f"claims bytes {begin} to {end} of {data_bytes} data bytes")
    itemsize = READABLE_BYTES.get(kind)
    if itemsize is not None and end - begin != prod(shape) * itemsize:
        raise refuse(f"is {kind} {shape} and claims {end - begin} bytes, expected {prod(shape) * itemsize}")
    return kind, tuple(shape), begin, end


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _tensor(file: SourceFile, name: str, kind: str, shape: tuple[int, ...], offset: int, nbytes: int) -> SourceTensor:
    if kind in READABLE_BYTES:
        cols = prod(shape[1:]) if len(shape) > 1 else prod(shape)
        return SourceTensor(name, shape, nbytes, float_reader(file, offset, kind, cols))

    def refuse(start: int, stop: int) -> np.ndarray:
        raise FileFormatError(f"{file.path}: tensor {name} has the number type {kind[:50]}, expected BF16, F16 or F32.",
                              "Give the checkpoint's unquantised release.")

    return SourceTensor(name, shape, nbytes, refuse)
