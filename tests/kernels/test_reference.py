"""Every operation of reference.py against plain float64 loops, and against each wrong reading that is easy to make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels import reference
from tests.kernels import loops, made

TOLERANCE = 3e-6
"""float32 sums of a few hundred terms against float64."""

ONE_OF_EACH = replace(made.TINY, num_heads=1, num_kv_heads=1, delta_key_heads=1, delta_value_heads=1)
R3 = replace(made.TINY, delta_key_heads=2, delta_value_heads=6, num_heads=6, num_kv_heads=1)
GEOMETRIES = {"tiny": made.TINY, "one": ONE_OF_EACH, "r3": R3}


def normal(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)



@pytest.fixture(params=GEOMETRIES)
def config(request):
    return GEOMETRIES[request.param]


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 7), (5, 512)])
def test_rms_norm(rows, width):
    x, weight = normal(rows, width), normal(width, seed=1)
    assert made.relative_error(reference.rms_norm(x, weight, 1e-6), loops.rms_norm(x, weight, 1e-6)) < TOLERANCE


def test_rms_norm_has_eps_inside_the_root():
    x = np.full((1, 4), 1e-3, np.float32)
    found = reference.rms_norm(x, np.ones(4, np.float32), 1e-6)
    np.testing.assert_allclose(found, 1e-3 / np.sqrt(2e-6), rtol=1e-6)


@pytest.mark.parametrize("rows, inner, outer", [(1, 1, 1), (2, 65, 3), (3, 512, 5)])
def test_linear_and_its_stages(rows, inner, outer):
    x, weight, norm = normal(rows, inner), normal(2 * outer, inner, seed=1), normal(inner, seed=2)
    normed = loops.rms_norm(x, norm, 1e-6)
    product = loops.linear(normed, weight)
    assert made.relative_error(reference.project(norm, weight, x, 1e-6), product) < TOLERANCE
    gated = [[loops.silu(g) * u for g, u in zip(row[:outer], row[outer:])] for row in product]
    assert made.relative_error(reference.gate_up(norm, weight, x, 1e-6), np.array(gated)) < TOLERANCE
    residual = normal(rows, 2 * outer, seed=3)
    expected = residual + loops.linear(x, weight)
    assert made.relative_error(reference.add_linear(weight, x, residual), expected) < TOLERANCE


def test_head_norms_every_row_and_multiplies_the_wanted_ones():
    x, weight, norm = normal(4, 30), normal(11, 30, seed=1), normal(30, seed=2)
    final, logits = reference.head(norm, weight, x, np.array([1, 3]), 1e-6)
    expected = loops.rms_norm(x, norm, 1e-6)
    assert made.relative_error(final, expected) < TOLERANCE
    assert made.relative_error(logits, loops.linear(expected[[1, 3]], weight)) < TOLERANCE


def test_mtp_input_has_the_embedding_half_first():
    embedded, hidden, weight = normal(2, 9), normal(2, 9, seed=1), normal(9, 18, seed=2)
    enorm, hnorm = normal(9, seed=3), normal(9, seed=4)
    joined = np.concatenate([loops.rms_norm(embedded, enorm, 1e-6), loops.rms_norm(hidden, hnorm, 1e-6)], axis=1)
    found = reference.mtp_input(enorm, hnorm, weight, embedded, hidden, 1e-6)
    assert made.relative_error(found, loops.linear(joined, weight)) < TOLERANCE


@pytest.mark.parametrize("position", [0, 1, 63, 262143, 655359])
def test_rope_is_right_at_every_position(position):
    x = normal(1, 2, 256)
    cos, sin = reference.rope_table(np.array([position]), 64, 1e7)
    expected = np.stack([loops.rope(head, position, 64, 1e7) for head in x[0]])
    np.testing.assert_allclose(reference.rope(x, cos, sin)[0], expected, atol=2e-6)


def test_rope_angles_in_float32_would_be_seen():
    exponent = np.arange(32, dtype=np.float32) * np.float32(-2 / 64)
    careless = np.cos(np.float32(655359) * np.float32(1e7) ** exponent)
    cos, _ = reference.rope_table(np.array([655359]), 64, 1e7)
    assert np.abs(careless - cos[0]).max() > 1e-3


def attend_rows(y, q_norm, k_norm, config, first_position=0):
    positions = np.arange(len(y))
    cos, sin = reference.rope_table(positions, config.rotary_dim, config.rope_theta)
    q, gate, k, v = reference.attention_inputs(y, q_norm, k_norm, cos, sin, config)
    attended = reference.attend(q, k, v, positions, first_position)
    return reference.apply_gate(attended, gate).reshape(len(y), -1)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("first_position", [0, 1])
def test_attention(config, rows, first_position):
    y = normal(rows, config.attention_project_width)
    q_norm, k_norm = normal(config.head_dim, seed=1), normal(config.head_dim, seed=2)
    expected = loops.attention(y, q_norm, k_norm, range(rows), config, first_position)
    found = attend_rows(y, q_norm, k_norm, config, first_position)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_row_that_sees_no_key_gets_zeros():
    y = normal(1, made.TINY.attention_project_width)
    weight = np.ones(made.TINY.head_dim, np.float32)
    assert not attend_rows(y, weight, weight, made.TINY, first_position=1).any()


def delta_parts(config, rows, seed=0, scale=1.0):
    y = normal(rows, config.delta_project_width, seed=seed, scale=scale)
    taps = normal(config.conv_channels, config.conv_width, seed=seed + 1, scale=0.5)
    a = -np.exp(normal(config.delta_value_heads, seed=seed + 2))
    dt_bias, out_norm = normal(config.delta_value_heads, seed=seed + 3), normal(config.delta_head_dim, seed=seed + 4)
    return y, taps, a, dt_bias, out_norm


def empty_state(config):
    window = np.zeros((config.conv_width - 1, config.conv_channels), np.float32)
    return window, np.zeros((config.delta_value_heads, config.delta_head_dim, config.delta_head_dim), np.float32)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_delta(config, rows):
    y, taps, a, dt_bias, out_norm = delta_parts(config, rows)
    expected, state, window = loops.delta(y, taps, a, dt_bias, out_norm, config)
    found_window, found_state = empty_state(config)
    found, found_window = reference.delta(y, found_window, found_state, taps, a, dt_bias, out_norm, config)
    assert made.relative_error(found, expected) < TOLERANCE
    assert made.relative_error(found_state, state) < TOLERANCE
    np.testing.assert_array_equal(found_window, window.astype(np.float32))


def test_delta_of_small_keys_has_its_constant_inside_the_root(config):
    """Keys of norm near 1e-3 tell a constant under the root from a floor beside it."""
    y, taps, a, dt_bias, out_norm = delta_parts(config, 4, scale=2e-3)
    expected, _, _ = loops.delta(y, taps, a, dt_bias, out_norm, config)
    window, state = empty_state(config)
    found, _ = reference.delta(y, window, state, taps, a, dt_bias, out_norm, config)
    assert made.relative_error(found, expected) < 1e-5


def swap_pairs(y, config):
    """q_proj split in the middle instead of per head."""
    width = 2 * config.num_heads * config.head_dim
    pairs = y[:, :width].reshape(len(y), 2, config.num_heads, config.head_dim).transpose(0, 2, 1, 3)
    return np.concatenate([pairs.reshape(len(y), width), y[:, width:]], axis=1)


def interleaved_rope(x, cos, sin):
    """RoPE on pairs (2 i, 2 i + 1)."""
    half = cos.shape[-1]
    order = np.concatenate([np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2), np.arange(2 * half, x.shape[-1])])
    return reference_rope(x[..., order], cos, sin)[..., np.argsort(order)]


def rope_at_the_end(x, cos, sin):
    return np.roll(reference_rope(np.roll(x, 2 * cos.shape[-1], -1), cos, sin), -2 * cos.shape[-1], -1)


reference_rope = reference.rope

ATTENTION_TRAPS = {
    "split in the middle": ("split_attention", lambda original: lambda y, g: original(swap_pairs(y, g), g)),
    "pairs": ("rope", lambda original: interleaved_rope),
    "last dimensions": ("rope", lambda original: rope_at_the_end),
    "silu gate": ("apply_gate", lambda original: lambda o, gate: o * reference.silu(gate)),
    "1 + w": ("rms_norm", lambda original: lambda x, w, eps: original(x, 1 + w, eps)),
}


@pytest.mark.parametrize("trap", ATTENTION_TRAPS)
def test_a_wrong_reading_of_attention_would_be_seen(trap, monkeypatch):
    config = made.TINY
    y = normal(5, config.attention_project_width)
    q_norm, k_norm = normal(config.head_dim, seed=1), normal(config.head_dim, seed=2)
    expected = loops.attention(y, q_norm, k_norm, range(5), config)
    name, wrong = ATTENTION_TRAPS[trap]
    monkeypatch.setattr(reference, name, wrong(getattr(reference, name)))
    assert made.relative_error(attend_rows(y, q_norm, k_norm, config), expected) > 0.01


def decay_late(state, q, k, v, beta, g):
    repeat = len(v) // len(k)
    q, k = np.tile(q, (repeat, 1)), np.tile(k, (repeat, 1))
    correction = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state[...] = np.exp(g)[:, None, None] * state + k[:, :, None] * correction[:, None]
    return np.einsum("hk,hkv->hv", q, state)


def output_early(state, q, k, v, beta, g):
    old = np.exp(g)[:, None, None] * state
    original_step(state, q, k, v, beta, g)
    return np.einsum("hk,hkv->hv", np.tile(q, (len(v) // len(q), 1)), old)


def heads_grouped(state, q, k, v, beta, g):
    repeat = len(v) // len(k)
    return original_step(state, np.repeat(q, repeat, 0), np.repeat(k, repeat, 0), v, beta, g)


original_step = reference.delta_step

DELTA_TRAPS = {
    "decay after the delta is read": ("delta_step", lambda original: decay_late),
    "output before the update": ("delta_step", lambda original: output_early),
    "h // r": ("delta_step", lambda original: heads_grouped),
    "taps newest first": ("convolve", lambda original: lambda w, u, taps: original(w, u, taps[:, ::-1])),
    "gating before the norm": ("gated_norm", lambda original: lambda o, w, z, eps: reference.rms_norm(
        o * reference.silu(z), w, eps)),
    "sigmoid for z": ("gated_norm", lambda original: lambda o, w, z, eps: reference.rms_norm(o, w, eps)
                      * reference.sigmoid(z)),
    "1 + w": ("gated_norm", lambda original: lambda o, w, z, eps: original(o, 1 + w, z, eps)),
    "no silu after the convolution": ("convolve", lambda original: lambda w, u, taps: (
        sum(np.concatenate([w, u])[i:i + len(u)] * taps[:, i] for i in range(taps.shape[1])), u[1 - taps.shape[1]:])),
}


@pytest.mark.parametrize("trap", DELTA_TRAPS)
def test_a_wrong_reading_of_the_delta_rule_would_be_seen(trap, monkeypatch):
    config = made.TINY
    y, taps, a, dt_bias, out_norm = delta_parts(config, 9)
    expected, _, _ = loops.delta(y, taps, a, dt_bias, out_norm, config)
    name, wrong = DELTA_TRAPS[trap]
    monkeypatch.setattr(reference, name, wrong(getattr(reference, name)))
    window, state = empty_state(config)
    found, _ = reference.delta(y, window, state, taps, a, dt_bias, out_norm, config)
    assert made.relative_error(found, expected) > 0.01


def test_a_missing_query_scale_would_be_seen():
    """The output norm hides a scale of q, so it is compared before the norm."""
    config = made.TINY
    q, _, _, _, _ = reference.delta_inputs(
        normal(1, config.conv_channels), normal(1, 4), normal(1, 4), -np.ones(4, np.float32), np.zeros(4, np.float32), config)
    np.testing.assert_allclose(np.square(q).sum(-1), 1 / config.delta_head_dim, rtol=1e-3)


def test_extreme_inputs_give_finite_numbers():
    x = np.array([-1e30, -200, -88, 0, 88, 200, 1e30], np.float32)
    for function in (reference.sigmoid, reference.silu, reference.softplus):
        assert np.isfinite(function(x)).all()
    np.testing.assert_array_equal(reference.sigmoid(x)[[0, 3, 6]], np.array([0, 0.5, 1], np.float32))
