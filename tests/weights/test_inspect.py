"""`inspect`: the description of a small file, as data and as text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from q27app.weights.codecs import encode
from q27app.weights.container import open_container
from q27app.weights.dtypes import F32, Q4_G64, Q8_G128
from q27app.weights.inspect import describe, render_description
from q27app.weights.writer import TensorEntry, Writer

METADATA = {
    "general.name": "Tiny",
    "qwen35.block_count": 1,
    "qwen35.rope.dimension_sections": [11, 11, 10, 0],
    "q27app.tier": "default",
    "q27app.generation": "3.6",
    "tokenizer.ggml.tokens": ["a"] * 256,
    "evil": "x\x1b[2Jy",
    "long": "z" * 1000,
}


@pytest.fixture
def path(tmp_path):
    entries = [
        TensorEntry("token_embd.weight", Q8_G128, (256, 128)),
        TensorEntry("output_norm.weight", F32, (128,)),
        TensorEntry("output_q4.weight", Q4_G64, (256, 128)),
    ]
    with Writer(tmp_path / "tiny.q27", METADATA, entries) as writer:
        for entry in entries:
            writer.write(entry.name, *encode(np.ones((entry.rows, entry.cols), np.float32), entry.dtype))
    return tmp_path / "tiny.q27"


def described(path):
    with open_container(path) as container:
        return describe(container)


def test_the_description_is_json_with_every_part(path):
    description = described(path)
    assert json.loads(json.dumps(description)) == description
    assert description["file"] == {"path": str(path), "bytes": path.stat().st_size}
    assert description["model"] == {
        "name": "Tiny",
        "generation": "3.6",
        "tier": "default",
        "vocab_size": 256,
        "tied": True,
        "draft_head": True,
        "tokenizer": "tokenizer.ggml.tokens",
        "chat_template": False,
    }
    assert description["config"] == {"block_count": 1, "rope.dimension_sections": [11, 11, 10, 0]}
    assert description["metadata"]["tokenizer.ggml.tokens"] == "<256 elements>"
    assert description["metadata"]["long"] == "<1000 characters>"
    assert description["tensors"][2] == {
        "name": "output_q4.weight",
        "dtype": "Q4_G64",
        "shape": [256, 128],
        "bytes": 16384,
        "scale_bytes": 1024,
        "bits_per_weight": 4.25,
    }


def test_weights_count_once_and_bits_count_every_byte(path):
    totals = described(path)["totals"]
    size = 256 * 128 + 256 * 2 + 128 * 4 + 256 * 64 + 256 * 4
    assert (totals["tensors"], totals["weights"], totals["bytes"]) == (3, 256 * 128 + 128, size)
    assert totals["bits_per_weight"] == round(size * 8 / (256 * 128 + 128), 3)
    assert totals["formats"]["F32"] == {"tensors": 1, "weights": 128, "bytes": 512}
    assert list(totals["formats"]) == ["F32", "Q8_G128", "Q4_G64"]


def test_the_text_names_tier_config_and_each_tensor(path):
    text = render_description(described(path))
    for part in (
        "tier        default",
        "tied to the embedding, with a Q4 copy",
        "block_count",
        "token_embd.weight   Q8_G128",
    ):
        assert part in text
    assert max(map(len, text.splitlines()[2:])) <= 120


def test_control_characters_of_a_file_do_not_reach_the_terminal(path):
    text = render_description(described(path))
    assert "\x1b" not in text and "x\\x1b[2Jy" in text
