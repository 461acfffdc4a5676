"""The family's network in plain PyTorch, for training the bundled demo model.

Parameter names are those of a text-only Hugging Face checkpoint (`model.layers.0.linear_attn.in_proj_qkv.weight`, ...), so
that `export.py` writes `state_dict()` as it is. Norm weights are stored around 0 (the network uses 1 + w), except the
gated norm of the delta block, which is used as stored. Everything that accumulates is float32; matrix products run in
the autocast type of the caller.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_rule import CHUNK, delta_rule, delta_rule_on_card, within_chunks


@dataclass(frozen=True)
class Config:
    """Geometry; head sizes are the 27B's."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 1
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 6
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 65536
    tie_word_embeddings: bool = True

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def to_hf(self) -> dict:
        """config.json of a text-only checkpoint."""
        values = asdict(self)
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": values.pop("rotary_dim") / self.head_dim,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": values.pop("rope_theta"),
                "mrope_section": [11, 11, 10], "mrope_interleaved": True,
            },
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": values.pop("linear_head_dim"),
            "layer_types": ["full_attention" if self.is_attention(i) else "linear_attention"
                            for i in range(self.num_hidden_layers)],
            **values,
        }


class Norm(nn.Module):
    """x / rms(x) * (1 + w), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), self.eps)


class GatedNorm(nn.Module):
    """x / rms(x) * w * silu(z) over a value head; w as stored."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps) * F.silu(z.float())


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Gated full attention with partial rotary embedding. Rows of all sequences stand one after the other: [rows, ...]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        dim, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(config.hidden_size, 2 * heads * dim)
        self.k_proj = linear(config.hidden_size, groups * dim)
        self.v_proj = linear(config.hidden_size, groups * dim)
        self.o_proj = linear(heads * dim, config.hidden_size)
        self.q_norm = Norm(dim, config.rms_norm_eps)
        self.k_norm = Norm(dim, config.rms_norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [rows, hidden], rope cos and sin [rows, rotary_dim / 2] -> query, gate, key, value [rows, heads, dim]."""
        config = self.config
        query, gate = self.q_proj(x).view(-1, config.num_attention_heads, 2, config.head_dim).unbind(2)
        value = self.v_proj(x).view(-1, config.num_key_value_heads, config.head_dim)
        key = self.k_proj(x).view(-1, config.num_key_value_heads, config.head_dim)
        query, key = rotate(self.q_norm(query), rope), rotate(self.k_norm(key), rope)
        return query.to(value.dtype), gate, key.to(value.dtype), value

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """out, gate [rows, heads, dim] -> [rows, hidden]."""
        return self.o_proj((out * torch.sigmoid(gate)).flatten(1))


def attend(query: Tensor, key: Tensor, value: Tensor, batch: int) -> Tensor:
    """Causal attention within each of `batch` sequences of equal length; all [rows, heads, dim]."""
    query, key, value = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def attend_drafts(query: Tensor, pairs: list[tuple[Tensor, Tensor]], batch: int) -> Tensor:
    """Attention of a deeper draft: causal over the first depth's keys and values, and over each later depth's own entry.

    query [rows, heads, dim]; pairs: (key, value) [rows, 1, dim] of depth 1, 2, ... up to the query's.
    """
    rows, heads, dim = query.shape
    time = rows // batch
    first_key, first_value = (part.view(batch, time, dim) for part in pairs[0])
    folded = query.view(batch, time * heads, dim)
    past = (folded @ first_key.transpose(1, 2)).view(batch, time, heads, time).float()
    future = torch.ones(time, time, dtype=torch.bool, device=query.device).triu(1)
    past = past.masked_fill(future[None, :, None, :], -torch.inf)
    own = [(query * key).sum(-1, dtype=torch.float32).view(batch, time, heads, 1) for key, _ in pairs[1:]]
    share = torch.softmax(torch.cat((past, *own), -1) * dim**-0.5, -1).to(query.dtype)
    out = (share[..., :time].reshape(batch, time * heads, time) @ first_value).view(rows, heads, dim)
    for index, (_, value) in enumerate(pairs[1:]):
        out = out + share[..., time + index].reshape(rows, heads, 1) * value
    return out


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in halves on the first dims; x [rows, heads, dim] float32."""
    cos, sin = (part[:, None, :] for part in rope)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def rope_table(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles in float64, returned as float32 cos and sin [rows, rotary_dim / 2]."""
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    angle = positions.double()[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class Delta(nn.Module):
    """Gated DeltaNet: causal convolution, gates, delta rule, gated norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        dim, keys, values = config.linear_head_dim, config.linear_num_key_heads, config.linear_num_value_heads
        self.channels = (2 * keys + values) * dim
        self.in_proj_qkv = linear(config.hidden_size, self.channels)
        self.in_proj_z = linear(config.hidden_size, values * dim)
        self.in_proj_b = linear(config.hidden_size, values)
        self.in_proj_a = linear(config.hidden_size, values)
        self.out_proj = linear(values * dim, config.hidden_size)
        self.conv1d = nn.Conv1d(self.channels, self.channels, config.linear_conv_kernel_dim, groups=self.channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(values).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(softplus_inverse(torch.empty(values).uniform_(math.log(1e-3), math.log(0.1)).exp()))
        self.norm = GatedNorm(dim, config.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
        """x [rows, hidden] -> query, key [rows, key heads, dim], value [rows, heads, dim] of type `kind`, beta, decay [rows, heads] in
        float32, z [rows, heads, dim]."""
        config = self.config
        dim, keys, values = config.linear_head_dim, config.linear_num_key_heads, config.linear_num_value_heads
        u = F.silu(self.convolve(self.in_proj_qkv(x), positions))
        query, key, value = u.split((keys * dim, keys * dim, values * dim), -1)
        query = unit(query.unflatten(-1, (keys, dim))) * dim**-0.5
        key = unit(key.unflatten(-1, (keys, dim)))
        beta = torch.sigmoid(self.in_proj_b(x).float())
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        z = self.in_proj_z(x).unflatten(-1, (values, dim))
        return query.to(kind), key.to(kind), value.unflatten(-1, (values, dim)).to(kind), beta, decay, z

    def convolve(self, u: Tensor, positions: Tensor) -> Tensor:
        """Causal convolution of each channel over rows of one sequence; u [rows, channels] -> float32."""
        taps = self.conv1d.weight[:, 0].float()
        width, rows = taps.shape[1], u.shape[0]
        out = u.float() * taps[:, width - 1]
        for back in range(1, width):
            earlier = F.pad(u, (0, 0, back, 0))[:rows].float()
            out = out + torch.where(positions[:, None] >= back, earlier, 0.0) * taps[:, width - 1 - back]
        return out

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        """out, z [rows, heads, dim] -> [rows, hidden]."""
        return self.out_proj(self.norm(out, z).to(z.dtype).flatten(1))


def softplus_inverse(x: Tensor) -> Tensor:
    """x > 0. Steps of 0.001 to 0.1 have heads begin with memories of one token to a thousand."""
    return x + torch.log(-torch.expm1(-x))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x += mixer(norm(x)); x += ffn(norm(x)). The residual stream is float32 [rows, hidden].

    In three parts, since what lies before and after the mixing of rows is the same for every length of sequence.
    """

    def __init__(self, config: Config, attention: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        if attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = Delta(config)
        self.attention = attention
        self.mlp = FeedForward(config)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x)).float()


def attention_before(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return layer.self_attn.project(layer.input_layernorm(x), (cos, sin))


def attention_after(layer: Layer, x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return layer.feed_forward(x + layer.self_attn.finish(out, gate).float())


def delta_before(layer: Layer, x: Tensor, positions: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
    return layer.linear_attn.project(layer.input_layernorm(x), positions, kind)


def delta_after(layer: Layer, x: Tensor, out: Tensor, z: Tensor) -> Tensor:
    return layer.feed_forward(x + layer.linear_attn.finish(out, z).float())


def draft_before(mtp: Mtp, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x = mtp.fc(torch.cat((mtp.pre_fc_norm_embedding(embedded), mtp.pre_fc_norm_hidden(hidden)), -1)).float()
    return x, *attention_before(mtp.layers[0], x, cos, sin)


def draft_after(mtp: Mtp, x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return mtp.norm(attention_after(mtp.layers[0], x, out, gate))


def row_losses(network: Network, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each row after a final norm [rows]."""
    return F.cross_entropy(network.head(hidden).float(), targets, reduction="none")


PARTS = {part.__name__: part for part in (
    attention_before, attention_after, delta_before, delta_after, draft_before, draft_after, row_losses, within_chunks)}
"""Parts with the same shapes at every length of sequence, as long as the number of rows stays the same."""


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, config.is_attention(i)) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Mtp(nn.Module):
    """The draft layer: hidden row before a token, and the token, give the hidden row that predicts the token after."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = linear(2 * config.hidden_size, config.hidden_size)
        self.pre_fc_norm_embedding = Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config, True)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Network(nn.Module):
    """Main model, draft layer and head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.mtp = Mtp(config)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.parts = dict(PARTS)
        self.delta_type = torch.float32
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        for name in ("o_proj", "out_proj", "down_proj"):
            if isinstance(getattr(module, name, None), nn.Linear):
                nn.init.zeros_(getattr(module, name).weight)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of rows after a final norm."""
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, weight)

    def compile_parts(self) -> None:
        """Fuse the parts. From here on the number of rows must stay the same."""
        self.parts = {name: torch.compile(part, dynamic=False) for name, part in PARTS.items()}

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [batch, time] -> rows after the final norm [batch, time, hidden] float32."""
        batch, time = tokens.shape
        positions = torch.arange(time, device=tokens.device).repeat(batch)
        cos, sin = rope_table(self.config, positions)
        x = self.model.embed_tokens(tokens).flatten(0, 1).float()
        for layer in self.model.layers:
            if layer.attention:
                query, gate, key, value = self.parts["attention_before"](layer, x, cos, sin)
                x = self.parts["attention_after"](layer, x, attend(query, key, value, batch), gate)
            else:
                *inputs, z = self.parts["delta_before"](layer, x, positions, self.delta_type)
                with torch.autocast(x.device.type, enabled=False):
                    if self.delta_type is torch.bfloat16 and time % CHUNK == 0:
                        out = delta_rule_on_card(*inputs, batch)
                    else:
                        parts = (part.float().unflatten(0, (batch, time)) for part in inputs)
                        out = delta_rule(*parts, inner=self.parts["within_chunks"]).flatten(0, 1)
                x = self.parts["delta_after"](layer, x, out, z)
        return self.model.norm(x).view(batch, time, -1)

    def draft(self, hidden: Tensor, tokens: Tensor, depth: int = 1, pairs: list | None = None) -> Tensor:
        """One draft depth over whole sequences.

        hidden [batch, time, hidden], row p: after token p, or the result of the depth before; tokens [batch, time], row p:
        token p + depth. Returns rows that predict token p + depth + 1. pairs: keys and values of the depths so far, to
        which this depth's are added; a deeper draft attends to the first depth's up to its own row and to its own.
        """
        batch, time = tokens.shape
        positions = torch.arange(time, device=tokens.device).repeat(batch) + (depth - 1)
        embedded = self.model.embed_tokens(tokens).flatten(0, 1).float()
        x, query, gate, key, value = self.parts["draft_before"](
            self.mtp, embedded, hidden.flatten(0, 1), *rope_table(self.config, positions))
        if pairs is not None:
            pairs.append((key, value))
        out = attend(query, key, value, batch) if depth == 1 else attend_drafts(query, pairs, batch)
        return self.parts["draft_after"](self.mtp, x, out, gate).view(batch, time, -1)
