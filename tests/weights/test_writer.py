"""The .q27 writer: bytes as the format says, complete files only, nothing left behind."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.errors import FileFormatError, Q27Error, UsageError
from q27app.weights import writer as writer_module
from q27app.weights.codecs import decode, encode
from q27app.weights.container import open_container
from q27app.weights.dtypes import B1_G128, F16, F32, FP4_G16, Q4_G64, Q8_G128, T2_G128, T3_G128
from q27app.weights.writer import TensorEntry, Writer, data_section_bytes

FORMATS = (F32, F16, Q8_G128, Q4_G64, T2_G128, B1_G128)
ENTRY = TensorEntry("q", Q4_G64, (4, 64))


def rows_of(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return encode(np.random.default_rng(seed).standard_normal((count, 64)).astype(np.float32), Q4_G64)


def write_one(path, overwrite: bool = False, seed: int = 0) -> None:
    with Writer(path, {"seed": seed}, [ENTRY], overwrite) as writer:
        writer.write("q", *rows_of(4, seed))


def test_every_byte_of_a_small_file_is_as_the_format_says(tmp_path):
    path = tmp_path / "m.q27"
    entries = [TensorEntry("v", F32, (3,)), TensorEntry("q", Q4_G64, (1, 64))]
    with Writer(path, {"a": "é", "n": [1, 2.5, None]}, entries) as writer:
        writer.write("v", np.array([[1, 2, 3]], np.float32).view(np.uint8))
        writer.write("q", np.full((1, 32), 0x98, np.uint8), np.array([[2]], np.float16))
    content = path.read_bytes()
    metadata = '{"a":"é","n":[1,2.5,null],"q27app.header_sha256":"'.encode()
    length = len(metadata) + 64 + 2
    assert content[:16] == b"Q27F" + struct.pack("<III", 1, 2, length)
    assert content[16 : 16 + len(metadata)] == metadata
    table = (
        b"\x01\0v\0\x01"
        + struct.pack("<Q", 3)
        + struct.pack("<QQQQ", 0, 12, 0, 0)
        + b"\x01\0q\x03\x02"
        + struct.pack("<QQ", 1, 64)
        + struct.pack("<QQQQ", 256, 32, 512, 2)
    )
    start = 16 + length
    assert content[start : start + len(table)] == table
    data_start = -(-(start + len(table)) // 256) * 256
    assert not any(content[start + len(table) : data_start])
    assert content[data_start:] == (
        np.array([1, 2, 3], "<f4").tobytes().ljust(256, b"\0")
        + (b"\x98" * 32).ljust(256, b"\0")
        + b"\0\x40".ljust(256, b"\0")
    )


def test_all_formats_come_back_bit_for_bit(tmp_path):
    values = np.random.default_rng(1).standard_normal((37, 384)).astype(np.float32)
    stored = {dtype.name: encode(values, dtype) for dtype in FORMATS}
    entries = [TensorEntry(dtype.name, dtype, values.shape) for dtype in FORMATS]
    metadata = {"general.name": "a", "nested": {"list": [1, -2, 1e-6, True, None, "ü"]}, "big": 2**63}
    with Writer(tmp_path / "m.q27", metadata, entries) as writer:
        for name, (data, scales) in stored.items():
            writer.write(name, data, scales)
    with open_container(tmp_path / "m.q27") as container:
        assert container.metadata == metadata
        container.check_scales()
        for dtype in FORMATS:
            data, scales = stored[dtype.name]
            tensor = container.tensors[dtype.name]
            assert np.array_equal(tensor.data, data)
            assert scales is None or np.array_equal(tensor.scales, scales)
            assert np.array_equal(tensor.values(5, 20), decode(dtype, data, scales, 384)[5:20])


def test_rows_may_come_in_any_portions(tmp_path):
    data, scales = rows_of(4)
    for name, cuts in (("whole", [0, 4]), ("parts", [0, 1, 1, 3, 4])):
        with Writer(tmp_path / name, {}, [ENTRY]) as writer:
            for start, stop in zip(cuts, cuts[1:]):
                writer.write("q", data[start:stop], scales[start:stop])
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_the_size_is_known_before_the_first_row(tmp_path):
    entries = [ENTRY, TensorEntry("v", F32, (5,))]
    writer = Writer(tmp_path / "m.q27", {}, entries)
    with writer:
        writer.write("q", *rows_of(4))
        writer.write("v", np.zeros((1, 20), np.uint8))
    assert writer.file_bytes == (tmp_path / "m.q27").stat().st_size
    assert data_section_bytes(entries) == 3 * 256


def test_numpy_values_are_written_as_json_values(tmp_path):
    with Writer(tmp_path / "m.q27", {"i": np.int64(3), "a": np.arange(3), "f": np.float32(0.5)}, [ENTRY]) as writer:
        writer.write("q", *rows_of(4))
    with open_container(tmp_path / "m.q27") as container:
        assert container.metadata == {"i": 3, "a": [0, 1, 2], "f": 0.5}


def test_a_copied_checksum_is_replaced(tmp_path):
    with Writer(tmp_path / "m.q27", {"q27app.header_sha256": "old", "a": 1}, [ENTRY]) as writer:
        writer.write("q", *rows_of(4))
    with open_container(tmp_path / "m.q27") as container:
        assert container.metadata == {"a": 1}


@pytest.mark.parametrize(
    "metadata",
    [
        {"x": float("nan")},
        {"x": np.float32(np.inf)},
        {"x": b"bytes"},
        {"x": "\ud800"},
        {"x": {1, 2}},
        {1: 1, "1": 2},
    ],
)
def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, metadata):
    with pytest.raises(FileFormatError, match="metadata"):
        Writer(tmp_path / "m.q27", metadata, [ENTRY])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("entries", "pattern"),
    [
        ([], "0 tensors"),
        ([ENTRY, ENTRY], "q is listed twice"),
        ([TensorEntry("w", Q4_G64, (2, 100))], r"w \[2, 100\]: Q4_G64 stores columns in groups of 64"),
        ([TensorEntry("w", Q4_G64, (64,))], "w: shape .64. cannot be stored as Q4_G64"),
        ([TensorEntry("w", F32, (2, 3, 4))], "w: shape .2, 3, 4. cannot"),
        ([TensorEntry("w", F32, (0, 4))], "w: shape .0, 4. cannot"),
        ([TensorEntry("w", F32, ())], "w: shape .. cannot"),
        ([TensorEntry("w", T3_G128, (2, 128))], "w: T3_G128 tensors are not supported"),
        ([TensorEntry("w", FP4_G16, (2, 128))], "w: FP4_G16 tensors are not supported"),
        ([TensorEntry("", F32, (2,))], "cannot be a tensor's name"),
        ([TensorEntry("w" * 257, F32, (2,))], "cannot be a tensor's name"),
    ],
)
def test_entries_that_the_format_cannot_hold_are_refused(tmp_path, entries, pattern):
    with pytest.raises(FileFormatError, match=pattern):
        Writer(tmp_path / "m.q27", {}, entries)


DATA, SCALES = rows_of(4)


@pytest.mark.parametrize(
    ("name", "data", "scales", "pattern"),
    [
        ("other", DATA, SCALES, "rows of other where q rows were due"),
        ("q", DATA[:, :16], SCALES, r"q: data are uint8 \[4, 16\], expected uint8 \[rows, 32\]"),
        ("q", DATA.view(np.int8), SCALES, "q: data are int8"),
        ("q", DATA, None, "q: no scales given; Q4_G64 has 1 a row"),
        ("q", DATA, SCALES.astype(np.float32), "q: scales are float32"),
        ("q", DATA, SCALES[:2], "q: 2 rows of scales for 4"),
        ("q", np.tile(DATA, (2, 1)), np.tile(SCALES, (2, 1)), "q: 8 rows, expected 4"),
        ("q", DATA, np.array([[1], [1], [np.inf], [1]], np.float16), "q: scale 0 of row 2 is not finite"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, name, data, scales, pattern):
    with pytest.raises(FileFormatError, match=pattern):
        with Writer(tmp_path / "m.q27", {}, [ENTRY]) as writer:
            writer.write(name, data, scales)
    assert os.listdir(tmp_path) == []


def test_rows_after_the_last_tensor_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="rows of q where no more rows were due"):
        with Writer(tmp_path / "m.q27", {}, [ENTRY]) as writer:
            writer.write("q", DATA, SCALES)
            writer.write("q", DATA, SCALES)


def test_missing_rows_leave_no_file(tmp_path):
    with pytest.raises(FileFormatError, match="q has 3 of 4 rows"):
        with Writer(tmp_path / "m.q27", {}, [ENTRY]) as writer:
            writer.write("q", DATA[:3], SCALES[:3])
    assert os.listdir(tmp_path) == []


def test_an_interruption_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "m.q27"
    write_one(path)
    old = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        with Writer(path, {}, [ENTRY], overwrite=True) as writer:
            writer.write("q", DATA[:2], SCALES[:2])
            raise KeyboardInterrupt
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["m.q27"]


def test_the_name_appears_only_with_the_whole_file(tmp_path):
    path = tmp_path / "m.q27"
    with Writer(path, {}, [ENTRY]) as writer:
        writer.write("q", DATA, SCALES)
        assert not path.exists()
    assert os.listdir(tmp_path) == ["m.q27"]


def test_an_existing_file_is_kept_unless_overwriting_is_allowed(tmp_path):
    path = tmp_path / "m.q27"
    write_one(path)
    old = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        write_one(path, seed=1)
    assert path.read_bytes() == old
    write_one(path, overwrite=True, seed=1)
    assert path.read_bytes() != old


def test_a_file_that_appears_while_writing_is_kept(tmp_path):
    path = tmp_path / "m.q27"
    with pytest.raises(UsageError, match="exists already"):
        with Writer(path, {}, [ENTRY]) as writer:
            writer.write("q", DATA, SCALES)
            path.write_text("mine")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["m.q27"]


def test_a_folder_is_not_overwritten(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        write_one(tmp_path, overwrite=True)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere.*cannot be written"):
        write_one(tmp_path / "nowhere" / "m.q27")


def test_two_writers_of_one_target_do_not_meet(tmp_path):
    path = tmp_path / "m.q27"
    with Writer(path, {}, [ENTRY]) as writer:
        writer.write("q", DATA[:1], SCALES[:1])
        with pytest.raises(UsageError, match="being written by another process"):
            write_one(path)
        writer.write("q", DATA[1:], SCALES[1:])
    with open_container(path) as container:
        assert np.array_equal(container.tensors["q"].data, DATA)


def test_a_dead_writers_leftover_is_used_again(tmp_path):
    (tmp_path / ".m.q27.partial").write_bytes(b"x" * 100_000)
    write_one(tmp_path / "m.q27")
    assert os.listdir(tmp_path) == ["m.q27"]
    write_one(tmp_path / "clean.q27")
    assert (tmp_path / "m.q27").read_bytes() == (tmp_path / "clean.q27").read_bytes()


def test_a_partial_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".m.q27.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="cannot be written"):
        write_one(tmp_path / "m.q27")
    assert (tmp_path / "victim").read_text() == "mine"


def test_too_little_disk_is_said_before_the_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    with pytest.raises(Q27Error, match="needs [0-9]+ bytes, its disk has 5 free"):
        write_one(tmp_path / "m.q27")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.raises(Q27Error, match="writing failed after .*No space left"):
        with Writer(tmp_path / "m.q27", {}, [ENTRY]) as writer:
            monkeypatch.setattr(writer_module.os, "pwrite", refuse)
            writer.write("q", DATA, SCALES)
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write_one(tmp_path / "whole")
    pwrite = os.pwrite
    monkeypatch.setattr(writer_module.os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    write_one(tmp_path / "pieces")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


def test_file_and_folder_are_on_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        writer_module.os,
        "fsync",
        lambda file: (calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))), fsync(file)),
    )
    monkeypatch.setattr(writer_module.os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    write_one(tmp_path / "m.q27")
    assert calls == [".m.q27.partial", "rename", tmp_path.name]


def test_a_killed_writer_leaves_no_file_under_the_name(tmp_path):
    path = tmp_path / "m.q27"
    script = textwrap.dedent(f"""
        import sys, time, numpy as np
        from q27app.weights.dtypes import F32
        from q27app.weights.writer import TensorEntry, Writer
        with Writer({str(path)!r}, {{}}, [TensorEntry("v", F32, (2, 64))]) as writer:
            writer.write("v", np.zeros((1, 256), np.uint8))
            print("half", flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=os.getcwd())
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not path.exists()
    write_one(path)
    assert os.listdir(tmp_path) == ["m.q27"]


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_one(tmp_path / "m.q27")
    finally:
        os.umask(old)
    assert (tmp_path / "m.q27").stat().st_mode & 0o777 == 0o640
