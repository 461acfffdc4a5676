"""Hugging Face names, shapes, transforms and keys become those of `.q27`; what cannot run is refused by its key."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from q27app.errors import ModelError
from q27app.weights.gguf_file import open_gguf
from q27app.weights.hf_config import config_metadata, tokenizer_metadata
from q27app.weights.names import Geometry, translate_gguf, translate_huggingface
from q27app.weights.safetensors import open_safetensors_folder
from q27app.weights.source import SourceTensor

GOLDEN = {
    "small-r3": ("--layers", "4", "--seed", "31"),
    "small-equal": (
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
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_tensor_equals_the_one_of_another_converter(shared, tiny_huggingface, name):
    with (
        open_safetensors_folder(tiny_huggingface(*GOLDEN[name])) as ours,
        open_gguf(shared / "oracle/golden" / f"{name}.gguf") as theirs,
    ):
        metadata, tensors = translate_huggingface(ours)
        assert sorted(tensors) == sorted(theirs.tensors)
        for tensor_name, tensor in tensors.items():
            other = theirs.tensors[tensor_name]
            assert tensor.shape == other.shape, tensor_name
            found, wanted = tensor.read(0, tensor.rows), other.read(0, other.rows)
            # -exp(A_log): ours is the rounded exact value, exp in float32 may differ in the last bit
            np.testing.assert_array_max_ulp(found, wanted, maxulp=1 if tensor_name.endswith("ssm_a") else 0)
        expected = {key: value for key, value in theirs.metadata.items() if key.startswith("qwen35.")}
        found = {key: metadata[key] for key in expected}
        epsilon = "qwen35.attention.layer_norm_rms_epsilon"
        assert found.pop(epsilon) == pytest.approx(expected.pop(epsilon), rel=1e-6)  # GGUF keeps it as float32
        assert found == expected
        again, same = translate_gguf(theirs)
        assert {key: again[key] for key in expected} == expected
        assert list(same) == list(tensors)


def test_transforms_work_on_any_range_of_rows(tiny_huggingface):
    with open_safetensors_folder(tiny_huggingface(*GOLDEN["small-r3"])) as source:
        _, tensors = translate_huggingface(source)
        random = np.random.default_rng(0)
        for name in ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_conv1d.weight", "ssm_out.weight"):
            tensor = tensors["blk.0." + name]
            whole = tensor.read(0, tensor.rows)
            for start, stop in random.integers(0, tensor.rows + 1, (20, 2)):
                start, stop = min(start, stop), max(start, stop)
                if start < stop:
                    assert np.array_equal(tensor.read(int(start), int(stop)), whole[start:stop]), name


def test_value_heads_go_from_grouped_to_tiled():
    keys = {
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "embedding_length": 8,
        "attention.key_length": 8,
        "ssm.state_size": 4,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "nextn_predict_layers": 0,
        "block_count": 1,
        "vocab_size": 8,
        "feed_forward_length": 8,
        "ssm.conv_kernel": 4,
    }
    geometry = Geometry({f"qwen35.{key}": value for key, value in keys.items()})
    assert geometry.head_order.tolist() == [0, 3, 1, 4, 2, 5]
    # head j * r + m (key head j) stands at m * Nk + j, so that key head of a tiled head h is h % Nk
    assert [old // 3 for old in geometry.head_order] == [head % 2 for head in range(6)]


@pytest.fixture
def folder(tiny_huggingface, tmp_path):
    copy = tmp_path / "Qwen3.8-Tiny"
    shutil.copytree(tiny_huggingface(*GOLDEN["small-r3"]), copy)
    return copy


def edited(folder, edit, nested=True):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config["text_config"] if nested else config)
    path.write_text(json.dumps(config))
    return open_safetensors_folder(folder)


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "qwen4_exp"),
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("mtp_use_dedicated_embeddings", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_size", "256"),
        ("hidden_size", 0),
        ("num_hidden_layers", 1 << 40),
        ("head_dim", True),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "window", "full_attention", "full_attention"]),
        ("linear_value_head_dim", 64),
        ("partial_rotary_factor", 0.5),
        ("rms_norm_eps", None),
        ("rope_parameters", 7),
        ("mtp_num_hidden_layers", 2),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_its_key(folder, key, value):
    key_told = {"mtp_num_hidden_layers": "nextn_predict_layers"}.get(key, key)
    with edited(folder, lambda text: text.update({key: value})) as source, pytest.raises(ModelError, match=key_told):
        translate_huggingface(source)


def test_an_unknown_model_type_at_the_top_is_refused(folder):
    with (
        edited(folder, lambda top: top.update(model_type="llama"), nested=False) as source,
        pytest.raises(ModelError, match="model_type is llama"),
    ):
        translate_huggingface(source)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.pop("partial_rotary_factor"),
        lambda text: text["rope_parameters"].pop("partial_rotary_factor"),
        lambda text: (text.pop("layer_types"), text.pop("output_gate_type")),
    ],
)
def test_keys_may_stand_in_either_place_or_be_absent(folder, edit):
    with edited(folder, edit) as source:
        metadata, _ = translate_huggingface(source)
    assert metadata["qwen35.rope.dimension_count"] == 64
    assert metadata["qwen35.attention.recurrent_layers"] == [True, True, True, False, False]
    assert metadata["general.name"] == "Qwen3.8-Tiny"


def test_flat_configs_with_short_names_give_the_same(tiny_huggingface):
    with (
        open_safetensors_folder(tiny_huggingface("--flat", *GOLDEN["small-r3"])) as flat,
        open_safetensors_folder(tiny_huggingface(*GOLDEN["small-r3"])) as nested,
    ):
        (flat_keys, flat_tensors), (keys, tensors) = translate_huggingface(flat), translate_huggingface(nested)
        assert flat_keys == keys and list(flat_tensors) == list(tensors)
        assert all(
            np.array_equal(tensor.read(0, tensor.rows), tensors[name].read(0, tensor.rows))
            for name, tensor in flat_tensors.items()
        )


def test_a_model_without_a_draft_layer_has_none(tiny_huggingface):
    with open_safetensors_folder(tiny_huggingface("--no-mtp", "--layers", "4")) as source:
        metadata, tensors = translate_huggingface(source)
    assert (metadata["qwen35.block_count"], metadata["qwen35.nextn_predict_layers"]) == (4, 0)
    assert not any(name.startswith("blk.4.") for name in tensors)


def with_tensor(source, name, shape):
    source.tensors[name] = SourceTensor(name, shape, 0, lambda start, stop: np.zeros((stop - start, 1), np.float32))


def test_vision_tensors_are_ignored_and_strangers_are_not(folder):
    with open_safetensors_folder(folder) as source:
        with_tensor(source, "model.visual.blocks.0.weight", (3, 3))
        translate_huggingface(source)
        with_tensor(source, "model.language_model.layers.0.extra.weight", (3, 3))
        with pytest.raises(ModelError, match="extra.weight .* no place"):
            translate_huggingface(source)


def test_missing_and_misshapen_tensors_are_named(folder):
    with open_safetensors_folder(folder) as source:
        kept = source.tensors.pop("mtp.fc.weight")
        with pytest.raises(ModelError, match=r"mtp.fc.weight \[256, 512\] is missing"):
            translate_huggingface(source)
        source.tensors["mtp.fc.weight"] = kept
        with_tensor(source, "mtp.norm.weight", (255,))
        with pytest.raises(ModelError, match=r"mtp.norm.weight is \[255\], expected \[256\]"):
            translate_huggingface(source)


def test_an_untied_config_needs_its_head_and_two_opinions_are_settled_by_it(folder):
    with edited(
        folder, lambda top: top.update(tie_word_embeddings=True), nested=False
    ) as source:  # text_config says false
        assert "output.weight" in translate_huggingface(source)[1]
        source.tensors.pop("lm_head.weight")
        assert "output.weight" not in translate_huggingface(source)[1]
    with edited(folder, lambda top: top.update(tie_word_embeddings=False), nested=False) as source:
        source.tensors.pop("lm_head.weight")
        with pytest.raises(ModelError, match="lm_head.weight .* is missing"):
            translate_huggingface(source)


def test_older_gguf_keys_are_completed_from_the_tensors(shared):
    with open_gguf(shared / "oracle/golden/small-r3.gguf") as source:
        complete, tensors = translate_gguf(source)
        for key in ("vocab_size", "nextn_predict_layers", "attention.recurrent_layers"):
            source.metadata.pop(f"qwen35.{key}")
        source.metadata["qwen35.block_count"] = 4
        assert translate_gguf(source) == (complete, tensors)
        source.metadata["qwen35.attention.recurrent_layers"] = [True, False, True, False]
        with pytest.raises(ModelError, match="recurrent_layers"):
            translate_gguf(source)


def test_a_gguf_that_lost_its_draft_layer_asks_for_the_companion(shared):
    with open_gguf(shared / "oracle/golden/small-r3.gguf") as source:
        for name in [name for name in source.tensors if name.startswith("blk.4.")]:
            source.tensors.pop(name)
        with pytest.raises(ModelError) as caught:
            translate_gguf(source)
        assert "--mtp FILE" in caught.value.hint
        source.metadata["qwen35.nextn_predict_layers"] = 0
        source.metadata["qwen35.block_count"] = 4
        source.metadata.pop("qwen35.attention.recurrent_layers")
        assert translate_gguf(source)[0]["qwen35.block_count"] == 4


def test_another_architecture_is_refused(shared):
    with open_gguf(shared / "oracle/golden/small-r3.gguf") as source:
        source.metadata["general.architecture"] = "qwen4exp"
        with pytest.raises(ModelError, match="qwen4exp"):
            translate_gguf(source)


def test_names_come_from_the_download_cache_s_folders(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3.8-27B" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e7},
    }
    metadata, tied = config_metadata(config, folder)
    assert (metadata["general.name"], tied) == ("Qwen3.8-27B", False)


def test_tokenizer_template_and_ending_ids_come_along(tmp_path):
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 5, "content": "<|endoftext|>"}, "odd"]
    tokenizer = json.dumps({"added_tokens": added, "model": {}})
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "pad_token": {"content": "<|endoftext|>"},
                "bos_token": None,
                "chat_template": "from config",
            }
        )
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert tokenizer_metadata(tmp_path, {}) == {
        "tokenizer.huggingface.json": tokenizer,
        "tokenizer.chat_template": "from config",
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.padding_token_id": 5,
        "q27app.eos_token_ids": [7, 5],
    }
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert tokenizer_metadata(tmp_path, {})["tokenizer.chat_template"] == "from jinja"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer_metadata(tmp_path, {})["tokenizer.chat_template"] == "yes"
    assert tokenizer_metadata(tmp_path / "absent", {"text_config": {"eos_token_id": 3}}) == {
        "tokenizer.ggml.eos_token_id": 3,
        "q27app.eos_token_ids": [3],
    }
