"""Geometry from metadata: published shapes, and every refusal names its key."""

from __future__ import annotations

import pytest

from q27app.errors import ModelError
from q27app.model.config import ModelConfig
from tests.model import geometry



def test_the_27b_has_the_published_widths():
    config = geometry.config_27b()
    assert config.num_attention_layers == 16 and config.num_delta_layers == 48 and config.num_kv_layers == 17
    assert config.attention_project_width == 14336
    assert config.delta_project_width == 16480
    assert config.conv_channels == 10240
    assert not config.tied


@pytest.mark.parametrize("layers, interval", [(4, 4), (6, 2), (8, 4), (5, 3)])
def test_layer_kinds_come_from_the_tensors(layers, interval):
    config = ModelConfig.from_metadata(
        geometry.metadata(layers=layers, interval=interval), geometry.kind_shapes(layers, interval)
    )
    expected = tuple("attention" if (i + 1) % interval == 0 else "delta" for i in range(layers))
    assert config.layer_kinds == expected


def test_no_output_tensor_means_tied():
    assert ModelConfig.from_metadata(geometry.metadata(), geometry.kind_shapes(tied=True)).tied


def test_older_files_without_the_mtp_key_have_no_draft_layer():
    meta = geometry.metadata(mtp=0)
    del meta["qwen35.nextn_predict_layers"]
    config = ModelConfig.from_metadata(meta, geometry.kind_shapes())
    assert config.num_mtp_layers == 0 and config.num_layers == 4


@pytest.mark.parametrize(
    "key, value",
    [
        ("general.architecture", "llama"),
        ("qwen35.block_count", "5"),
        ("qwen35.block_count", 0),
        ("qwen35.block_count", 10**9),
        ("qwen35.attention.head_count", 0),
        ("qwen35.attention.head_count_kv", 4),
        ("qwen35.attention.value_length", 128),
        ("qwen35.attention.layer_norm_rms_epsilon", float("nan")),
        ("qwen35.rope.dimension_count", 63),
        ("qwen35.rope.dimension_count", 512),
        ("qwen35.rope.freq_base", -1.0),
        ("qwen35.rope.scaling.type", "yarn"),
        ("qwen35.ssm.inner_size", 512),
        ("qwen35.ssm.group_count", 4),
        ("qwen35.context_length", True),
        ("qwen35.attention.recurrent_layers", [True, True, False, True]),
        ("group_q4", 32),
        ("nibble_order", "odd=low"),
    ],
)
def test_a_value_that_cannot_run_is_refused_naming_the_key(key, value):
    meta = geometry.metadata() | {key: value}
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        ModelConfig.from_metadata(meta, geometry.kind_shapes())


@pytest.mark.parametrize("key", [k for k in geometry.metadata() if k.startswith("qwen35.") and k not in (
    "qwen35.nextn_predict_layers", "qwen35.full_attention_interval")])
def test_a_missing_key_is_named(key):
    meta = geometry.metadata()
    del meta[key]
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        ModelConfig.from_metadata(meta, geometry.kind_shapes())


def test_a_block_with_neither_mixer_is_refused():
    shapes = geometry.kind_shapes()
    del shapes["blk.2.attn_qkv.weight"]
    with pytest.raises(ModelError, match="block 2 has neither"):
        ModelConfig.from_metadata(geometry.metadata(), shapes)
