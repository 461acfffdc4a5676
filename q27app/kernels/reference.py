"""One plain NumPy function for each operation of the network, float32: the oracle of every other form of it.

Clear before fast; other modules and every kernel must equal these. Weights come as arrays, matrices as [out, in]. The
head order of the delta rule is `.q27`'s: value head h reads key head h % num_key_heads. `geometry` is a
`backend.LayerGeometry`.
"""

from __future__ import annotations

import numpy as np

from q27app.kernels.backend import LayerGeometry

L2_EPS = np.float32(1e-6)
"""Inside the root of the l2 norms of the delta rule, added to the sum of squares."""

MIN_LOG_DECAY = np.float32(-200.0)
"""exp of it is 0 in float32; keeps sums of log decays finite whatever the input."""


def checksum(words: np.ndarray) -> int:
    """Sum modulo 2^64 over uint32 words of a mix of each word with its place: any changed bit or swapped word shows."""
    words, total, step = np.ascontiguousarray(words).reshape(-1), 0, 1 << 20
    for start in range(0, len(words), step):
        piece = words[start:start + step].astype(np.uint64)
        places = np.arange(start, start + len(piece), dtype=np.uint64) & np.uint64(0xFFFFFFFF)
        x = (piece << np.uint64(32) | places) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        total += int((x ^ x >> np.uint64(32)).sum(dtype=np.uint64))
    return total % (1 << 64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x); the limit 0 for very negative x."""
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the weight as stored (1 + the Hugging Face value)."""
    mean = np.square(x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
    return x / np.sqrt(mean + np.float32(eps)) * weight


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [rows, in], weight [out, in] -> [rows, out]."""
    return x @ weight.T


def embed(weight: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows of the embedding, no scale."""
    return weight[tokens]


def project(norm: np.ndarray, weight: np.ndarray, x: np.ndarray, eps: float) -> np.ndarray:
    """Stage A: rms_norm(x) W^T."""
    return linear(rms_norm(x, norm, eps), weight)


def add_linear(weight: np.ndarray, h: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Stages C and E: x + h W^T."""
    return x + linear(h, weight)


def silu_multiply(y: np.ndarray) -> np.ndarray:
    """y [rows, 2 ffn] = gate, up -> silu(gate) * up."""
    half = y.shape[-1] // 2
    return silu(y[..., :half]) * y[..., half:]


def gate_up(norm: np.ndarray, weight: np.ndarray, x: np.ndarray, eps: float) -> np.ndarray:
    """Stage D: silu(n G^T) * (n U^T), n = rms_norm(x); weight = rows of G, then rows of U."""
    return silu_multiply(project(norm, weight, x, eps))


def head(norm: np.ndarray, weight: np.ndarray, x: np.ndarray, logit_rows: np.ndarray, eps: float):
    """(final [rows, hidden], logits [n, vocab]): final norm of every row, logits of the wanted ones."""
    final = rms_norm(x, norm, eps)
    return final, linear(final[logit_rows], weight)


def mtp_join(
    enorm: np.ndarray, hnorm: np.ndarray, embedded: np.ndarray, hidden: np.ndarray, eps: float
) -> np.ndarray:
    """[rms_norm(embedded) ; rms_norm(hidden)], the embedding half first: [rows, 2 hidden]."""
    return np.concatenate([rms_norm(embedded, enorm, eps), rms_norm(hidden, hnorm, eps)], axis=-1)


def mtp_input(enorm, hnorm, weight, embedded, hidden, eps: float) -> np.ndarray:
    """Input of the draft layer: the joined halves through weight [hidden, 2 hidden]."""
    return linear(mtp_join(enorm, hnorm, embedded, hidden, eps), weight)


# attention


def rope_table(positions: np.ndarray, rotary_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [rows, rotary_dim / 2], of position * theta^(-2 d / rotary_dim); the angles in float64."""
    exponent = np.arange(rotary_dim // 2, dtype=np.float64) * (-2.0 / rotary_dim)
    angle = np.asarray(positions, np.float64)[:, None] * np.float64(theta) ** exponent
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the first dimensions of x [rows, heads, dim], paired in halves (d, d + R/2); the rest passes."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half:2 * half]
    cos, sin = cos[:, None], sin[:, None]
    turned = x.copy()
    turned[..., :half] = low * cos - high * sin
    turned[..., half:2 * half] = high * cos + low * sin
    return turned


def split_attention(y: np.ndarray, geometry: LayerGeometry):
    """Views of y [rows, 2 A D + 2 G D]: query and gate [rows, A, D], keys and values [rows, G, D]."""
    rows, heads, groups, dim = len(y), geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    pairs = y[:, :2 * heads * dim].reshape(rows, heads, 2, dim)
    keys, values = y[:, 2 * heads * dim:].reshape(rows, 2, groups, dim).transpose(1, 0, 2, 3)
    return pairs[:, :, 0], pairs[:, :, 1], keys, values


def attention_inputs(y, q_norm, k_norm, cos, sin, geometry: LayerGeometry):
    """Stage B's rows: q normed and turned, gate, k normed and turned, v. Norm first, then RoPE."""
    q, gate, k, v = split_attention(y, geometry)
    q = rope(rms_norm(q, q_norm, geometry.norm_eps), cos, sin)
    k = rope(rms_norm(k, k_norm, geometry.norm_eps), cos, sin)
    return q, gate, k, v


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, first_position: int = 0
) -> np.ndarray:
    """Causal attention with the whole score matrix. q [rows, A, D] at positions; keys, values [length, G, D] from
    position 0. A row sees positions first_position .. its own; a row that sees none gets zeros."""
    rows, heads, dim = q.shape
    length, groups, _ = keys.shape
    out = np.zeros_like(q)
    for row in range(rows):
        visible = slice(first_position, int(positions[row]) + 1)
        if visible.stop <= visible.start:
            continue
        for a in range(heads):
            g = a // (heads // groups)
            scores = keys[visible, g] @ q[row, a] / np.sqrt(np.float32(dim))
            weights = np.exp(scores - scores.max())
            out[row, a] = weights @ values[visible, g] / weights.sum()
    return out


def apply_gate(attended: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """attended * sigmoid(gate); no norm, no RoPE on the gate."""
    return attended * sigmoid(gate)


# gated delta rule


def split_delta(y: np.ndarray, geometry: LayerGeometry):
    """Views of y [rows, C + Nv Dv + 2 Nv]: u [rows, C], z [rows, Nv, Dv], beta and alpha inputs [rows, Nv]."""
    heads, dim = geometry.delta_value_heads, geometry.delta_head_dim
    channels = (2 * geometry.delta_key_heads + heads) * dim
    width = heads * dim
    z = y[:, channels:channels + width].reshape(len(y), heads, dim)
    return y[:, :channels], z, y[:, channels + width:channels + width + heads], y[:, channels + width + heads:]


def convolve(window: np.ndarray, u: np.ndarray, taps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """silu(causal depthwise convolution) of u [rows, C] after window [K - 1, C]; taps [C, K], tap 0 on the oldest.

    Returns the convolved rows and the next window, the last K - 1 rows of u before convolution."""
    width = taps.shape[1]
    rows = len(u)
    history = np.concatenate([window, u])
    total = history[:rows] * taps[:, 0]
    for tap in range(1, width):
        total += history[tap:tap + rows] * taps[:, tap]
    return silu(total), history[rows:]


def delta_inputs(c: np.ndarray, beta_in, alpha_in, a: np.ndarray, dt_bias: np.ndarray, geometry: LayerGeometry):
    """From convolved rows c [rows, C]: q, k [rows, Nk, Dk] l2-normed (q scaled after it), v [rows, Nv, Dv], beta and log
    decay g [rows, Nv]. a holds -exp(A_log)."""
    heads, dim = geometry.delta_key_heads, geometry.delta_head_dim
    q = c[:, :heads * dim].reshape(-1, heads, dim)
    k = c[:, heads * dim:2 * heads * dim].reshape(-1, heads, dim)
    v = c[:, 2 * heads * dim:].reshape(-1, geometry.delta_value_heads, dim)
    q = q / np.sqrt(np.square(q).sum(-1, keepdims=True) + L2_EPS) / np.sqrt(np.float32(dim))
    k = k / np.sqrt(np.square(k).sum(-1, keepdims=True) + L2_EPS)
    g = np.maximum(a * softplus(alpha_in + dt_bias), MIN_LOG_DECAY)
    return q, k, v, sigmoid(beta_in), g


def delta_step(state: np.ndarray, q, k, v, beta, g) -> np.ndarray:
    """One position, in place. state [Nv, Dk, Dv]; q, k [Nk, Dk]; v [Nv, Dv]; beta, g [Nv] -> o [Nv, Dv].

    The state decays, the correction reads the decayed state, the output reads the updated one."""
    repeat = len(v) // len(k)
    q, k = np.tile(q, (repeat, 1)), np.tile(k, (repeat, 1))
    state *= np.exp(g)[:, None, None]
    predicted = np.matmul(k[:, None], state)[:, 0]
    correction = beta[:, None] * (v - predicted)
    state += k[:, :, None] * correction[:, None]
    return np.matmul(q[:, None], state)[:, 0]


def gated_norm(o: np.ndarray, weight: np.ndarray, z: np.ndarray, eps: float) -> np.ndarray:
    """rms_norm(o) over each head (weight as stored, not 1 + w), times silu(z): the norm first, then the gate."""
    return rms_norm(o, weight, eps) * silu(z)


def delta(y, window, state, taps, a, dt_bias, out_norm, geometry: LayerGeometry) -> tuple[np.ndarray, np.ndarray]:
    """Stage B of a delta layer, position by position. `state` advances in place; returns (o [rows, Nv Dv], next window)."""
    u, z, beta_in, alpha_in = split_delta(y, geometry)
    c, window = convolve(window, u, taps)
    q, k, v, beta, g = delta_inputs(c, beta_in, alpha_in, a, dt_bias, geometry)
    o = np.stack([delta_step(state, q[i], k[i], v[i], beta[i], g[i]) for i in range(len(y))])
    return gated_norm(o, out_norm, z, geometry.norm_eps).reshape(len(y), -1), window
