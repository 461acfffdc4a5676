"""Whole conversions: values, metadata, the golden forward pass, refusals that leave nothing behind."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from q27app.errors import FileFormatError, ModelError, UsageError
from q27app.weights import convert as convert_module
from q27app.weights.container import open_container
from q27app.weights.convert import convert, generation_of
from q27app.weights.dtypes import F16, F32, Q4_G64
from q27app.weights.tiers import QUANTISED_TIERS

R3 = ("--layers", "4", "--seed", "31")
EQUAL = (
    "--layers",
    "4",
    "--lin-k-heads",
    "2",
    "--lin-v-heads",
    "2",
    "--heads",
    "8",
    "--kv-heads",
    "2",
    "--tied",
    "--hidden",
    "128",
    "--ffn",
    "256",
    "--seed",
    "32",
)


def test_both_sources_give_the_same_values(shared, tiny_huggingface, tmp_path):
    convert(tiny_huggingface(*R3), tmp_path / "hf.q27", "f32")
    convert(shared / "oracle/golden/small-r3.gguf", tmp_path / "gguf.q27", "f32")
    with open_container(tmp_path / "hf.q27") as ours, open_container(tmp_path / "gguf.q27") as theirs:
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            assert tensor.shape == theirs.tensors[name].shape and tensor.dtype is F32
            np.testing.assert_array_max_ulp(
                tensor.values(), theirs.tensors[name].values(), maxulp=1 if name.endswith("ssm_a") else 0
            )


@pytest.mark.parametrize("name, arguments", [("small-r3", R3), ("small-equal", EQUAL)])
def test_converted_weights_give_the_golden_logits_and_drafts(
    shared, tiny_huggingface, tmp_path, plain_model, name, arguments
):
    golden = np.load(shared / "oracle/golden" / f"{name}.npz")
    convert(tiny_huggingface(*arguments), tmp_path / "a.q27", "f32")
    with open_container(tmp_path / "a.q27") as file:
        model = plain_model(file.metadata, file.tensors)
    tokens = golden["tokens"].tolist()[:24]
    for position, token in enumerate(tokens):
        logits, hidden = model.step(token, position)
        assert np.abs(logits - golden["logits"][position]).max() < 1e-4  # float32 in any order of summation: 4e-5
        draft, _ = model.draft(int(golden["tokens"][position + 1]), hidden, position + 1)
        assert np.abs(draft - golden["mtp_logits"][position]).max() < 1e-4


def test_half_precision_keeps_what_float16_can_hold(tiny_huggingface, tmp_path):
    convert(tiny_huggingface(*R3), tmp_path / "f32.q27", "f32")
    report = convert(tiny_huggingface(*R3), tmp_path / "f16.q27", "f16")
    with open_container(tmp_path / "f32.q27") as exact, open_container(tmp_path / "f16.q27") as half:
        for name, tensor in half.tensors.items():
            expected = exact.tensors[name].values()
            assert tensor.dtype in (F16, F32)
            assert np.array_equal(
                tensor.values(), expected.astype(np.float16 if tensor.dtype is F16 else np.float32)
            ), name
    assert report.worst(1)[0].error < 1e-3


@pytest.mark.parametrize("tier", QUANTISED_TIERS)
def test_every_tier_is_the_encoding_of_the_transformed_values(tiny_huggingface, tmp_path, tier):
    convert(tiny_huggingface(*R3), tmp_path / "exact.q27", "f32")
    report = convert(tiny_huggingface(*R3), tmp_path / "a.q27", tier)
    with open_container(tmp_path / "exact.q27") as exact, open_container(tmp_path / "a.q27") as file:
        assert ("output_q4.weight" in file.tensors) == (file.metadata["q4_head"] is False)
        for name, tensor in file.tensors.items():
            wanted = exact.tensors["output.weight" if name == "output_q4.weight" else name].values()
            if tensor.dtype.group:
                grouped = wanted.reshape(tensor.rows, -1, tensor.dtype.group)
                levels = 7 if tensor.dtype is Q4_G64 else 127
                step = np.abs(grouped).max(axis=2, keepdims=True) / levels
                lost = np.abs(tensor.values().reshape(grouped.shape) - grouped)
                assert (
                    lost <= step * (0.5 + levels * 2.0**-11) + 1e-7
                ).all(), name  # half a step, and the scale in float16
            relative = np.sqrt(((tensor.values() - wanted) ** 2).sum() / (wanted**2).sum())
            told = next(entry for entry in report.tensors if entry.name == name)
            assert told.error == pytest.approx(relative, rel=1e-3, abs=1e-6), name
            assert told.dtype == tensor.dtype.name and told.shape == tensor.shape
    errors = [entry.error for entry in report.worst(5)]
    assert errors == sorted(errors, reverse=True) and errors[0] == max(entry.error for entry in report.tensors)
    assert report.file_bytes == (tmp_path / "a.q27").stat().st_size


def test_tied_checkpoints_keep_one_embedding_and_copy_it_for_drafts(tiny_huggingface, tmp_path):
    convert(tiny_huggingface("--tied", *R3), tmp_path / "a.q27", "default")
    with open_container(tmp_path / "a.q27") as file:
        assert "output.weight" not in file.tensors
        assert file.tensors["output_q4.weight"].shape == file.tensors["token_embd.weight"].shape


def test_metadata_is_complete(tiny_huggingface, tmp_path):
    folder = tmp_path / "Qwen3.8-Tiny"
    shutil.copytree(tiny_huggingface(*R3), folder)
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    report = convert(folder, tmp_path / "a.q27", "q6")
    with open_container(tmp_path / "a.q27") as file:
        keys = file.metadata
    assert report.generation == "3.8"
    assert {
        key: keys[key]
        for key in (
            "q27_version",
            "quant_policy",
            "group_q4",
            "group_q8",
            "nibble_order",
            "q4_head",
            "attn_layers",
            "ssm_layers",
            "q27app.tier",
            "q27app.generation",
            "general.architecture",
            "general.name",
        )
    } == {
        "q27_version": 1,
        "quant_policy": "q6",
        "group_q4": 64,
        "group_q8": 128,
        "nibble_order": "even=low",
        "q4_head": False,
        "attn_layers": [3, 4],
        "ssm_layers": [0, 1, 2],
        "q27app.tier": "q6",
        "q27app.generation": "3.8",
        "general.architecture": "qwen35",
        "general.name": "Qwen3.8-Tiny",
    }
    assert "attn_output" in keys["q8_extra"]
    assert keys["qwen35.vocab_size"] == 512
    assert (keys["tokenizer.huggingface.json"], keys["tokenizer.chat_template"]) == (
        '{"added_tokens": []}',
        "{{ messages }}",
    )


def test_the_generation_can_be_told(tiny_huggingface, tmp_path):
    assert convert(tiny_huggingface(*R3), tmp_path / "a.q27", "q4s").generation == "3.6"
    assert convert(tiny_huggingface(*R3), tmp_path / "b.q27", "q4s", generation="3.8").generation == "3.8"
    assert [generation_of(name) for name in ("Qwen3.8 27b Hf", "qwen-3-8", "Qwen3.6-27B", "")] == [
        "3.8",
        "3.8",
        "3.6",
        "3.6",
    ]


def gguf_table(path, make_gguf):
    """(keys, tensors) of a small GGUF, in the form that make_gguf packs."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and field.types[0] != 9:
            value = field.parts[field.data[0]].tobytes()
            length = struct.pack("<Q", len(value)) if field.types[0] == 8 else b""
            keys[name] = struct.pack("<I", field.types[0]) + length + value
    tensors = {
        tensor.name: (tuple(int(n) for n in tensor.shape[::-1]), int(tensor.tensor_type), tensor.data.tobytes())
        for tensor in reader.tensors
    }
    return keys, tensors


def split_gguf(shared, tmp_path, make_gguf):
    """The golden GGUF as a base of four blocks and a companion with the draft layer."""
    keys, tensors = gguf_table(shared / "oracle/golden/small-r3.gguf", make_gguf)
    draft = {name: tensor for name, tensor in tensors.items() if name.startswith("blk.4.")}
    base = {name: tensor for name, tensor in tensors.items() if name not in draft}
    base_keys = keys | {"qwen35.block_count": struct.pack("<II", 4, 4)}
    base_keys.pop("qwen35.nextn_predict_layers")
    (tmp_path / "base.gguf").write_bytes(make_gguf(base_keys, base))
    copies = {name: tensors[name] for name in ("token_embd.weight", "output_norm.weight", "output.weight")}
    (tmp_path / "draft.gguf").write_bytes(make_gguf(keys, copies | draft))
    return tmp_path / "base.gguf", tmp_path / "draft.gguf"


def test_a_split_gguf_converts_like_the_whole(shared, tmp_path, make_gguf):
    base, draft = split_gguf(shared, tmp_path, make_gguf)
    convert(base, tmp_path / "split.q27", "q4s", mtp=draft)
    convert(shared / "oracle/golden/small-r3.gguf", tmp_path / "whole.q27", "q4s")
    with open_container(tmp_path / "split.q27") as split, open_container(tmp_path / "whole.q27") as whole:
        assert list(split.tensors) == list(whole.tensors)
        assert all(np.array_equal(tensor.data, whole.tensors[name].data) for name, tensor in split.tensors.items())
        assert split.metadata["qwen35.block_count"] == whole.metadata["qwen35.block_count"] == 5
    convert(base, tmp_path / "base.q27", "q4s")
    with open_container(tmp_path / "base.q27") as file:
        assert file.metadata["qwen35.block_count"] == 4 and file.metadata.get("qwen35.nextn_predict_layers", 0) == 0


def test_quantised_gguf_blocks_become_their_nearest_codes(shared, tmp_path, make_gguf):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    keys, tensors = gguf_table(shared / "oracle/golden/small-r3.gguf", make_gguf)
    name, expected = "blk.0.ffn_up.weight", {}
    for kind in (8, 2):
        shape, _, data = tensors[name]
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        blocks = quantize(values, GGMLQuantizationType(kind))
        expected[kind] = dequantize(blocks, GGMLQuantizationType(kind))
        (tmp_path / f"{kind}.gguf").write_bytes(make_gguf(keys, tensors | {name: (shape, kind, blocks.tobytes())}))
        convert(tmp_path / f"{kind}.gguf", tmp_path / f"{kind}.q27", "f32")
        with open_container(tmp_path / f"{kind}.q27") as file:
            assert np.array_equal(file.tensors[name].values(), expected[kind])


def test_columns_that_a_group_does_not_divide_are_refused_by_name(tiny_huggingface, tmp_path):
    folder = tiny_huggingface("--layers", "1", "--interval", "1", "--hidden", "96", "--ffn", "128", "--no-mtp")
    with pytest.raises(FileFormatError, match=r"(token_embd|attn_q|attn_k)\.weight .*96"):
        convert(folder, tmp_path / "a.q27", "q4s")
    assert list(tmp_path.glob("*a.q27*")) == []
    convert(folder, tmp_path / "a.q27", "f16")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "home")


def test_nothing_is_left_when_the_source_holds_a_nan(tiny_huggingface, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(tiny_huggingface(*R3), folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    entry = json.loads(content[8 : 8 + length])["model.language_model.layers.3.mlp.up_proj.weight"]
    struct.pack_into("<H", content, 8 + length + entry["data_offsets"][0] + 10, 0x7FC0)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(FileFormatError, match="blk.3.ffn_up.weight.*not finite"):
        convert(folder, tmp_path / "a.q27", "q4s")
    assert names_in(tmp_path) == ["source"]


def test_nothing_is_left_after_an_interruption(tiny_huggingface, tmp_path):
    calls = []

    def interrupt(done, total, name):
        calls.append(done)
        if len(calls) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_huggingface(*R3), tmp_path / "a.q27", "q4s", progress=interrupt)
    assert names_in(tmp_path) == []


def test_an_existing_destination_stays_as_it_is(tiny_huggingface, tmp_path):
    (tmp_path / "a.q27").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        convert(tiny_huggingface(*R3), tmp_path / "a.q27", "q4s")
    assert (tmp_path / "a.q27").read_bytes() == b"mine"
    convert(tiny_huggingface(*R3), tmp_path / "a.q27", "q4s", overwrite=True)
    assert (tmp_path / "a.q27").stat().st_size > 1 << 20


def test_progress_counts_source_bytes_up_to_the_total(tiny_huggingface, tmp_path):
    calls = []
    report = convert(tiny_huggingface(*R3), tmp_path / "a.q27", "default", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and calls[-1][0] == calls[-1][1] == report.source_bytes
    assert calls[0][2] == "token_embd.weight" and calls[-1][2] == "output_q4.weight"


def test_pieces_do_not_change_the_bytes(tiny_huggingface, tmp_path, monkeypatch):
    convert(tiny_huggingface(*R3), tmp_path / "a.q27", "default")
    monkeypatch.setattr(convert_module, "PIECE_WEIGHTS", 7000)
    convert(tiny_huggingface(*R3), tmp_path / "b.q27", "default")
    assert (tmp_path / "a.q27").read_bytes() == (tmp_path / "b.q27").read_bytes()


@pytest.mark.parametrize(
    "options, error",
    [
        ({"tier": "q3"}, UsageError),
        ({"tier": "q4s", "generation": "4"}, UsageError),
        ({"tier": "q4s", "mtp": "x.gguf"}, UsageError),
    ],
)
def test_wrong_options_are_refused(tiny_huggingface, tmp_path, options, error):
    with pytest.raises(error):
        convert(tiny_huggingface(*R3), tmp_path / "a.q27", **options)


def test_sources_that_are_no_checkpoint_are_refused(shared, tiny_huggingface, tmp_path):
    for source in (tmp_path / "absent", tmp_path, tiny_huggingface(*R3) / "config.json"):
        with pytest.raises(FileFormatError):
            convert(source, tmp_path / "a.q27", "q4s")
    with pytest.raises(UsageError, match="folder"):
        convert(tiny_huggingface(*R3) / "model.safetensors", tmp_path / "a.q27", "q4s")
    with pytest.raises(ModelError):
        convert(shared / "vocab/qwen35-vocab.gguf", tmp_path / "a.q27", "q4s")


def test_only_a_few_pieces_are_on_their_way(tiny_huggingface, tmp_path, monkeypatch):
    submitted, written, most = [], [], []
    submit = convert_module.ThreadPoolExecutor.submit
    monkeypatch.setattr(convert_module, "PIECE_WEIGHTS", 7000)
    monkeypatch.setattr(
        convert_module.ThreadPoolExecutor, "submit", lambda *call: (submitted.append(0), submit(*call))[1]
    )

    def progress(done, total, name):
        written.append(done)
        most.append(len(submitted) - len(written))

    convert(tiny_huggingface(*R3), tmp_path / "a.q27", "q4s", progress=progress)
    assert len(written) > 500
    assert max(most) <= 3 * convert_module.MAX_THREADS
