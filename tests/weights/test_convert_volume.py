"""Memory and speed of conversions, on sparse files: each runs in a process of its own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHILD = """
import json, resource, sys
from q27app.weights.convert import convert
report = convert(*sys.argv[1:4])
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss begins at the parent's; VmHWM is this process's own peak
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([peak, report.num_weights, used.ru_utime + used.ru_stime]))
"""


def sparse_folder(path: Path, vocab: int, hidden: int) -> None:
    """A one-layer checkpoint of zeros whose embedding has vocab * hidden weights; the file has no disk blocks."""
    path.mkdir()
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "layer_types": ["full_attention"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e7},
    }
    (path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        layer + "input_layernorm.weight": [hidden],
        layer + "post_attention_layernorm.weight": [hidden],
        layer + "mlp.gate_proj.weight": [128, hidden],
        layer + "mlp.up_proj.weight": [128, hidden],
        layer + "mlp.down_proj.weight": [hidden, 128],
        layer + "self_attn.q_proj.weight": [256, hidden],
        layer + "self_attn.k_proj.weight": [128, hidden],
        layer + "self_attn.v_proj.weight": [128, hidden],
        layer + "self_attn.o_proj.weight": [hidden, 128],
        layer + "self_attn.q_norm.weight": [128],
        layer + "self_attn.k_norm.weight": [128],
    }
    header, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def run(folder: Path) -> tuple[int, int, float]:
    """(peak bytes, weights, processor seconds) of a conversion to q4s."""
    command = [sys.executable, "-c", CHILD, str(folder / "source"), str(folder / "a.q27"), "q4s"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return tuple(json.loads(done.stdout))


@pytest.mark.long
def test_memory_stays_small_and_speed_high_on_a_27b_embedding(tmp_path, long_scale):
    rows = max(16_384, round(248_320 * long_scale))
    sparse_folder(tmp_path / "source", rows, 5120)
    assert (tmp_path / "source/model.safetensors").stat().st_size > 2 * rows * 5120
    peak, weights, seconds = run(tmp_path)
    assert peak < 2e9
    # 100 million weights a second on two cores are 50 million for each second of a processor
    assert weights / seconds > 50e6, f"{weights / seconds / 1e6:.0f} million weights a processor second"


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    """A tensor of 160 MB passes through a process that stays below 300 MB, interpreter and libraries included."""
    sparse_folder(tmp_path / "source", 16_384, 5120)
    assert run(tmp_path)[0] < 300e6
