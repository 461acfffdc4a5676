"""Hugging Face folders: values as stored, shards, and a refusal for everything that lies."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest

from q27app.errors import FileFormatError
from q27app.weights.safetensors import open_safetensors_folder

VALUES = np.array([[1.0, -2.5, 3.0], [0.0, 65504.0, -0.125]], np.float32)


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def folder_with(tmp_path, write, tensors, edit=None):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", tensors, edit)
    return tmp_path


@pytest.mark.parametrize("kind, stored", [("F32", VALUES), ("F16", VALUES.astype(np.float16)), ("BF16", bf16(VALUES))])
def test_rows_come_back_as_float32(tmp_path, write_safetensors, kind, stored):
    first = np.arange(5, dtype=np.float32)
    with open_safetensors_folder(
        folder_with(tmp_path, write_safetensors, {"v": ("F32", first), "w": (kind, stored)})
    ) as source:
        tensor = source.tensors["w"]
        expected = VALUES if kind != "BF16" else (bf16(VALUES).astype(np.uint32) << 16).view(np.float32)
        assert (tensor.shape, tensor.rows, tensor.cols, tensor.nbytes) == ((2, 3), 2, 3, stored.nbytes)
        assert np.array_equal(tensor.read(0, 2), expected) and tensor.read(0, 2).dtype == np.float32
        assert np.array_equal(tensor.read(1, 2), expected[1:])
        assert np.array_equal(source.tensors["v"].read(0, 1), first[None])


def test_shards_are_found_through_the_index(tmp_path, write_safetensors):
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    write_safetensors(tmp_path / "b-2.safetensors", {"two": ("F32", VALUES * 2), "unlisted": ("F32", VALUES)})
    write_safetensors(tmp_path / "b-1.safetensors", {"one": ("F32", VALUES)})
    index = {"metadata": {}, "weight_map": {"two": "b-2.safetensors", "one": "b-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_safetensors_folder(tmp_path) as source:
        assert source.metadata == {"model_type": "x"}
        assert sorted(source.tensors) == ["one", "two"]
        assert np.array_equal(source.tensors["two"].read(0, 2), VALUES * 2)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        ".hidden.safetensors",
        "",
        7,
        None,
        "a\0.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, write_safetensors, shard):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    write_safetensors(tmp_path / "x.safetensors", {"w": ("F32", VALUES)})
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(FileFormatError, match="weight_map"):
        open_safetensors_folder(inner)


def test_a_tensor_that_the_index_promises_must_be_there(tmp_path, write_safetensors):
    folder_with(tmp_path, write_safetensors, {"w": ("F32", VALUES)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "model.safetensors"}}))
    with pytest.raises(FileFormatError, match="tensor v is missing"):
        open_safetensors_folder(tmp_path)


def lie(name, **changes):
    return lambda header: header[name].update(changes)


@pytest.mark.parametrize(
    "edit, told",
    [
        (lie("w", data_offsets=[0, 1 << 62]), "claims bytes"),
        (lie("w", data_offsets=[24, 0]), "claims bytes"),
        (lie("w", data_offsets=[0, 20]), "expected 24"),
        (lie("w", data_offsets=[0]), "data_offsets"),
        (lie("w", data_offsets=[-24, 0]), "data_offsets"),
        (lie("w", data_offsets="0,24"), "data_offsets"),
        (lie("w", shape=[2, 3.0]), "shape"),
        (lie("w", shape=[2, True]), "shape"),
        (lie("w", shape=[1 << 60, 1 << 60]), "impossible"),
        (lie("w", shape=[0, 1 << 70]), "impossible"),
        (lie("w", shape=[1] * 9), "dimensions"),
        (lie("w", dtype=4), "dtype"),
        (lambda header: header.update(w=[1, 2]), "dtype"),
        (lambda header: header.update(v={"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}), "overlap"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, write_safetensors, edit, told):
    folder_with(tmp_path, write_safetensors, {"w": ("F32", VALUES)}, edit)
    with pytest.raises(FileFormatError, match=told):
        open_safetensors_folder(tmp_path)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "too few"),
        (b"\0" * 7, "too few"),
        (struct.pack("<Q", 1 << 63), "claims"),
        (struct.pack("<Q", 100) + b"{}", "claims"),
        (struct.pack("<Q", 2) + b"[]", "list"),
        (struct.pack("<Q", 6) + b'{"a":}', "JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "deeply"),
        (struct.pack("<Q", 15) + b'{"a":1,"a":{} }', "twice"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content, told):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FileFormatError, match=told):
        open_safetensors_folder(tmp_path)


def test_other_number_types_are_refused_only_when_read(tmp_path, write_safetensors):
    tensors = {"scale": ("F8_E4M3", np.zeros((2, 3), np.uint8)), "w": ("F32", VALUES)}
    with open_safetensors_folder(folder_with(tmp_path, write_safetensors, tensors)) as source:
        assert np.array_equal(source.tensors["w"].read(0, 2), VALUES)
        with pytest.raises(FileFormatError, match="scale has the number type F8_E4M3"):
            source.tensors["scale"].read(0, 1)


def test_a_file_that_is_cut_while_open_gives_an_error(tmp_path, write_safetensors):
    with open_safetensors_folder(folder_with(tmp_path, write_safetensors, {"w": ("F32", VALUES)})) as source:
        os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)
        with pytest.raises(FileFormatError, match="cut while being read"):
            source.tensors["w"].read(0, 2)


def test_folders_without_a_checkpoint_are_refused(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(FileFormatError):
            open_safetensors_folder(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileFormatError, match="neither model.safetensors nor"):
        open_safetensors_folder(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_safetensors_folder(tmp_path)
