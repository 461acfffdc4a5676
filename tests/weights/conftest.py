"""A plain forward pass, the judge of what files hold (float32 NumPy, a token at a time); and makers of source files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class PlainModel:
    """Greedy logits and drafts of a container's tensors; states live in the object, a token at a time."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.w = {name: tensor.values() for name, tensor in tensors.items()}
        key = {name.removeprefix("qwen35."): value for name, value in metadata.items()}
        self.layers = key["block_count"] - key.get("nextn_predict_layers", 0)
        self.heads, self.kv_heads = key["attention.head_count"], key["attention.head_count_kv"]
        self.dim, self.rotary, self.theta = (
            key["attention.key_length"],
            key["rope.dimension_count"],
            key["rope.freq_base"],
        )
        self.key_heads, self.value_heads, self.delta = (
            key["ssm.group_count"],
            key["ssm.time_step_rank"],
            key["ssm.state_size"],
        )
        self.eps = key["attention.layer_norm_rms_epsilon"]
        self.head = self.w.get("output.weight", self.w["token_embd.weight"])
        self.draft_head = self.w.get("output_q4.weight", self.head)
        self.cache: dict[int, list] = {}
        self.window: dict[int, np.ndarray] = {}
        self.state: dict[int, np.ndarray] = {}

    def step(self, token: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits, final hidden row) after `token`."""
        x = self.w["token_embd.weight"][token].copy()
        for index in range(self.layers):
            x = self.layer(index, x, position)
        final = _rms(x, self.eps) * self.w["output_norm.weight"]
        return self.head @ final, final

    def draft(self, token: int, hidden: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits of the token after `token`, the draft layer's own hidden row)."""
        block = f"blk.{self.layers}.nextn."
        pair = [
            _rms(self.w["token_embd.weight"][token], self.eps) * self.w[block + "enorm.weight"],
            _rms(hidden, self.eps) * self.w[block + "hnorm.weight"],
        ]
        x = self.layer(self.layers, self.w[block + "eh_proj.weight"] @ np.concatenate(pair), position)
        own = _rms(x, self.eps) * self.w[block + "shared_head_norm.weight"]
        return self.draft_head @ own, own

    def layer(self, index: int, x: np.ndarray, position: int) -> np.ndarray:
        block = f"blk.{index}."
        mixer = self.attention if block + "attn_q.weight" in self.w else self.gated_delta
        x = x + mixer(index, block, _rms(x, self.eps) * self.w[block + "attn_norm.weight"], position)
        y = _rms(x, self.eps) * self.w[block + "post_attention_norm.weight"]
        gate = self.w[block + "ffn_gate.weight"] @ y
        return x + self.w[block + "ffn_down.weight"] @ (gate * _sigmoid(gate) * (self.w[block + "ffn_up.weight"] @ y))

    def attention(self, index: int, block: str, y: np.ndarray, position: int) -> np.ndarray:
        both = (self.w[block + "attn_q.weight"] @ y).reshape(self.heads, 2, self.dim)
        query = self.rope(_rms(both[:, 0], self.eps) * self.w[block + "attn_q_norm.weight"], position)
        key = (self.w[block + "attn_k.weight"] @ y).reshape(self.kv_heads, self.dim)
        key = self.rope(_rms(key, self.eps) * self.w[block + "attn_k_norm.weight"], position)
        value = (self.w[block + "attn_v.weight"] @ y).reshape(self.kv_heads, self.dim)
        self.cache.setdefault(index, []).append((key, value))
        keys = np.stack([entry[0] for entry in self.cache[index]])
        values = np.stack([entry[1] for entry in self.cache[index]])
        out = np.empty((self.heads, self.dim), np.float32)
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            score = keys[:, group] @ query[head] / np.sqrt(self.dim)
            weight = np.exp(score - score.max())
            out[head] = weight @ values[:, group] / weight.sum()
        return self.w[block + "attn_output.weight"] @ (out * _sigmoid(both[:, 1])).reshape(-1)

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.rotary // 2
        angle = position * self.theta ** (-2.0 * np.arange(half) / self.rotary)
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        left, right = x[:, :half], x[:, half : self.rotary]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin, x[:, self.rotary :]], axis=1)

    def gated_delta(self, index: int, block: str, y: np.ndarray, position: int) -> np.ndarray:
        taps = self.w[block + "ssm_conv1d.weight"]
        window = self.window.get(index, np.zeros_like(taps))
        self.window[index] = window = np.concatenate(
            [window[:, 1:], (self.w[block + "attn_qkv.weight"] @ y)[:, None]], axis=1
        )
        mixed = (window * taps).sum(axis=1)
        mixed = mixed * _sigmoid(mixed)
        split = self.key_heads * self.delta
        query, key, value = (
            mixed[:split],
            mixed[split : 2 * split],
            mixed[2 * split :].reshape(self.value_heads, self.delta),
        )
        query, key = (part.reshape(self.key_heads, self.delta) for part in (query, key))
        query = query / np.sqrt((query**2).sum(axis=1, keepdims=True) + 1e-6) / np.sqrt(self.delta)
        key = key / np.sqrt((key**2).sum(axis=1, keepdims=True) + 1e-6)
        beta = _sigmoid(self.w[block + "ssm_beta.weight"] @ y)
        decay = np.exp(
            self.w[block + "ssm_a"]
            * np.logaddexp(0, self.w[block + "ssm_alpha.weight"] @ y + self.w[block + "ssm_dt.bias"])
        )
        state = self.state.setdefault(index, np.zeros((self.value_heads, self.delta, self.delta), np.float32))
        out = np.empty((self.value_heads, self.delta), np.float32)
        for head in range(self.value_heads):
            j = head % self.key_heads
            state[head] *= decay[head]
            state[head] += np.outer(key[j], beta[head] * (value[head] - state[head].T @ key[j]))
            out[head] = state[head].T @ query[j]
        z = (self.w[block + "attn_gate.weight"] @ y).reshape(self.value_heads, self.delta)
        gated = _rms(out, self.eps) * self.w[block + "ssm_norm.weight"] * z * _sigmoid(z)
        return self.w[block + "ssm_out.weight"] @ gated.reshape(-1)


@pytest.fixture
def plain_model():
    """PlainModel(metadata, tensors)."""
    return PlainModel


def save_safetensors(path, tensors: Mapping[str, tuple[str, np.ndarray]], header_edit=None) -> None:
    """tensors: name -> (dtype name, array of the stored bits). header_edit(header) may lie."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, (kind, array) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        blobs.append(array.tobytes())
        offset += array.nbytes
    if header_edit is not None:
        header_edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(
    keys: Mapping[str, bytes], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]], version: int = 3
) -> bytes:
    """keys: name -> type and value, packed. tensors: name -> (row-major shape, type, data)."""
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(keys))]
    out += [gguf_string(name) + value for name, value in keys.items()]
    offset, blobs = 0, []
    for name, (shape, kind, data) in tensors.items():
        out.append(gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset))
        blobs.append(data + b"\0" * (-len(data) % 32))
        offset += len(blobs[-1])
    head = b"".join(out)
    return head + b"\0" * (-len(head) % 32) + b"".join(blobs)


@pytest.fixture
def write_safetensors():
    return save_safetensors


@pytest.fixture
def make_gguf():
    return gguf_bytes


@pytest.fixture(scope="session")
def tiny_huggingface(shared, tmp_path_factory):
    """make(*arguments) -> folder of the oracle's random checkpoint; made once for equal arguments."""
    made: dict[tuple[str, ...], Any] = {}

    def make(*arguments: str):
        if arguments not in made:
            folder = tmp_path_factory.mktemp("huggingface") / "tiny"
            subprocess.run(
                [sys.executable, str(shared / "oracle" / "make_tiny_hf.py"), str(folder), *arguments], check=True
            )
            made[arguments] = folder
        return made[arguments]

    return make
