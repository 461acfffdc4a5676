"""The .q27 reader: a file packed by hand reads as it should, and each single lie is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from q27app.errors import EXIT_FILE, FileFormatError
from q27app.weights.codecs import encode
from q27app.weights.container import Tensor, open_container
from q27app.weights.dtypes import F16, F32, Q4_G64, T2_G128

PAD = 256


@dataclass
class Raw:
    """A tensor record as it stands in the file, every field free to lie."""

    name: bytes
    code: int
    shape: tuple[int, ...]
    data_offset: int
    data_size: int
    scale_offset: int = 0
    scale_size: int = 0
    num_dims: int | None = None
    name_bytes: int | None = None

    def pack(self) -> bytes:
        dims = len(self.shape) if self.num_dims is None else self.num_dims
        length = len(self.name) if self.name_bytes is None else self.name_bytes
        return (
            struct.pack("<H", length)
            + self.name
            + struct.pack("<BB", self.code, dims)
            + struct.pack(f"<{len(self.shape)}Q", *self.shape)
            + struct.pack("<QQQQ", self.data_offset, self.data_size, self.scale_offset, self.scale_size)
        )


@dataclass
class File:
    """Three tensors: v F32 [5], m F16 [3, 2], q Q4_G64 [2, 64], packed as the format says."""

    magic: int = 0x46373251
    version: int = 1
    num_tensors: int | None = None
    metadata: bytes = b'{"general.name": "x\xc3\xa9", "n": 3}'
    metadata_bytes: int | None = None
    records: list[Raw] = field(
        default_factory=lambda: [
            Raw(b"v", 0, (5,), 0, 20),
            Raw(b"m", 1, (3, 2), 256, 12),
            Raw(b"q", 3, (2, 64), 512, 64, 768, 4),
        ]
    )
    data: bytes = b"".join(
        blob.ljust(PAD, b"\0")
        for blob in (
            np.arange(5, dtype="<f4").tobytes(),
            np.arange(6, dtype="<f2").tobytes(),
            bytes([0x98] * 32 + [0x7F] * 32),
            np.array([0.5, 2], "<f2").tobytes(),
        )
    )

    def pack(self) -> bytes:
        count = len(self.records) if self.num_tensors is None else self.num_tensors
        length = len(self.metadata) if self.metadata_bytes is None else self.metadata_bytes
        header = struct.pack("<IIII", self.magic, self.version, count, length) + self.metadata
        header += b"".join(record.pack() for record in self.records)
        return header + b"\0" * (-len(header) % PAD) + self.data


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.q27"
    path.write_bytes(content)
    return path


def refused(tmp_path: Path, content: bytes, pattern: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(FileFormatError, match=pattern) as caught:
        open_container(path)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == EXIT_FILE


def changed(index: int, **fields) -> File:
    file = File()
    file.records[index] = replace(file.records[index], **fields)
    return file


def test_a_file_packed_by_hand_reads_as_it_was_meant(tmp_path):
    with open_container(written(tmp_path, File().pack())) as container:
        assert container.metadata == {"general.name": "xé", "n": 3}
        assert list(container.tensors) == ["v", "m", "q"]
        v, m, q = container.tensors.values()
        assert (v.dtype, v.shape, v.rows, v.cols, v.nbytes) == (F32, (5,), 1, 5, 20)
        assert (m.dtype, m.shape, m.nbytes) == (F16, (3, 2), 12)
        assert (q.dtype, q.rows, q.cols, q.nbytes) == (Q4_G64, 2, 64, 68)
        assert v.values().tolist() == [0, 1, 2, 3, 4]
        assert m.values(1).tolist() == [[2, 3], [4, 5]]
        # 0x98: low nibble 8 -> 0, high 9 -> 1, times 0.5; 0x7F: low 15 -> 7, high 7 -> -1, times 2
        assert q.values().tolist() == [[0, 0.5] * 32, [14, -2] * 32]
        assert q.values(1, 2).tolist() == [[14, -2] * 32]
        container.check_scales()


def test_the_file_may_end_without_the_last_padding(tmp_path):
    content = File().pack()
    with open_container(written(tmp_path, content[: -(PAD - 4)])) as container:
        assert container.tensors["q"].values()[1, 0] == 14


def test_arrays_are_read_only_and_outlive_the_container(tmp_path):
    container = open_container(written(tmp_path, File().pack()))
    tensor = container.tensors["q"]
    container.close()
    container.close()
    assert tensor.values()[1, 0] == 14
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 1


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        (File(magic=0x46554747), "expected b'Q27F'"),
        (File(version=2), "version 2, expected 1"),
        (File(num_tensors=0), "0 tensors, expected 1 to"),
        (File(num_tensors=0xFFFFFFFF), "4294967295 tensors, expected 1 to"),
        (File(num_tensors=4), "tensor 3 .after q.|the file ends|name has 0 bytes"),
        (File(metadata_bytes=0xFFFFFFFF), "4294967295 bytes of metadata, at most"),
        (File(metadata_bytes=12), "not valid JSON"),
        (File(metadata=b'{"a": "\xff"}'), "not UTF-8"),
        (File(metadata=b"[1, 2]"), "JSON list, expected an object"),
        (File(metadata=b'{"a": 1, "a": 2}'), "'a' occurs twice"),
        (File(metadata=b'{"a": NaN}'), "NaN is not a JSON number"),
        (File(metadata=b'{"a": -Infinity}'), "-Infinity is not a JSON number"),
        (File(metadata=b'{"a": 1e999}'), "1e999 does not fit a double"),
        (File(metadata=b'{"a": "\\ud800"}'), "not valid JSON: .*surrogates"),
        (File(metadata=b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
        (File(metadata=b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
        (File(metadata=b""), "not valid JSON"),
        (File(metadata=b'{"a": 1} '.replace(b" ", b"\0")), "not valid JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, file, pattern):
    refused(tmp_path, file.pack(), pattern)


@pytest.mark.parametrize(
    ("index", "fields", "pattern"),
    [
        (0, {"name_bytes": 0}, "its name has 0 bytes"),
        (0, {"name_bytes": 65535}, "its name has 65535 bytes, expected 1 to 256"),
        (0, {"name": b"\xff"}, "not UTF-8"),
        (0, {"name": b"\n"}, "cannot be printed"),
        (1, {"name": b"v"}, "v occurs twice"),
        (2, {"code": 8}, "q: format code 8, expected 0 to 7"),
        (2, {"code": 5}, "q: T3_G128 tensors are not supported"),
        (2, {"code": 7}, "q: FP4_G16 tensors are not supported"),
        (2, {"num_dims": 0}, "q: 0 dimensions, expected 1 or 2"),
        (2, {"num_dims": 255}, "q: 255 dimensions, expected 1 or 2"),
        (2, {"shape": (2, 3, 64)}, "q: 3 dimensions, expected 1 or 2"),
        (2, {"shape": (64,)}, r"q: Q4_G64 with shape \[64\], expected \[rows, cols\]"),
        (2, {"shape": (0, 64)}, r"q: shape \[0, 64\], expected dimensions of at least 1"),
        (2, {"shape": (2, 72)}, r"q \[2, 72\]: Q4_G64 stores columns in groups of 64; 72"),
        (2, {"shape": (3, 64)}, r"q: 64 bytes of data, expected 96 for Q4_G64 \[3, 64\]"),
        (2, {"shape": (2**63, 2**63 - 64)}, "q: 64 bytes of data, expected"),
        (0, {"shape": (2**62 + 5,)}, "v: 20 bytes of data, expected 18446744073709551636"),
        (2, {"data_size": 63}, "q: 63 bytes of data, expected 64"),
        (2, {"scale_size": 6}, "q: 6 bytes of scales, expected 4"),
        (2, {"scale_offset": 0}, "q: scale offset 0, expected a multiple of 256 above 0"),
        (0, {"scale_offset": 256}, "v: scale offset 256, expected 0"),
        (0, {"scale_size": 4}, "v: 4 bytes of scales, expected 0"),
        (1, {"data_offset": 260}, "m: data offset 260, expected a multiple of 256"),
        (2, {"scale_offset": 772}, "q: scale offset 772, expected a multiple of 256"),
        (1, {"data_offset": 0}, "the data of (v|m) ends at .* but the data of (v|m) starts at 0"),
        (1, {"data_offset": 768}, "the scales of q starts at 768|the data of m starts at 768"),
        (2, {"scale_offset": 1024}, "the scales of q ends at 1028 of the data section, which has 1024"),
        (1, {"data_offset": 2**64 - 256}, "the data of m ends at 18446744073709551372"),
        (2, {"scale_offset": 2**63}, "the scales of q ends at 9223372036854775812"),
    ],
)
def test_a_tensor_record_that_lies_is_refused_by_name(tmp_path, index, fields, pattern):
    refused(tmp_path, changed(index, **fields).pack(), pattern)


def test_an_end_beyond_64_bits_is_refused(tmp_path):
    file = changed(0, shape=(64,), data_size=256, data_offset=2**64 - 256)
    refused(tmp_path, file.pack(), "v: its data end at 18446744073709551616, beyond 64 bits")


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    refused(tmp_path, File().pack() + b"\0" * 256, "expected nothing after it")


@pytest.mark.parametrize("kept", [0, 3, 15, 16, 40, 60, 150, 300, 511, 600, 1027, 1279])
def test_a_truncated_file_is_refused(tmp_path, kept):
    content = File().pack()
    assert len(content) == 512 - 256 + 4 * PAD and content[1024:1028] == np.array([0.5, 2], "<f2").tobytes()
    refused(tmp_path, content[:kept], f"{kept} bytes|announces|ends at|which has")


@pytest.mark.parametrize("announced", [0xFFFFFFF0, 49 << 20])
def test_a_sparse_file_that_announces_too_much_metadata_needs_no_memory(tmp_path, announced):
    path = tmp_path / "sparse.q27"
    with open(path, "wb") as file:
        file.write(struct.pack("<IIII", 0x46373251, 1, 65536, announced))
        file.truncate(64 << 20)
    tracemalloc.start()
    with pytest.raises(FileFormatError, match=f"{announced} bytes of metadata, at most 50331648"):
        open_container(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_metadata_of_too_many_values_is_refused_before_it_is_parsed(tmp_path):
    refused(
        tmp_path,
        File(metadata=b'{"a":[' + b"0," * 2_000_001 + b"0]}").pack(),
        "2000001 commas, expected at most 2000000",
    )
    refused(tmp_path, File(metadata=b'{"a":' + b"[" * 1_000_001).pack(), "1000002 brackets, expected at most 1000000")


@pytest.mark.parametrize(
    ("tensor", "position", "pattern"),
    [
        ("q", 768 + 2, r"model\.q27: q: scale 0 of row 1 is inf"),
        ("v", 3 * 4 + 2, r"model\.q27: v: value 3 of row 0 is inf"),
        ("m", 256 + 3 * 2, r"model\.q27: m: value 1 of row 1 is inf"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_by_name_when_it_is_asked_for(tmp_path, tensor, position, pattern):
    content = bytearray(File().pack())
    position += len(content) - 1024
    content[position : position + 2] = bytes([0x80, 0x7F]) if tensor == "v" else bytes([0x00, 0x7C])
    with open_container(written(tmp_path, bytes(content))) as container:
        with pytest.raises(FileFormatError, match=pattern):
            container.tensors[tensor].values()
        with pytest.raises(FileFormatError, match=pattern):
            container.check_scales()


def test_rows_beside_a_scale_that_is_not_finite_can_be_read():
    scales = np.array([[1.0], [np.nan]], np.float16)
    tensor = Tensor("q", Q4_G64, (2, 64), np.full((2, 32), 0x99, np.uint8), scales)
    assert tensor.values(0, 1).tolist() == [[1.0] * 64]
    with pytest.raises(FileFormatError, match="q: scale 0 of row 1 is nan"):
        tensor.values(1, 2)


def test_a_ternary_code_that_does_not_exist_names_file_and_tensor():
    data, scales = encode(np.ones((1, 128), np.float32), T2_G128)
    tensor = Tensor("t", T2_G128, (1, 128), data | 3, scales, "x.q27")
    with pytest.raises(FileFormatError, match="x.q27: t: T2_G128 data holds the code 3"):
        tensor.values()


def with_checksum(file: File, damage: bytes | None = None) -> bytes:
    """`file` with the checksum as the metadata's last key, as the format says; `damage` replaces "n" afterwards."""
    metadata = json.loads(file.metadata) | {"q27app.header_sha256": "0" * 64}
    file = replace(file, metadata=json.dumps(metadata, separators=(",", ":")).encode())
    content = file.pack()
    digest = hashlib.sha256(content[: len(content) - len(file.data)]).hexdigest()
    return content.replace(b"0" * 64, digest.encode()).replace(b'"n"', damage or b'"n"')


def test_a_right_checksum_is_accepted_and_left_out_of_the_metadata(tmp_path):
    with open_container(written(tmp_path, with_checksum(File()))) as container:
        assert container.metadata == {"general.name": "xé", "n": 3}


def test_a_wrong_checksum_is_refused(tmp_path):
    refused(tmp_path, with_checksum(File(), b'"m"'), "the header's checksum does not match")


def test_a_checksum_in_another_place_is_refused(tmp_path):
    file = File(metadata=b'{"q27app.header_sha256": 5, "n": 3}')
    refused(tmp_path, file.pack(), "the header's checksum does not match")


def test_a_folder_a_pipe_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_container(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_container(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="does not exist"):
        open_container(tmp_path / "nothing.q27")


def test_a_refused_file_is_not_kept_open(tmp_path):
    path = written(tmp_path, File(version=9).pack())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(FileFormatError):
            open_container(path)
    assert len(os.listdir("/proc/self/fd")) == before
