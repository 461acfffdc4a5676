"""GGUF files: every value type, every block type, a large vocabulary quickly, and hostile counts at once."""

from __future__ import annotations

import struct
import time

import gguf
import numpy as np
import pytest

from q27app.errors import FileFormatError
from q27app.weights.gguf_file import BLOCKS, MAX_STRINGS, merge_companion, open_gguf

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.5


def u32(value):
    return struct.pack("<II", 4, value)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<IQ", 8, len(raw)) + raw


def array(kind, count, payload=b""):
    return struct.pack("<IIQ", 9, kind, count) + payload


def opened(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def test_a_vocabulary_of_150_thousand_tokens_is_parsed_quickly(shared):
    begin = time.process_time()
    with open_gguf(shared / "vocab" / "qwen35-vocab.gguf") as source:
        seconds = time.process_time() - begin
        tokens = source.metadata["tokenizer.ggml.tokens"]
        assert (len(tokens), tokens[0], source.metadata["tokenizer.ggml.pre"]) == (151_936, "!", "qwen35")
        assert len(source.metadata["tokenizer.ggml.token_type"]) == 151_936
    assert seconds < 1.5


def test_every_value_type_becomes_a_plain_value(tmp_path, make_gguf):
    forms = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60000),
        3: ("h", -30000),
        4: ("I", 4_000_000_000),
        5: ("i", -2),
        6: ("f", 0.5),
        10: ("Q", 1 << 60),
        11: ("q", -(1 << 60)),
        12: ("d", 0.1),
    }
    keys = {f"k{kind}": struct.pack(f"<I{form}", kind, value) for kind, (form, value) in forms.items()}
    keys |= {
        "flag": struct.pack("<IB", 7, 1),
        "text": string("h\u00e9"),
        "flags": array(7, 3, b"\1\0\1"),
        "texts": array(8, 2, struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 0)),
        "none": array(8, 0),
    }
    with opened(tmp_path, make_gguf(keys, {})) as source:
        found = source.metadata
    assert {key: found[key] for key in keys if key.startswith("k")} == {
        f"k{kind}": value for kind, (_, value) in forms.items()
    }
    assert (found["flag"], found["text"], found["flags"], found["texts"], found["none"]) == (
        True,
        "h\u00e9",
        [True, False, True],
        ["a", ""],
        [],
    )


@pytest.mark.parametrize(
    "kind, data",
    [
        (0, VALUES.tobytes()),
        (1, VALUES.astype(np.float16).tobytes()),
        (30, (VALUES.view(np.uint32) >> 16).astype(np.uint16).tobytes()),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_unquantised_tensors_come_back_as_stored(tmp_path, make_gguf, kind, data, version):
    with opened(
        tmp_path, make_gguf({}, {"v": ((4,), 0, VALUES[0].tobytes()), "w": ((3, 4), kind, data)}, version)
    ) as source:
        tensor = source.tensors["w"]
        assert (tensor.shape, tensor.rows, tensor.cols) == ((3, 4), 3, 4)
        assert np.array_equal(tensor.read(0, 3), VALUES)
        assert np.array_equal(tensor.read(1, 2), VALUES[1:2])
        assert np.array_equal(source.tensors["v"].read(0, 1), VALUES[:1])


def test_the_block_table_is_the_library_s():
    for kind, (name, weights, nbytes) in BLOCKS.items():
        known = gguf.GGMLQuantizationType(kind)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (name, (weights, nbytes))
    decoded = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert {name for name, _, _ in BLOCKS.values()} <= decoded


@pytest.mark.parametrize("kind", sorted(set(BLOCKS) - {0, 1, 30}), ids=lambda kind: BLOCKS[kind][0])
def test_blocks_are_decoded_by_rows(tmp_path, make_gguf, kind):
    _, weights, nbytes = BLOCKS[kind]
    random = np.random.default_rng(kind)
    raw = random.integers(0, 60, (5, 2 * nbytes), dtype=np.uint8)  # small bytes keep the float16 scales finite
    whole = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    with opened(tmp_path, make_gguf({}, {"w": ((5, 2 * weights), kind, raw.tobytes())})) as source:
        assert source.tensors["w"].shape == (5, 2 * weights)
        assert np.array_equal(source.tensors["w"].read(0, 5), whole, equal_nan=True)
        assert np.array_equal(source.tensors["w"].read(2, 4), whole[2:4], equal_nan=True)


def test_the_library_s_own_writer_is_understood(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_uint32("general.alignment", 64)
    writer.data_alignment = 64
    writer.add_tensor(
        "t",
        gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.add_tensor("u", VALUES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "w.gguf") as source:
        assert source.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        assert np.allclose(source.tensors["t"].read(0, 2), 1, rtol=1e-3)  # float16 of 1 / 127
        assert np.array_equal(source.tensors["u"].read(0, 3), VALUES)


HUGE = 1 << 62


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"a": array(8, HUGE)}, "may hold"),
        ({"a": array(8, MAX_STRINGS)}, "strings in the"),
        ({"a": array(4, HUGE)}, "may hold"),
        ({"a": array(4, 1 << 20)}, "needs 4194304 bytes"),
        ({"a": array(9, 1)}, "value type 9"),
        ({"a": array(13, 0)}, "value type 13"),
        ({"a": struct.pack("<IQ", 8, HUGE)}, "needs"),
        ({"a": string(b"\xff")}, "UTF-8"),
        ({"a": array(8, 1, struct.pack("<Q", HUGE))}, "string 0"),
        ({"a": array(8, 1, struct.pack("<Q", 1) + b"\xff")}, "UTF-8"),
        ({"a": struct.pack("<If", 6, np.nan)}, "finite"),
        ({"general.alignment": u32(0)}, "alignment"),
        ({"general.alignment": u32(12)}, "alignment"),
        ({"general.alignment": string("x")}, "alignment"),
        ({"n" * 600: u32(1)}, "600 bytes"),
    ],
)
def test_hostile_metadata_is_refused_at_once(tmp_path, make_gguf, keys, told):
    begin = time.process_time()
    with pytest.raises(FileFormatError, match=told):
        opened(tmp_path, make_gguf(keys, {}))
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "tensor, told",
    [
        (((1 << 40, 1 << 40), 0, b""), "impossible"),
        (((0, 4), 0, b""), "impossible"),
        (((1, 1, 1, 1, 1), 0, b"\0" * 4), "5 dimensions"),
        (((3, 4), 99, b""), "type 99"),
        (((3, 33), 2, b""), "multiple of 32"),
        (((1000, 4), 0, b"\0" * 64), "the file has"),
    ],
)
def test_hostile_tensors_are_refused(tmp_path, make_gguf, tensor, told):
    with pytest.raises(FileFormatError, match=told):
        opened(tmp_path, make_gguf({}, {"w": tensor}))


def test_offsets_must_be_aligned_and_apart(tmp_path, make_gguf):
    content = make_gguf({}, {"aa": ((8,), 0, b"\1" * 32), "bb": ((8,), 0, b"\2" * 32)})
    place = content.index(b"bb") + 2 + 4 + 8 + 4
    for offset, told in ((4, "multiple of 32"), (0, "overlap"), (HUGE, "the file has")):
        with pytest.raises(FileFormatError, match=told):
            opened(tmp_path, content[:place] + struct.pack("<Q", offset) + content[place + 8 :])


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "magic"),
        (b"GGML" + b"\0" * 40, "begin with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "tensor 0"),
    ],
)
def test_a_damaged_preamble_is_refused(tmp_path, content, told):
    with pytest.raises(FileFormatError, match=told):
        opened(tmp_path, content)


def test_repeated_names_are_refused(tmp_path, make_gguf):
    content = make_gguf({"ab": u32(1), "ac": u32(2)}, {"ta": ((1,), 0, b"\0" * 4), "tb": ((1,), 0, b"\0" * 4)})
    for old, new in ((b"ac", b"ab"), (b"tb", b"ta")):
        with pytest.raises(FileFormatError, match="twice"):
            opened(tmp_path, content.replace(old, new))


def companion_pair(tmp_path, make_gguf, extra=(), architecture="qwen35"):
    row = ((1, 4), 0, VALUES[0].tobytes())
    base = {"token_embd.weight": row, "blk.0.attn_norm.weight": row}
    draft = {
        "token_embd.weight": row,
        "output_norm.weight": row,
        "output.weight": row,
        "blk.1.nextn.enorm.weight": row,
        **{name: row for name in extra},
    }
    (tmp_path / "base.gguf").write_bytes(
        make_gguf({"general.architecture": string("qwen35"), "qwen35.block_count": u32(1)}, base)
    )
    (tmp_path / "draft.gguf").write_bytes(
        make_gguf(
            {
                "general.architecture": string(architecture),
                "qwen35.block_count": u32(2),
                "qwen35.nextn_predict_layers": u32(1),
            },
            draft,
        )
    )
    return open_gguf(tmp_path / "base.gguf"), open_gguf(tmp_path / "draft.gguf")


def test_a_companion_adds_its_block_and_nothing_else(tmp_path, make_gguf):
    base, draft = companion_pair(tmp_path, make_gguf)
    embedding = base.tensors["token_embd.weight"]
    merge_companion(base, draft)
    assert sorted(base.tensors) == ["blk.0.attn_norm.weight", "blk.1.nextn.enorm.weight", "token_embd.weight"]
    assert base.tensors["token_embd.weight"] is embedding
    assert (base.metadata["qwen35.block_count"], base.metadata["qwen35.nextn_predict_layers"]) == (2, 1)
    base.close()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"extra": ["blk.0.attn_norm.weight"]}, "also in"),
        ({"extra": ["rope.weight"]}, "belong"),
        ({"architecture": "llama"}, "architecture"),
    ],
)
def test_a_companion_of_something_else_is_refused(tmp_path, make_gguf, options, told):
    base, draft = companion_pair(tmp_path, make_gguf, **options)
    with base, draft, pytest.raises(FileFormatError, match=told):
        merge_companion(base, draft)


def test_a_base_is_no_companion(tmp_path, make_gguf):
    base, draft = companion_pair(tmp_path, make_gguf)
    with base, draft, pytest.raises(FileFormatError, match="no draft layer"):
        merge_companion(draft, base)
