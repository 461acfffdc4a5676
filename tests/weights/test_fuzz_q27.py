"""Damaged .q27 files, seeded: truncated, bit-flipped, lying about a size: a clear refusal or a good load."""

from __future__ import annotations

import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import pytest

from q27app.errors import FileFormatError
from q27app.weights.codecs import encode
from q27app.weights.container import open_container
from q27app.weights.dtypes import B1_G128, F16, F32, Q4_G64, Q8_G128, T2_G128
from q27app.weights.writer import TensorEntry, Writer

SEED = 20270
NUM_LONG_CASES = 4000
MAX_SECONDS = 10
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Good:
    """An undamaged file and its parts. lengths: offset and format of every number that states a size or a place."""

    content: bytes
    metadata: range
    table: range
    blobs: tuple[range, ...]
    lengths: tuple[tuple[int, str], ...]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    path = tmp_path_factory.mktemp("good") / "good.q27"
    values = np.random.default_rng(SEED).standard_normal((24, 256)).astype(np.float32)
    entries = [
        TensorEntry(f"blk.0.{dtype.name.lower()}.weight", dtype, values.shape)
        for dtype in (F32, F16, Q8_G128, Q4_G64, T2_G128, B1_G128)
    ]
    entries.append(TensorEntry("output_norm.weight", F32, (256,)))
    metadata = {
        "general.name": "fuzz",
        "qwen35.block_count": 1,
        "qwen35.rope.freq_base": 1e7,
        "attn_layers": [3, 7],
        "tokenizer.huggingface.json": '{"model": {"vocab": {"é": 0}}}',
        "quant_policy": None,
    }
    with Writer(path, metadata, entries) as writer:
        for entry in entries:
            writer.write(entry.name, *encode(values if len(entry.shape) == 2 else values[:1], entry.dtype))
    return locate(path.read_bytes(), entries)


def locate(content: bytes, entries: list[TensorEntry]) -> Good:
    table = 16 + struct.unpack_from("<I", content, 12)[0]
    position = table
    lengths = [(8, "<I"), (12, "<I")]
    for entry in entries:
        dims = position + 2 + len(entry.name) + 2
        lengths += [(position, "<H"), (dims - 1, "<B"), (dims - 2, "<B")]
        numbers = len(entry.shape) + 4
        lengths += [(dims + 8 * index, "<Q") for index in range(numbers)]
        position = dims + 8 * numbers
    start = position + -position % 256
    blobs = []
    for entry in entries:
        for size in filter(None, (entry.data_bytes, entry.scale_bytes)):
            blobs.append(range(start, start + size))
            start += size + -size % 256
    assert start == len(content)
    return Good(content, range(16, table), range(table, position), tuple(blobs), tuple(lengths))


def use(path: Path) -> str:
    """Open `path` and read every value: "loaded", or "refused" with a FileFormatError. Nothing else may happen."""
    started = process_time()
    try:
        with open_container(path) as container:
            try:
                container.check_scales()
                for tensor in container.tensors.values():
                    assert np.isfinite(tensor.values()).all()
            except FileFormatError as problem:
                assert problem.message.startswith(path.name)
                return "refused values"
        return "loaded"
    except FileFormatError as problem:
        assert str(path) in problem.message and "Traceback" not in problem.message
        return "refused"
    finally:
        assert process_time() - started < MAX_SECONDS


def damage(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "damaged.q27"
    path.write_bytes(content)
    return use(path)


def flipped(content: bytes, position: int, bit: int) -> bytes:
    result = bytearray(content)
    result[position] ^= 1 << bit
    return bytes(result)


def generator(purpose: int) -> np.random.Generator:
    """One stream for each test, so that tests run alone and in any order."""
    return np.random.default_rng([SEED, purpose])


def test_the_undamaged_file_loads(good, tmp_path):
    assert damage(tmp_path, good.content) == "loaded"


def test_every_truncation_is_refused(good, tmp_path):
    rng = generator(1)
    ends = sorted({0, 1, 15, 16, good.table.start, good.table.stop, *rng.integers(0, good.blobs[-1].stop, 60).tolist()})
    outcomes = {end: damage(tmp_path, good.content[:end]) for end in ends}
    assert {end for end, outcome in outcomes.items() if outcome != "refused"} == set()


def test_every_flip_in_header_metadata_and_table_is_refused(good, tmp_path):
    rng = generator(2)
    key = good.content.index(b"q27app.header_sha256")
    outcomes = {}
    for position in rng.integers(0, good.table.stop, 80).tolist():
        if position not in range(
            key, key + 20
        ):  # the checksum's own name: without it the rest stays readable, and is intact
            bit = int(rng.integers(8))
            outcomes[position, bit] = damage(tmp_path, flipped(good.content, position, bit))
    assert {case for case, outcome in outcomes.items() if outcome != "refused"} == set()
    assert len(outcomes) > 60


def test_every_lie_about_a_size_is_refused(good, tmp_path):
    rng = generator(3)
    outcomes = {}
    for _ in range(60):
        offset, layout = good.lengths[rng.integers(len(good.lengths))]
        top = 256 ** struct.calcsize(layout) - 1
        old = struct.unpack_from(layout, good.content, offset)[0]
        lie = int(rng.choice([0, 1, old + 1, old + 256, old * 2 + 2, top // 2, top // 256 * 256, top])) & top
        if lie != old:
            lying = bytearray(good.content)
            struct.pack_into(layout, lying, offset, lie)
            outcomes[offset, lie] = damage(tmp_path, bytes(lying))
    assert {case for case, outcome in outcomes.items() if outcome != "refused"} == set()
    assert len(outcomes) > 40


def test_flips_in_data_load_or_are_refused_by_tensor(good, tmp_path):
    rng = generator(4)
    outcomes = []
    for _ in range(40):
        blob = good.blobs[rng.integers(len(good.blobs))]
        position = int(rng.integers(blob.start, blob.stop))
        outcomes.append(damage(tmp_path, flipped(good.content, position, int(rng.integers(8)))))
    assert set(outcomes) <= {"loaded", "refused values"}
    assert "loaded" in outcomes


def test_a_scale_turned_infinite_is_refused_by_tensor(good, tmp_path):
    content = bytearray(good.content)
    scales = good.blobs[3]
    content[scales.start : scales.start + 2] = b"\0\x7c"
    assert damage(tmp_path, bytes(content)) == "refused values"


@pytest.mark.parametrize(
    "metadata",
    [
        b'{"a":' + b"[" * 400_000 + b"]" * 400_000 + b"}",
        b'{"a":' + b'{"b":' * 200_000 + b"0" + b"}" * 200_000 + b"}",
        b'{"a":[' + b"[]," * 200_000 + b"0]}",
        b'{"a":' + b"1" * (1 << 20) + b"}",
    ],
    ids=["deep arrays", "deep objects", "many arrays", "long number"],
)
def test_hostile_metadata_is_loaded_or_refused(tmp_path, metadata):
    assert open_with_metadata(tmp_path, metadata) in ("loaded", "refused")


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"a":"' + "\U0001f600".encode() + b"x" * (40 << 20) + b'"}',
        lambda: b"{" + b",".join(b'"%x":{}' % index for index in range(990_000)) + b"}",
        lambda: b"{" + b",".join(b'"%x":0' % index for index in range(1_990_000)) + b"}",
        lambda: b" " * (47 << 20) + b"{}",
    ],
    ids=["long string", "objects by key", "numbers by key", "blank"],
)
def test_the_largest_hostile_metadata_stays_within_time_and_memory(tmp_path, make):
    assert open_with_metadata(tmp_path, make()) in ("loaded", "refused")


def open_with_metadata(tmp_path: Path, metadata: bytes) -> str:
    path = tmp_path / "hostile.q27"
    table = b"\x01\0v\0\x01" + struct.pack("<QQQQQ", 1, 0, 4, 0, 0)
    header = b"Q27F" + struct.pack("<III", 1, 1, len(metadata)) + metadata + table
    path.write_bytes(header + b"\0" * (-len(header) % 256) + b"\0" * 256)
    return use_bounded(path)


def test_lying_lengths_over_a_large_sparse_file_need_no_memory(tmp_path):
    path = tmp_path / "sparse.q27"
    rng = generator(5)
    for _ in range(10):
        with open(path, "wb") as file:
            count, length = (int(number) for number in rng.integers(0, 2**32, 2))
            file.write(b"Q27F" + struct.pack("<III", 1, count, length))
            file.truncate(20 << 30)
        assert use_bounded(path) == "refused"


def use_bounded(path: Path) -> str:
    """`use` in a child whose address space may grow by MAX_BYTES (and the mapped file): its outcome."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = b"failed"
        try:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = now + MAX_BYTES + path.stat().st_size
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            outcome = use(path).encode()
        except BaseException as problem:  # noqa: BLE001 - reported to the parent
            outcome = repr(problem).encode()[:500]
        finally:
            os.write(writer, outcome)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        outcome = answer.read().decode()
    os.waitpid(child, 0)
    return outcome


@pytest.mark.long
def test_thousands_of_damaged_files(good, tmp_path, long_scale):
    rng = generator(6)
    key = good.content.index(b"q27app.header_sha256")
    for case in range(int(NUM_LONG_CASES * long_scale)):
        content = good.content
        for _ in range(int(rng.integers(1, 4))):
            position = int(rng.integers(len(content)))
            content = flipped(content, position, int(rng.integers(8)))
        if rng.random() < 0.3:
            content = content[: int(rng.integers(len(content)))]
        intact = (
            content[:key] == good.content[:key]
            and content[key + 20 : good.table.stop] == good.content[key + 20 : good.table.stop]
        )
        outcome = damage(tmp_path, content)
        allowed = ("loaded", "refused", "refused values") if intact else ("refused",)
        assert outcome in allowed, f"seed {SEED}, case {case}"
