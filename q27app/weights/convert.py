"""Hugging Face folder or GGUF -> `.q27`: plan everything, then stream.

The plan (names, shapes, formats, room on the disk) is checked before the first byte is written. Then pieces of rows
go through a few threads (read, transform, encode, measure the error) and to the writer in file order; a bounded
number is on its way, so memory does not grow with the checkpoint. An error or an interruption leaves no file behind.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from q27app.errors import FileFormatError, UsageError
from q27app.weights.codecs import BLOCK_WEIGHTS, decode, encode
from q27app.weights.dtypes import F32, DType
from q27app.weights.gguf_file import merge_companion, open_gguf
from q27app.weights.hf_config import ARCHITECTURE
from q27app.weights.names import translate_gguf, translate_huggingface
from q27app.weights.safetensors import open_safetensors_folder
from q27app.weights.source import Source, SourceTensor
from q27app.weights.tiers import DRAFT_HEAD, TierPlan, tier_entries
from q27app.weights.writer import TensorEntry, Writer

PIECE_WEIGHTS = 1 << 20
"""Weights of one piece of work: 4 MiB of float32, so that a core's passes run in its cache."""

MAX_THREADS = 8
FORMAT_VERSION = 1

Progress = Callable[[int, int, str], None]
"""progress(source bytes done, source bytes in all, name of the tensor)."""


@dataclass(frozen=True)
class TensorReport:
    """One written tensor. error: rms of (stored - source) over rms of source; 0 where nothing is lost."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. source_bytes: read from the source (the head twice where a copy is made)."""

    path: Path
    tier: str
    generation: str
    num_weights: int
    source_bytes: int
    file_bytes: int
    seconds: float
    tensors: tuple[TensorReport, ...]

    def worst(self, count: int = 10) -> list[TensorReport]:
        """The tensors with the largest relative error, the worst first."""
        return sorted(self.tensors, key=lambda tensor: (-tensor.error, tensor.name))[:count]


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], tier: str,
    mtp: str | os.PathLike[str] | None = None, progress: Progress | None = None,
    generation: str | None = None, overwrite: bool = False,
) -> ConvertReport:
    """Write `destination` from a Hugging Face folder or a GGUF file.

    mtp: a GGUF with the draft layer, for a GGUF without. generation: "3.6" or "3.8", which chooses the tier's recipe;
    None takes it from the model's name. Raises UsageError (tier, generation, destination exists), FileFormatError and
    ModelError (source), Q27Error (disk).
    """
    start = time.monotonic()
    with open_source(Path(source), Path(mtp) if mtp is not None else None) as opened:
        translate = translate_huggingface if Path(source).is_dir() else translate_gguf
        metadata, tensors = translate(opened)
        generation = generation or generation_of(str(metadata.get("general.name", "")))
        mtp_index = draft_block(metadata)
        plan = tier_entries(tier, generation, {name: tensor.shape for name, tensor in tensors.items()}, mtp_index)
        if plan.draft_head_source is not None:
            tensors[DRAFT_HEAD] = tensors[plan.draft_head_source]
        entries = [TensorEntry(name, dtype, tensors[name].shape) for name, dtype in plan.dtypes.items()]
        metadata |= tier_metadata(plan, generation, metadata)
        with Writer(destination, metadata, entries, overwrite) as writer:
            reports = _stream(writer, entries, tensors, progress)
            file_bytes = writer.file_bytes
    return ConvertReport(
        Path(destination), tier, generation, sum(tensors[entry.name].rows * entry.cols for entry in entries),
        sum(tensors[entry.name].nbytes for entry in entries), file_bytes, time.monotonic() - start, tuple(reports),
    )


def open_source(source: Path, mtp: Path | None) -> Source:
    """A folder is Hugging Face's, a file is GGUF; `mtp` is merged into the latter."""
    if source.is_dir():
        if mtp is not None:
            raise UsageError(
                f"--mtp {mtp} goes with a GGUF; {source} is a folder, whose draft layer is in its own files.")
        return open_safetensors_folder(source)
    if source.suffix == ".safetensors":
        raise UsageError(f"{source} is one file of a checkpoint.", f"Give its folder: {source.parent}")
    opened = open_gguf(source)
    try:
        if mtp is not None:
            companion = open_gguf(mtp)
            try:
                merge_companion(opened, companion)
            except BaseException:
                companion.close()
                raise
    except BaseException:
        opened.close()
        raise
    return opened


def generation_of(name: str) -> str:
    """"3.8" if the letters and digits of the model's name contain qwen38, else "3.6"."""
    return "3.8" if "qwen38" in "".join(mark for mark in name.lower() if mark.isalnum()) else "3.6"


def draft_block(metadata: Mapping[str, Any]) -> int | None:
    """Index of the draft layer's block, None without one."""
    if not metadata.get(f"{ARCHITECTURE}.nextn_predict_layers"):
        return None
    return metadata[f"{ARCHITECTURE}.block_count"] - 1


def tier_metadata(plan: TierPlan, generation: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say how a `.q27` was quantised and which blocks are of which kind (the draft layer is
    attention)."""
    recurrent = metadata[f"{ARCHITECTURE}.attention.recurrent_layers"]
    return {
        "q27_version": FORMAT_VERSION, "quant_policy": plan.tier.name, "group_q4": 64, "group_q8": 128,
        "nibble_order": "even=low", "q8_extra": plan.tier.promotion, "q4_head": plan.tier.one_head,
        "attn_layers": [index for index, flag in enumerate(recurrent) if not flag],
        "ssm_layers": [index for index, flag in enumerate(recurrent) if flag],
        "q27app.tier": plan.tier.name, "q27app.generation": generation,
    }


@dataclass(frozen=True)
class _Piece:
    """Rows start..stop of a tensor, encoded. lost, total: sums of squares of the error and of the source."""

    data: np.ndarray
    scales: np.ndarray | None
    lost: float
    total: float


def _stream(
    writer: Writer, entries: list[TensorEntry], tensors: Mapping[str, SourceTensor], progress: Progress | None
) -> list[TensorReport]:
    """Encode and write every entry; the reports in the same order."""
    _keep_freed_memory()
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    all_bytes, done = sum(tensors[entry.name].nbytes for entry in entries), 0.0
    sums = {entry.name: [0.0, 0.0] for entry in entries}
    waiting: deque[tuple[TensorEntry, int, Future[_Piece]]] = deque()
    work = _pieces(entries)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    try:
        while True:
            while len(waiting) < 3 * threads and (piece := next(work, None)) is not None:
                entry, start, stop = piece
                waiting.append((entry, stop - start, pool.submit(_encode, tensors[entry.name], entry, start, stop)))
            if not waiting:
                break
            entry, rows, future = waiting.popleft()
            result = future.result()
            writer.write(entry.name, result.data, result.scales)
            sums[entry.name][0] += result.lost
            sums[entry.name][1] += result.total
            done += tensors[entry.name].nbytes * rows / entry.rows
            if progress is not None:
                progress(round(done), all_bytes, entry.name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [TensorReport(entry.name, entry.dtype.name, entry.shape, _relative(*sums[entry.name])) for entry in entries]


def _pieces(entries: list[TensorEntry]) -> Iterator[tuple[TensorEntry, int, int]]:
    for entry in entries:
        step = max(1, PIECE_WEIGHTS // entry.cols)
        for start in range(0, entry.rows, step):
            yield entry, start, min(start + step, entry.rows)


def _encode(tensor: SourceTensor, entry: TensorEntry, start: int, stop: int) -> _Piece:
    values = tensor.read(start, stop)
    try:
        data, scales = encode(values, entry.dtype, entry.name, threads=1)
    except FileFormatError as problem:
        where = f"rows {start} to {stop - 1} of the source's {tensor.name}"
        raise FileFormatError(f"{problem.message} ({where})", problem.hint) from None
    lost, total = _error(values, entry.dtype, data, scales)
    return _Piece(data, scales, lost, total)


def _error(values: np.ndarray, dtype: DType, data: np.ndarray, scales: np.ndarray | None) -> tuple[float, float]:
    """Sums of squares of (stored - values) and of values."""
    if dtype is F32:
        return 0.0, 1.0
    lost = total = 0.0
    step = max(1, BLOCK_WEIGHTS // values.shape[1])
    for first in range(0, len(values), step):
        rows = slice(first, first + step)
        flat = values[rows].reshape(-1)
        difference = decode(dtype, data[rows], None if scales is None else scales[rows], values.shape[1]).reshape(-1)
        np.subtract(difference, flat, out=difference)
        lost += float(np.dot(difference, difference))
        total += float(np.dot(flat, flat))
    return lost, total


def _keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 64 MiB a thread, and not return it to the system after each piece.

    glibc raises its thresholds to the size of the largest mapped block that was freed. Without this every piece's
    arrays are fresh pages, and their faults cost as much as the arithmetic.
    """
    np.empty(31 << 20, np.uint8)


def _relative(lost: float, total: float) -> float:
    return sqrt(lost / total) if total > 0 else 0.0
