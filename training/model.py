"""The family's network in plain PyTorch, for training the bundled demo model.

Parameter names are those of a text-only Hugging Face checkpoint (`model.layers.0.linear_attn.in_proj_qkv.weight`, ...), so
that `export.py` writes `state_dict()` as it is. Norm weights are stored around 0 (the network uses 1 + w), except the
gated norm of the delta block, which is used as stored. Everything that accumulates is float32; matrix products run in
the autocast type of the caller.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


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
    """Gated full attention with partial rotary embedding."""

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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [batch, time, hidden]; rope: cos and sin [time, rotary_dim / 2]."""
        config = self.config
        batch, time, _ = x.shape
        query, gate = self.q_proj(x).view(batch, time, config.num_attention_heads, 2, config.head_dim).unbind(3)
        key = self.k_proj(x).view(batch, time, config.num_key_value_heads, config.head_dim)
        value = self.v_proj(x).view(batch, time, config.num_key_value_heads, config.head_dim)
        query, key = rotate(self.q_norm(query), rope), rotate(self.k_norm(key), rope)
        out = F.scaled_dot_product_attention(
            query.to(value.dtype).transpose(1, 2), key.to(value.dtype).transpose(1, 2), value.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        ).transpose(1, 2)
        return self.o_proj((out * torch.sigmoid(gate)).reshape(batch, time, -1))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in halves on the first dims; x [batch, time, heads, dim] float32."""
    cos, sin = (part[None, :, None, :] for part in rope)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def rope_table(config: Config, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Angles in float64, returned as float32 cos and sin [time, rotary_dim / 2]."""
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(time, dtype=torch.float64, device=device)[:, None] * frequency
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
        self.dt_bias = nn.Parameter(torch.empty(values).uniform_(-4.0, 1.0))
        self.norm = GatedNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        batch, time, _ = x.shape
        dim, keys, values = config.linear_head_dim, config.linear_num_key_heads, config.linear_num_value_heads
        u = self.in_proj_qkv(x).transpose(1, 2)
        u = F.silu(self.conv1d(F.pad(u, (config.linear_conv_kernel_dim - 1, 0)))).transpose(1, 2)
        query, key, value = u.float().split((keys * dim, keys * dim, values * dim), -1)
        query = unit(query.reshape(batch, time, keys, dim)) * dim**-0.5
        key = unit(key.reshape(batch, time, keys, dim))
        ratio = values // keys
        query, key = query.repeat_interleave(ratio, 2), key.repeat_interleave(ratio, 2)
        beta = torch.sigmoid(self.in_proj_b(x).float())
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out = delta_rule(query, key, value.reshape(batch, time, values, dim), beta, decay)
        z = self.in_proj_z(x).view(batch, time, values, dim)
        return self.out_proj(self.norm(out, z).to(x.dtype).reshape(batch, time, -1))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """S = e^g S; S += k (beta (v - k S)); o = q S, in chunks of 64.

    query, key, value [batch, time, heads, dim] float32, beta and decay (g <= 0) [batch, time, heads]. Within a chunk the
    corrected values solve a unit lower triangular system; between chunks the state is carried. Decays appear only as
    exponentials of differences that are at most 0.
    """
    batch, time, heads, dim = query.shape
    padding = -time % CHUNK
    chunks = (time + padding) // CHUNK

    def split(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.view(batch, chunks, CHUNK, heads, *x.shape[3:]).transpose(2, 3)

    query, key, value = split(query), split(key), split(value)           # [batch, chunks, heads, 64, dim]
    beta, decay = split(beta), split(decay)                               # [batch, chunks, heads, 64]
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    gram = (key @ key.transpose(-1, -2)) * ratio * beta[..., None]
    system = gram.tril(-1) + torch.eye(CHUNK, device=query.device)
    right = torch.cat((value * beta[..., None], key * (beta * total.exp())[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_value, state_key = solved.split(dim, -1)
    scores = (query @ key.transpose(-1, -2)) * ratio
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    carry = total[..., -1].exp()[..., None, None]
    state = query.new_zeros(batch, heads, dim, dim)
    outputs = []
    for index in range(chunks):
        corrected = new_value[:, index] - state_key[:, index] @ state
        outputs.append(query[:, index] @ state + scores[:, index] @ corrected)
        state = state * carry[:, index] + key[:, index].transpose(-1, -2) @ corrected
    out = torch.stack(outputs, 1).transpose(2, 3).reshape(batch, chunks * CHUNK, heads, dim)
    return out[:, :time]


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x += mixer(norm(x)); x += ffn(norm(x)). The residual stream is float32."""

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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, rope) if self.attention else self.linear_attn(y)).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


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

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)).float()
        return self.norm(self.layers[0](x, rope))


class Network(nn.Module):
    """Main model, draft layer and head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.mtp = Mtp(config)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of rows after a final norm."""
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [batch, time] -> rows after the final norm [batch, time, hidden] float32."""
        rope = rope_table(self.config, tokens.shape[1], tokens.device)
        x = self.model.embed_tokens(tokens).float()
        for layer in self.model.layers:
            x = layer(x, rope)
        return self.model.norm(x)

    def draft(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """One draft depth over a whole sequence.

        hidden [batch, time, hidden] and the token one position later, tokens [batch, time]; returns rows that predict the
        token after that. Feed the result back with the tokens of the next depth.
        """
        rope = rope_table(self.config, tokens.shape[1], tokens.device)
        return self.mtp(self.model.embed_tokens(tokens).float(), hidden, rope)
