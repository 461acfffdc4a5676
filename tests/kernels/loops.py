"""The network's operations as plain loops over single numbers in float64, from the formulas; shares no code with the room."""

from __future__ import annotations

import math

import numpy as np


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def silu(x: float) -> float:
    return x * sigmoid(x)


def rms_norm(x, weight, eps):
    out = np.zeros(np.shape(x))
    for index in np.ndindex(np.shape(x)[:-1]):
        row = [float(v) for v in x[index]]
        scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        out[index] = [v * scale * float(w) for v, w in zip(row, weight)]
    return out


def linear(x, weight):
    out = np.zeros((len(x), len(weight)))
    for i, row in enumerate(x):
        for j, line in enumerate(weight):
            out[i, j] = sum(float(a) * float(b) for a, b in zip(row, line))
    return out


def rope(x, position, rotary_dim, theta):
    """x: one head."""
    out = [float(v) for v in x]
    half = rotary_dim // 2
    for d in range(half):
        angle = position * theta ** (-2 * d / rotary_dim)
        out[d] = float(x[d]) * math.cos(angle) - float(x[d + half]) * math.sin(angle)
        out[d + half] = float(x[d + half]) * math.cos(angle) + float(x[d]) * math.sin(angle)
    return np.array(out)


def attention(y, q_norm, k_norm, positions, geometry, first_position=0):
    """The whole of stage B for the rows of a sequence from position 0: y [rows, ...] -> o [rows, A D]."""
    heads, groups, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    qs, gates, ks, vs = [], [], [], []
    for row, position in zip(y, positions):
        q, gate = [], []
        for a in range(heads):
            start = a * 2 * dim
            normed = rms_norm(row[start:start + dim], q_norm, geometry.norm_eps)
            q.append(rope(normed, position, geometry.rotary_dim, geometry.rope_theta))
            gate.append(row[start + dim:start + 2 * dim])
        after = heads * 2 * dim
        k = [rope(rms_norm(row[after + g * dim:after + (g + 1) * dim], k_norm, geometry.norm_eps), position,
                  geometry.rotary_dim, geometry.rope_theta) for g in range(groups)]
        after += groups * dim
        v = [row[after + g * dim:after + (g + 1) * dim] for g in range(groups)]
        qs.append(q), gates.append(gate), ks.append(k), vs.append(v)
    out = np.zeros((len(y), heads * dim))
    for i, position in enumerate(positions):
        seen = [j for j, other in enumerate(positions) if first_position <= other <= position]
        for a in range(heads):
            g = a // (heads // groups)
            scores = [sum(float(p) * float(r) for p, r in zip(qs[i][a], ks[j][g])) / math.sqrt(dim) for j in seen]
            top = max(scores, default=0.0)
            weights = [math.exp(s - top) for s in scores]
            for d in range(dim):
                value = sum(w * float(vs[j][g][d]) for w, j in zip(weights, seen))
                value = value / sum(weights) if seen else 0.0
                out[i, a * dim + d] = value * sigmoid(float(gates[i][a][d]))
    return out


def delta(y, taps, a, dt_bias, out_norm, geometry):
    """The whole of stage B of a delta layer from an empty state: (o [rows, Nv Dv], S [Nv, Dk, Dv], window [K - 1, C])."""
    key_heads, heads, dim, width = (geometry.delta_key_heads, geometry.delta_value_heads, geometry.delta_head_dim,
                                    geometry.conv_width)
    channels = (2 * key_heads + heads) * dim
    state = np.zeros((heads, dim, dim))
    out = np.zeros((len(y), heads * dim))
    for t in range(len(y)):
        c = []
        for channel in range(channels):
            total = 0.0
            for tap in range(width):
                source = t - width + 1 + tap
                if source >= 0:
                    total += float(taps[channel][tap]) * float(y[source][channel])
            c.append(silu(total))
        for h in range(heads):
            j = h % key_heads
            q, k = np.array(c[j * dim:(j + 1) * dim]), np.array(c[(key_heads + j) * dim:(key_heads + j + 1) * dim])
            v = np.array(c[(2 * key_heads + h) * dim:(2 * key_heads + h + 1) * dim])
            q = q / math.sqrt(sum(q * q) + 1e-6) / math.sqrt(dim)
            k = k / math.sqrt(sum(k * k) + 1e-6)
            after = channels + heads * dim
            beta = sigmoid(float(y[t][after + h]))
            g = float(a[h]) * math.log1p(math.exp(float(y[t][after + heads + h]) + float(dt_bias[h])))
            state[h] *= math.exp(g)
            correction = beta * (v - k @ state[h])
            state[h] += np.outer(k, correction)
            o = q @ state[h]
            z = y[t][channels + h * dim:channels + (h + 1) * dim]
            normed = rms_norm(o, out_norm, geometry.norm_eps)
            out[t, h * dim:(h + 1) * dim] = [n * silu(float(gate)) for n, gate in zip(normed, z)]
    window = np.zeros((width - 1, channels))
    for place in range(width - 1):
        source = len(y) - width + 1 + place
        if source >= 0:
            window[place] = y[source][:channels]
    return out, state, window
