"""Binds a container's tensors to the layers: every name, shape and dtype is checked before anything is uploaded.

One weight is one row list for one stage. Stage A of an attention layer is attn_q (query and gate interleaved by head),
attn_k, attn_v; of a delta layer attn_qkv, attn_gate (z), ssm_beta, ssm_alpha; stage D is ffn_gate, ffn_up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from q27app.errors import ModelError
from q27app.kernels.backend import Backend, Weight
from q27app.model.config import ModelConfig
from q27app.weights.container import Container, Tensor

CONVERT_AGAIN = "Convert the checkpoint again: q27app convert SRC DST"


@dataclass(frozen=True)
class FeedForward:
    """norm [hidden]; gate_up [2 ffn, hidden]; down [hidden, ffn]."""

    norm: Weight
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class AttentionLayer:
    """Full attention. kv_index: which KV layer of the state. first_position: 1 in the MTP layer, else 0."""

    norm: Weight
    project: Weight
    q_norm: Weight
    k_norm: Weight
    output: Weight
    feed_forward: FeedForward
    kv_index: int
    first_position: int = 0


@dataclass(frozen=True)
class DeltaLayer:
    """Gated delta rule. a holds -exp(A_log). delta_index: which delta layer of a slot. Head order is `.q27`'s (tiled)."""

    norm: Weight
    project: Weight
    conv: Weight
    a: Weight
    dt_bias: Weight
    out_norm: Weight
    output: Weight
    feed_forward: FeedForward
    delta_index: int


@dataclass(frozen=True)
class MtpLayer:
    """The draft layer: fuse [hidden, 2 hidden] over [norm(embed) ; norm(hidden)], one attention layer, own final norm."""

    embed_norm: Weight
    hidden_norm: Weight
    fuse: Weight
    layer: AttentionLayer
    final_norm: Weight
    embed: Weight
    head: Weight


@dataclass(frozen=True)
class ModelWeights:
    """Everything on the backend. draft_head: the Q4 copy of the head where the tier has one, else the head."""

    embed: Weight
    layers: tuple[AttentionLayer | DeltaLayer, ...]
    final_norm: Weight
    head: Weight
    draft_head: Weight
    mtp: MtpLayer | None

    @property
    def nbytes(self) -> int:
        """Bytes on the backend, shared weights counted once."""
        seen: dict[int, int] = {}
        for name in self.__dataclass_fields__:
            _collect(getattr(self, name), seen)
        return sum(seen.values())


def _collect(value: object, seen: dict[int, int]) -> None:
    """Every backend weight below value, once: id -> bytes. The dataclasses of this file are the inner nodes."""
    if isinstance(value, tuple):
        for item in value:
            _collect(item, seen)
    elif isinstance(value, (FeedForward, AttentionLayer, DeltaLayer, MtpLayer)):
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name), seen)
    elif hasattr(value, "nbytes"):
        seen[id(value)] = int(value.nbytes)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs, with its shape [out, in] or [n]."""
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config.tied:
        shapes["output.weight"] = (vocab, hidden)
    for index in range(config.num_layers + config.num_mtp_layers):
        block = f"blk.{index}."
        shapes |= {
            block + "attn_norm.weight": (hidden,),
            block + "post_attention_norm.weight": (hidden,),
            block + "ffn_gate.weight": (ffn, hidden),
            block + "ffn_up.weight": (ffn, hidden),
            block + "ffn_down.weight": (hidden, ffn),
        }
        if index >= config.num_layers or config.layer_kinds[index] == "attention":
            shapes |= _attention_shapes(config, block)
        else:
            shapes |= _delta_shapes(config, block)
    if config.num_mtp_layers:
        block = f"blk.{config.num_layers}.nextn."
        shapes |= {
            block + "eh_proj.weight": (hidden, 2 * hidden),
            block + "enorm.weight": (hidden,),
            block + "hnorm.weight": (hidden,),
        }
    return shapes


def _attention_shapes(config: ModelConfig, block: str) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden_size, config.head_dim
    return {
        block + "attn_q.weight": (2 * config.attention_width, hidden),
        block + "attn_k.weight": (config.num_kv_heads * dim, hidden),
        block + "attn_v.weight": (config.num_kv_heads * dim, hidden),
        block + "attn_output.weight": (hidden, config.attention_width),
        block + "attn_q_norm.weight": (dim,),
        block + "attn_k_norm.weight": (dim,),
    }


def _delta_shapes(config: ModelConfig, block: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.delta_value_heads
    return {
        block + "attn_qkv.weight": (config.conv_channels, hidden),
        block + "attn_gate.weight": (config.delta_width, hidden),
        block + "ssm_beta.weight": (heads, hidden),
        block + "ssm_alpha.weight": (heads, hidden),
        block + "ssm_a": (heads,),
        block + "ssm_dt.bias": (heads,),
        block + "ssm_conv1d.weight": (config.conv_channels, config.conv_width),
        block + "ssm_norm.weight": (config.delta_head_dim,),
        block + "ssm_out.weight": (hidden, config.delta_width),
    }


def _optional_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"output_q4.weight": (vocab, hidden)}
    if config.num_mtp_layers:
        block = f"blk.{config.num_layers}.nextn."
        shapes |= {
            block + "shared_head_norm.weight": (hidden,),
            block + "embed_tokens.weight": (vocab, hidden),
            block + "shared_head_head.weight": (vocab, hidden),
        }
    return shapes


def check_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Raise ModelError for the first tensor that is missing, has another shape, or that the model does not know."""
    required, optional = expected_shapes(config), _optional_shapes(config)
    for name, shape in required.items():
        if name not in tensors:
            raise ModelError(f"tensor {name} {list(shape)} is missing.", CONVERT_AGAIN)
    for name, tensor in tensors.items():
        if name.endswith(".pf4"):
            continue
        shape = required.get(name) or optional.get(name)
        if shape is None:
            raise ModelError(f"tensor {name} {list(tensor.shape)} has no place in this model.", CONVERT_AGAIN)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} is {tensor.dtype.name} {list(tensor.shape)}, expected {list(shape)}.", CONVERT_AGAIN
            )


def weight_bytes(
    backend: Backend, config: ModelConfig, container: Container, embed_in_host: bool = False, fast_head: bool = False,
) -> int:
    """Bytes that `bind_weights` will take on the backend."""
    absent = {"token_embd.weight"} if embed_in_host and not config.tied else set()
    if fast_head and "output_q4.weight" in container.tensors:
        absent.add("output.weight")
    return backend.packed_bytes([tensor for name, tensor in container.tensors.items() if name not in absent])


def bind_weights(
    backend: Backend, config: ModelConfig, container: Container,
    progress: Callable[[int, int], None] | None = None, embed_in_host: bool = False,
    fast_head: bool = False,
) -> ModelWeights:
    """Check all tensors, then load them. progress(bytes done, bytes in all) after each row list.

    embed_in_host: the embedding stays in host memory, unless it is the head as well. fast_head: in a tier with two heads the
    smaller one, which drafts always use, also decides; the exact one is not loaded.
    """
    check_tensors(config, container.tensors)
    backend.reserve_weights(weight_bytes(backend, config, container, embed_in_host, fast_head))
    binder = _Binder(backend, config, container, progress)
    layers = tuple(binder.layer(index) for index in range(config.num_layers))
    embed = binder.load("token_embd.weight", in_host=embed_in_host and not config.tied)
    draft_head = binder.load("output_q4.weight") if "output_q4.weight" in container.tensors else None
    if fast_head and draft_head is not None:
        head = draft_head
    else:
        head = embed if config.tied else binder.load("output.weight")
    draft_head = draft_head or head
    final_norm = binder.load("output_norm.weight")
    mtp = binder.mtp(embed, draft_head, final_norm) if config.num_mtp_layers else None
    return ModelWeights(embed, layers, final_norm, head, draft_head, mtp)


class _Binder:
    """Loads row lists in file-friendly order and counts bytes."""

    def __init__(self, backend: Backend, config: ModelConfig, container: Container, progress) -> None:
        self.backend, self.config, self.tensors, self.progress = backend, config, container.tensors, progress
        self.total = sum(tensor.nbytes for tensor in self.tensors.values())
        self.done = 0
        self.num_attention = 0
        self.num_delta = 0

    def load(self, *names: str, in_host: bool = False) -> Weight:
        tensors = [self.tensors[name] for name in names]
        weight = self.backend.load(tensors, in_host)
        self.done += sum(tensor.nbytes for tensor in tensors)
        if self.progress is not None:
            self.progress(self.done, self.total)
        return weight

    def layer(self, index: int) -> AttentionLayer | DeltaLayer:
        block = f"blk.{index}."
        if self.config.layer_kinds[index] == "attention":
            self.num_attention += 1
            return self.attention(block, self.num_attention - 1, 0)
        self.num_delta += 1
        return self.delta(block, self.num_delta - 1)

    def feed_forward(self, block: str) -> FeedForward:
        return FeedForward(
            self.load(block + "post_attention_norm.weight"),
            self.load(block + "ffn_gate.weight", block + "ffn_up.weight"),
            self.load(block + "ffn_down.weight"),
        )

    def attention(self, block: str, kv_index: int, first_position: int) -> AttentionLayer:
        return AttentionLayer(
            norm=self.load(block + "attn_norm.weight"),
            project=self.load(block + "attn_q.weight", block + "attn_k.weight", block + "attn_v.weight"),
            q_norm=self.load(block + "attn_q_norm.weight"),
            k_norm=self.load(block + "attn_k_norm.weight"),
            output=self.load(block + "attn_output.weight"),
            feed_forward=self.feed_forward(block),
            kv_index=kv_index,
            first_position=first_position,
        )

    def delta(self, block: str, delta_index: int) -> DeltaLayer:
        return DeltaLayer(
            norm=self.load(block + "attn_norm.weight"),
            project=self.load(block + "attn_qkv.weight", block + "attn_gate.weight",
                              block + "ssm_beta.weight", block + "ssm_alpha.weight"),
            conv=self.load(block + "ssm_conv1d.weight"),
            a=self.load(block + "ssm_a"),
            dt_bias=self.load(block + "ssm_dt.bias"),
            out_norm=self.load(block + "ssm_norm.weight"),
            output=self.load(block + "ssm_out.weight"),
            feed_forward=self.feed_forward(block),
            delta_index=delta_index,
        )

    def mtp(self, embed: Weight, draft_head: Weight, final_norm: Weight) -> MtpLayer:
        block = f"blk.{self.config.num_layers}."
        own = {name for name in self.tensors if name.startswith(block + "nextn.")}

        def optional(name: str, fallback: Weight) -> Weight:
            full = f"{block}nextn.{name}.weight"
            return self.load(full) if full in own else fallback

        return MtpLayer(
            embed_norm=self.load(block + "nextn.enorm.weight"),
            hidden_norm=self.load(block + "nextn.hnorm.weight"),
            fuse=self.load(block + "nextn.eh_proj.weight"),
            layer=self.attention(block, self.config.num_attention_layers, 1),
            final_norm=optional("shared_head_norm", final_norm),
            embed=optional("embed_tokens", embed),
            head=optional("shared_head_head", draft_head),
        )
