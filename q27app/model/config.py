"""The network's geometry, read from a container's metadata and checked key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["attention", "delta"]


@dataclass(frozen=True)
class ModelConfig:
    """Names are those of the Hugging Face config where one exists; spec: forward pass of the Qwen3.5 dense family.

    layer_kinds has one entry for each main layer; the MTP layer (index num_layers) is always attention.
    """

    name: str
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    num_mtp_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    delta_key_heads: int
    delta_value_heads: int
    delta_head_dim: int
    conv_width: int
    norm_eps: float
    max_context: int
    tied: bool
