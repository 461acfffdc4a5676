"""The network's geometry, read from a container's metadata and checked key by key.

Keys are GGUF's (`qwen35.*`), which `.q27` keeps; names of the fields are those of the Hugging Face config where one
exists. Whatever the layers cannot compute is refused here, naming the key, its value and what would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from q27app.errors import ModelError

LayerKind = Literal["attention", "delta"]

ARCHITECTURE = "qwen35"
PREFIX = ARCHITECTURE + "."
MAX_LAYERS = 512
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of one checkpoint.

    layer_kinds has one entry for each main layer; the MTP layer (block index num_layers) is always attention.
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

    @property
    def attention_width(self) -> int:
        """A D: inputs of the attention's output projection."""
        return self.num_heads * self.head_dim

    @property
    def delta_width(self) -> int:
        """Nv Dv: inputs of the delta block's output projection."""
        return self.delta_value_heads * self.delta_head_dim

    @property
    def conv_channels(self) -> int:
        """C = 2 Nk Dk + Nv Dv."""
        return (2 * self.delta_key_heads + self.delta_value_heads) * self.delta_head_dim

    @property
    def attention_project_width(self) -> int:
        """Rows of stage A in an attention layer: per head query and gate, then keys, then values."""
        return 2 * self.attention_width + 2 * self.num_kv_heads * self.head_dim

    @property
    def delta_project_width(self) -> int:
        """Rows of stage A in a delta layer: qkv, z, beta, alpha."""
        return self.conv_channels + self.delta_width + 2 * self.delta_value_heads

    @property
    def num_attention_layers(self) -> int:
        return self.layer_kinds.count("attention")

    @property
    def num_delta_layers(self) -> int:
        return self.layer_kinds.count("delta")

    @property
    def num_kv_layers(self) -> int:
        """Layers that own keys and values: attention layers, then the MTP layer if there is one."""
        return self.num_attention_layers + (1 if self.num_mtp_layers else 0)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]
    ) -> "ModelConfig":
        """Read and check. tensor_shapes: name -> [out, in] of every tensor. Raises ModelError naming the key."""
        keys = _Keys(metadata)
        keys.fixed("general.architecture", ARCHITECTURE)
        keys.optional_fixed("group_q4", 64)
        keys.optional_fixed("group_q8", 128)
        keys.optional_fixed("nibble_order", "even=low")
        num_mtp = keys.integer(PREFIX + "nextn_predict_layers", 0, 1, default=0)
        num_layers = keys.integer(PREFIX + "block_count", 1 + num_mtp, MAX_LAYERS) - num_mtp
        head_dim = keys.integer(PREFIX + "attention.key_length", 8, 1024)
        keys.fixed(PREFIX + "attention.value_length", head_dim)
        num_heads = keys.integer(PREFIX + "attention.head_count", 1, 1024)
        num_kv_heads = keys.integer(PREFIX + "attention.head_count_kv", 1, num_heads)
        keys.require(num_heads % num_kv_heads == 0, PREFIX + "attention.head_count_kv",
                     f"a divisor of head_count = {num_heads}")
        rotary_dim = keys.integer(PREFIX + "rope.dimension_count", 2, head_dim)
        keys.require(rotary_dim % 2 == 0, PREFIX + "rope.dimension_count", "an even number")
        keys.optional_fixed(PREFIX + "rope.scaling.type", "none")
        value_heads = keys.integer(PREFIX + "ssm.time_step_rank", 1, 1024)
        key_heads = keys.integer(PREFIX + "ssm.group_count", 1, value_heads)
        keys.require(value_heads % key_heads == 0, PREFIX + "ssm.group_count",
                     f"a divisor of ssm.time_step_rank = {value_heads}")
        delta_dim = keys.integer(PREFIX + "ssm.state_size", 8, 1024)
        keys.fixed(PREFIX + "ssm.inner_size", value_heads * delta_dim)
        vocab_size = _vocab_size(tensor_shapes)
        kinds = _layer_kinds(keys, tensor_shapes, num_layers)
        return cls(
            name=str(metadata.get("general.name", "unnamed"))[:200],
            num_layers=num_layers,
            layer_kinds=kinds,
            num_mtp_layers=num_mtp,
            hidden_size=keys.integer(PREFIX + "embedding_length", 8, MAX_WIDTH),
            intermediate_size=keys.integer(PREFIX + "feed_forward_length", 8, MAX_WIDTH),
            vocab_size=vocab_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=keys.number(PREFIX + "rope.freq_base", 1.0, 1e12),
            delta_key_heads=key_heads,
            delta_value_heads=value_heads,
            delta_head_dim=delta_dim,
            conv_width=keys.integer(PREFIX + "ssm.conv_kernel", 2, 16),
            norm_eps=keys.number(PREFIX + "attention.layer_norm_rms_epsilon", 0.0, 1e-2),
            max_context=keys.integer(PREFIX + "context_length", 64, MAX_CONTEXT),
            tied="output.weight" not in tensor_shapes,
        )


class _Keys:
    """Typed access to metadata; every complaint names key, value and expectation."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def value(self, key: str) -> Any:
        if key not in self.metadata:
            raise ModelError(f"metadata key {key} is missing.", "Convert the checkpoint again: q27app convert SRC DST")
        return self.metadata[key]

    def require(self, condition: bool, key: str, expected: str) -> None:
        if not condition:
            raise ModelError(f"metadata key {key} is {_short(self.metadata.get(key))}, expected {expected}.")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and key not in self.metadata:
            return default
        value = self.value(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        self.require(ok, key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.value(key)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low < value <= high
        self.require(ok, key, f"a number above {low:g} and up to {high:g}")
        return float(value)

    def fixed(self, key: str, expected: Any) -> None:
        self.require(self.value(key) == expected, key, repr(expected))

    def optional_fixed(self, key: str, expected: Any) -> None:
        if key in self.metadata:
            self.fixed(key, expected)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _vocab_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ModelError("tensor token_embd.weight is missing.", "Convert the checkpoint again: q27app convert SRC DST")
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_VOCAB:
        raise ModelError(f"token_embd.weight is {list(shape)}, expected [vocabulary up to {MAX_VOCAB}, hidden].")
    return shape[0]


def _layer_kinds(
    keys: _Keys, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> tuple[LayerKind, ...]:
    """A layer is what its tensors are; metadata that says otherwise is refused."""
    kinds: list[LayerKind] = []
    for index in range(num_layers):
        has_attention = f"blk.{index}.attn_q.weight" in shapes
        has_delta = f"blk.{index}.attn_qkv.weight" in shapes
        if has_attention == has_delta:
            found = "both" if has_delta else "neither"
            raise ModelError(
                f"block {index} has {found} of blk.{index}.attn_q.weight and blk.{index}.attn_qkv.weight, expected one: "
                "full attention or gated delta."
            )
        kinds.append("attention" if has_attention else "delta")
    recurrent = keys.metadata.get(PREFIX + "attention.recurrent_layers")
    if isinstance(recurrent, list):
        told = ["delta" if flag else "attention" for flag in recurrent[:num_layers]]
        keys.require(told == kinds, PREFIX + "attention.recurrent_layers",
                     "one flag a block, true exactly for the blocks with attn_qkv")
    return tuple(kinds)
