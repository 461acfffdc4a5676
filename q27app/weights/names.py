"""One table of the network's tensors: Hugging Face name, `.q27` (= GGUF) name, shape, and the transform between them.

    plus_one        norms are stored around 0 by Hugging Face, around 1 here
    heads           value heads: from grouped by key head (head j * r + m) to tiled (m * Nk + j), along rows or a vector
    value_rows      the same in blocks of Dv rows
    qkv_rows        the same, only the rows after queries and keys
    value_columns   the same in blocks of Dv columns
    decay           A_log becomes -exp(A_log), then heads

The order is new[i] = old[P[i]], P = arange(Nv).reshape(Nk, r).T.ravel(); the identity if Nk = Nv. Transforms work row
range by row range on what the source reads; nothing is held.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.errors import ModelError
from q27app.weights.hf_config import ARCHITECTURE, config_metadata, tokenizer_metadata
from q27app.weights.source import Source, SourceTensor

MAX_BLOCKS = 512
MAX_INTEGER = 1 << 30
DOWNLOAD = "Download the checkpoint again, or give the one that the file names."

Reader = Callable[[int, int], np.ndarray]
"""read(start, stop) of a SourceTensor."""


@dataclass(frozen=True)
class TensorRule:
    """hf and name: below the block's prefix. shape: dimension names of `Geometry.sizes`."""

    hf: str
    name: str
    shape: tuple[str, ...]
    transform: str = ""


EVERY_BLOCK = (
    TensorRule("input_layernorm.weight", "attn_norm.weight", ("H",), "plus_one"),
    TensorRule("post_attention_layernorm.weight", "post_attention_norm.weight", ("H",), "plus_one"),
    TensorRule("mlp.gate_proj.weight", "ffn_gate.weight", ("F", "H")),
    TensorRule("mlp.up_proj.weight", "ffn_up.weight", ("F", "H")),
    TensorRule("mlp.down_proj.weight", "ffn_down.weight", ("H", "F")),
)
ATTENTION = (
    TensorRule("self_attn.q_proj.weight", "attn_q.weight", ("2AD", "H")),
    TensorRule("self_attn.k_proj.weight", "attn_k.weight", ("GD", "H")),
    TensorRule("self_attn.v_proj.weight", "attn_v.weight", ("GD", "H")),
    TensorRule("self_attn.o_proj.weight", "attn_output.weight", ("H", "AD")),
    TensorRule("self_attn.q_norm.weight", "attn_q_norm.weight", ("D",), "plus_one"),
    TensorRule("self_attn.k_norm.weight", "attn_k_norm.weight", ("D",), "plus_one"),
)
DELTA = (
    TensorRule("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", ("C", "H"), "qkv_rows"),
    TensorRule("linear_attn.in_proj_z.weight", "attn_gate.weight", ("NvDv", "H"), "value_rows"),
    TensorRule("linear_attn.in_proj_b.weight", "ssm_beta.weight", ("Nv", "H"), "heads"),
    TensorRule("linear_attn.in_proj_a.weight", "ssm_alpha.weight", ("Nv", "H"), "heads"),
    TensorRule("linear_attn.A_log", "ssm_a", ("Nv",), "decay"),
    TensorRule("linear_attn.dt_bias", "ssm_dt.bias", ("Nv",), "heads"),
    TensorRule("linear_attn.conv1d.weight", "ssm_conv1d.weight", ("C", "K"), "qkv_rows"),
    TensorRule("linear_attn.norm.weight", "ssm_norm.weight", ("Dv",)),
    TensorRule("linear_attn.out_proj.weight", "ssm_out.weight", ("H", "NvDv"), "value_columns"),
)
DRAFT = (
    TensorRule("fc.weight", "nextn.eh_proj.weight", ("H", "2H")),
    TensorRule("pre_fc_norm_embedding.weight", "nextn.enorm.weight", ("H",), "plus_one"),
    TensorRule("pre_fc_norm_hidden.weight", "nextn.hnorm.weight", ("H",), "plus_one"),
    TensorRule("norm.weight", "nextn.shared_head_norm.weight", ("H",), "plus_one"),
)
EMBEDDING = TensorRule("embed_tokens.weight", "token_embd.weight", ("V", "H"))
FINAL_NORM = TensorRule("norm.weight", "output_norm.weight", ("H",), "plus_one")
HEAD = TensorRule("lm_head.weight", "output.weight", ("V", "H"))
GGUF_OPTIONAL = {"nextn.shared_head_norm.weight": ("H",), "nextn.embed_tokens.weight": ("V", "H"),
                 "nextn.shared_head_head.weight": ("V", "H")}


class Geometry:
    """Sizes by the names that the table uses, from `qwen35.*` metadata. ModelError names a key that will not do."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        key_heads, value_heads = self.integer("ssm.group_count"), self.integer("ssm.time_step_rank")
        if value_heads % key_heads:
            raise ModelError(f"metadata key {ARCHITECTURE}.ssm.group_count is {key_heads}, expected a divisor of "
                             f"ssm.time_step_rank = {value_heads}.")
        hidden, head_dim = self.integer("embedding_length"), self.integer("attention.key_length")
        delta_dim = self.integer("ssm.state_size")
        heads, kv_heads = self.integer("attention.head_count"), self.integer("attention.head_count_kv")
        self.num_mtp = self.integer("nextn_predict_layers", low=0, default=0)
        self.num_layers = self.integer("block_count", high=MAX_BLOCKS) - self.num_mtp
        if self.num_mtp > 1 or self.num_layers < 1:
            raise ModelError(
                f"metadata keys {ARCHITECTURE}.block_count = {self.num_layers + self.num_mtp} and nextn_predict_layers "
                f"= {self.num_mtp}; expected at least one layer and at most one draft layer.")
        self.value_dim = delta_dim
        self.head_order = np.arange(value_heads).reshape(key_heads, value_heads // key_heads).T.ravel()
        self.sizes = {
            "V": self.integer("vocab_size"), "H": hidden, "2H": 2 * hidden, "F": self.integer("feed_forward_length"),
            "2AD": 2 * heads * head_dim, "AD": heads * head_dim, "GD": kv_heads * head_dim, "D": head_dim,
            "C": (2 * key_heads + value_heads) * delta_dim, "NvDv": value_heads * delta_dim, "Nv": value_heads,
            "Dv": delta_dim, "K": self.integer("ssm.conv_kernel"), "QK": 2 * key_heads * delta_dim,
        }

    def integer(self, key: str, low: int = 1, high: int = MAX_INTEGER, default: int | None = None) -> int:
        value = self.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelError(
                f"metadata key {ARCHITECTURE}.{key} is {str(value)[:80]}, expected an integer from {low} to {high}.")
        return value

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)


def block_rules(recurrent: bool, draft: bool) -> tuple[TensorRule, ...]:
    """The tensors of one block; `draft`: without nextn.*, which stand below another Hugging Face prefix."""
    return EVERY_BLOCK + (DELTA if recurrent and not draft else ATTENTION)


def all_rules(geometry: Geometry, recurrent: list[bool], tied: bool) -> list[tuple[str, str, TensorRule]]:
    """(Hugging Face name without `model.`, `.q27` name, rule) of every tensor in file order."""
    found = [(EMBEDDING.hf, EMBEDDING.name, EMBEDDING), (FINAL_NORM.hf, FINAL_NORM.name, FINAL_NORM)]
    if not tied:
        found.append((HEAD.hf, HEAD.name, HEAD))
    for index in range(geometry.num_layers):
        found += [(f"layers.{index}.{rule.hf}", f"blk.{index}.{rule.name}", rule)
                   for rule in block_rules(recurrent[index], False)]
    if geometry.num_mtp:
        block = f"blk.{geometry.num_layers}."
        found += [(f"mtp.layers.0.{rule.hf}", block + rule.name, rule) for rule in block_rules(False, True)]
        found += [(f"mtp.{rule.hf}", block + rule.name, rule) for rule in DRAFT]
    return found


def translate_huggingface(source: Source) -> tuple[dict[str, Any], dict[str, SourceTensor]]:
    """`.q27` metadata and tensors (in file order, transformed as they are read) of a Hugging Face folder.

    ModelError names the config key or the tensor that is missing, of another shape, or unknown.
    """
    metadata, tied = config_metadata(source.metadata, source.path)
    geometry = Geometry(metadata)
    recurrent = metadata[f"{ARCHITECTURE}.attention.recurrent_layers"]
    nested = any(name.startswith("model.language_model.") for name in source.tensors)
    prefix = "model.language_model." if nested else "model."
    if tied is None:
        tied = HEAD.hf not in source.tensors
    tensors, used = {}, set()
    for hf, name, rule in all_rules(geometry, recurrent, tied):
        full = hf if hf.startswith(("lm_head.", "mtp.")) else prefix + hf
        if full not in source.tensors:
            raise ModelError(f"{source.path}: tensor {full} {list(geometry.shape(rule.shape))} is missing.", DOWNLOAD)
        used.add(full)
        tensors[name] = transformed(source.tensors[full], name, rule, geometry)
    unknown = sorted(name for name in source.tensors.keys() - used
                     if not name.startswith("model.visual.") and not (tied and name == HEAD.hf))
    if unknown:
        raise ModelError(
            f"{source.path}: tensor {unknown[0][:200]} {list(source.tensors[unknown[0]].shape)} has no place in this "
            f"model ({len(unknown)} such tensors).", DOWNLOAD)
    return metadata | tokenizer_metadata(source.path, source.metadata), tensors


def translate_gguf(source: Source) -> tuple[dict[str, Any], dict[str, SourceTensor]]:
    """The same of a GGUF, whose names and values are those of `.q27`. Fills in the keys that older files lack."""
    metadata = {key: value for key, value in source.metadata.items()
                if key.startswith((f"{ARCHITECTURE}.", "general.", "tokenizer."))}
    if metadata.get("general.architecture") != ARCHITECTURE:
        raise ModelError(f"{source.path}: general.architecture is {str(metadata.get('general.architecture'))[:80]}, "
                         f"expected {ARCHITECTURE}.", "Only the dense Qwen3.5 family (Qwen3.5, 3.6 and 3.8) runs.")
    _complete(metadata, source)
    geometry = Geometry(metadata)
    recurrent = metadata[f"{ARCHITECTURE}.attention.recurrent_layers"]
    tied = HEAD.name not in source.tensors
    tensors = {}
    for _, name, rule in all_rules(geometry, recurrent, tied):
        if name in source.tensors:
            tensors[name] = _of_shape(source.tensors[name], name, geometry.shape(rule.shape), source)
        elif rule.name not in GGUF_OPTIONAL:
            is_draft = name.startswith(f"blk.{geometry.num_layers}.")
            hint = "Give the companion file too: --mtp FILE." if is_draft else DOWNLOAD
            raise ModelError(f"{source.path}: tensor {name} {list(geometry.shape(rule.shape))} is missing.", hint)
    for short, shape in GGUF_OPTIONAL.items():
        name = f"blk.{geometry.num_layers}.{short}"
        if geometry.num_mtp and name in source.tensors and name not in tensors:
            tensors[name] = _of_shape(source.tensors[name], name, geometry.shape(shape), source)
    unknown = sorted(source.tensors.keys() - tensors.keys())
    if unknown:
        raise ModelError(
            f"{source.path}: tensor {unknown[0]} {list(source.tensors[unknown[0]].shape)} has no place in this model.",
            DOWNLOAD)
    return metadata, tensors


def _complete(metadata: dict[str, Any], source: Source) -> None:
    """vocab_size, block_count with the draft layer, nextn_predict_layers and recurrent_layers, from the tensors."""
    numbers = {name: re.match(r"blk\.(\d{1,4})\.", name) for name in source.tensors}
    blocks = {int(match[1]) for match in numbers.values() if match}
    draft = {int(numbers[name][1]) for name in source.tensors if numbers[name] and ".nextn." in name}
    key = f"{ARCHITECTURE}."
    embedding = source.tensors.get(EMBEDDING.name)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source.path}: tensor {EMBEDDING.name} [vocabulary, hidden] is missing.", DOWNLOAD)
    metadata[key + "vocab_size"] = embedding.shape[0]
    told = metadata.get(key + "nextn_predict_layers", 0)
    if draft and told == 0:
        metadata[key + "nextn_predict_layers"] = told = 1
        metadata[key + "block_count"] = max(blocks) + 1
    elif not draft and told == 1 and metadata.get(key + "block_count") == len(blocks) and blocks:
        raise ModelError(f"{source.path}: {key}nextn_predict_layers is 1 and no tensor blk.N.nextn.* is there.",
                         "Give the companion file too: --mtp FILE.")
    geometry = Geometry(metadata)
    found = [f"blk.{index}.attn_qkv.weight" in source.tensors for index in range(geometry.num_layers)]
    found += [False] * geometry.num_mtp
    flags = metadata.setdefault(key + "attention.recurrent_layers", found)
    if flags[:geometry.num_layers] != found[:geometry.num_layers]:
        raise ModelError(
            f"{source.path}: {key}attention.recurrent_layers does not say which blocks hold attn_qkv.", DOWNLOAD)
    metadata[key + "attention.recurrent_layers"] = found


def _of_shape(tensor: SourceTensor, name: str, shape: tuple[int, ...], source: Source) -> SourceTensor:
    if tensor.shape != shape:
        raise ModelError(f"{source.path}: {tensor.name} is {list(tensor.shape)}, expected {list(shape)}.", DOWNLOAD)
    return tensor


def transformed(tensor: SourceTensor, name: str, rule: TensorRule, geometry: Geometry) -> SourceTensor:
    """`tensor` under its `.q27` name, with the rule's transform applied to what it reads."""
    shape = geometry.shape(rule.shape)
    squeezed = (tensor.shape[0], tensor.shape[-1]) if len(tensor.shape) == 3 and tensor.shape[1] == 1 else tensor.shape
    if squeezed != shape:
        raise ModelError(f"{tensor.name} is {list(tensor.shape)}, expected {list(shape)}.", DOWNLOAD)
    return SourceTensor(name, shape, tensor.nbytes, _reader(tensor, rule.transform, geometry, len(shape) == 1))


def _reader(tensor: SourceTensor, transform: str, geometry: Geometry, vector: bool) -> Reader:
    read, order = tensor.read, geometry.head_order
    if transform == "plus_one":
        return lambda start, stop: read(start, stop) + np.float32(1)
    if transform == "decay":
        return lambda start, stop: -np.exp(read(start, stop).astype(np.float64)).astype(np.float32)[:, order]
    if not transform or (order == np.arange(len(order))).all():
        return read
    if vector:
        return lambda start, stop: read(start, stop)[:, order]
    if transform == "value_columns":
        return _column_reader(read, order, geometry.value_dim)
    first = geometry.sizes["QK"] if transform == "qkv_rows" else 0
    return _row_reader(read, order, first, 1 if transform == "heads" else geometry.value_dim)


def _column_reader(read: Reader, order: np.ndarray, block: int) -> Reader:
    def permuted(start: int, stop: int) -> np.ndarray:
        values = read(start, stop)
        return values.reshape(len(values), len(order), block)[:, order].reshape(values.shape)

    return permuted


def _row_reader(read: Reader, order: np.ndarray, first: int, block: int) -> Reader:
    """Rows before `first` as they are; after it, blocks of `block` rows in `order`."""
    def permuted(start: int, stop: int) -> np.ndarray:
        pieces, row = [], start
        while row < stop:
            if row < first:
                end, old = min(stop, first), row
            else:
                head, inside = divmod(row - first, block)
                end, old = min(stop, row + block - inside), first + int(order[head]) * block + inside
            pieces.append(read(old, old + end - row))
            row = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return permuted
