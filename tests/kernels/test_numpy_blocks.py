"""Blocked attention, the delta rule in blocks of 64, and the products, against reference.py and float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels import numpy_attention, reference
from q27app.kernels.numpy_attention import attend_pass, softmax_merge
from q27app.kernels.numpy_delta import delta_block, solve_unit_lower
from q27app.kernels.numpy_linear import multiply
from q27app.kernels.numpy_pass import begin_pass
from q27app.kernels.numpy_state import NumpyState
from tests.kernels import made

TOLERANCE = 3e-6
"""float32 sums of up to a few thousand terms in another order."""


def normal(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def one_sequence(config, phase, start, rows, table, kv_format="fp32", blocks=64):
    state = NumpyState(config, 1, 2, kv_format, 1, blocks, 16)
    return state, begin_pass(made.make_batch(phase, [[0] * rows], [start], [0], [table]), state)


@pytest.mark.parametrize("config", [made.TINY, made.DEMO], ids=["tiny", "demo"])
@pytest.mark.parametrize("start, rows", [(0, 1), (0, 64), (0, 130), (64, 65), (70, 3), (1024, 64), (1000, 100)])
@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("scattered", [False, True])
def test_prefill_attention_equals_the_whole_matrix(config, start, rows, first_position, scattered):
    length = start + rows
    table = list(range(-(-length // 64)))
    if scattered:
        table = [(7 * block + 3) % 23 for block in table]
    state, work = one_sequence(config, "prefill", start, rows, table)
    check_attention(config, state, work, start, rows, table, first_position)


@pytest.mark.parametrize("start, rows", [(0, 1), (255, 3), (1024, 1), (1500, 16)])
@pytest.mark.parametrize("first_position", [0, 1])
def test_decode_attention_equals_the_whole_matrix(start, rows, first_position):
    table = list(range(-(-(start + rows) // 64)))
    state, work = one_sequence(made.DEMO, "verify", start, rows, table)
    check_attention(made.DEMO, state, work, start, rows, table, first_position)


def check_attention(config, state, work, start, rows, table, first_position):
    """Everything that no row may see is NaN."""
    length = start + rows
    for array in (*state.keys, *state.values):
        array[...] = np.nan
    k, v = (normal(length, config.num_kv_heads, config.head_dim, seed=seed) for seed in (1, 2))
    positions = np.arange(first_position, length)
    physical = np.array(table)[positions // 64] * 64 + positions % 64
    state.write_rows(1, physical, k[first_position:], v[first_position:])
    q = normal(rows, config.num_heads, config.head_dim, seed=3)
    out = np.full(q.shape, np.nan, np.float32)
    attend_pass(work, q, 1, first_position, out)
    expected = attention64(q, k, v, np.arange(start, length), first_position)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert made.relative_error(out, expected) < TOLERANCE


def attention64(q, k, v, positions, first_position):
    """The whole score matrix in float64."""
    repeat, length = q.shape[1] // k.shape[1], len(k)
    q, k, v = (part.astype(np.float64).transpose(1, 0, 2) for part in (q, k, v))
    k, v = np.repeat(k, repeat, axis=0), np.repeat(v, repeat, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    seen = (np.arange(length) <= positions[:, None]) & (np.arange(length) >= first_position)
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return ((weights / np.where(total == 0, 1, total)) @ v).transpose(1, 0, 2)


def test_scores_far_apart_do_not_overflow():
    q, keys, values = normal(64, 8, scale=100), normal(200, 8, seed=1, scale=100), normal(200, 8, seed=2)
    found = softmax_merge(q, iter([(keys[:100], values[:100], None), (keys[100:], values[100:], None)]))
    scores = q.astype(np.float64) @ keys.T.astype(np.float64)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(found, weights @ values / weights.sum(1, keepdims=True), atol=2e-2)
    assert np.isfinite(found).all()


def test_no_score_matrix_is_larger_than_a_tile(monkeypatch):
    largest = 0
    original = numpy_attention.softmax_merge

    def watched(q, pieces):
        def counted():
            nonlocal largest
            for piece in pieces:
                largest = max(largest, len(q) * len(piece[0]))
                yield piece
        return original(q, counted())

    monkeypatch.setattr(numpy_attention, "softmax_merge", watched)
    config = made.TINY
    _, work = one_sequence(config, "prefill", 3968, 128, list(range(64)))
    q = normal(128, config.num_heads, config.head_dim)
    attend_pass(work, q, 0, 0, np.empty_like(q))
    assert largest == 64 * (config.num_heads // config.num_kv_heads) * numpy_attention.TILE_KEYS


@pytest.mark.parametrize("kv_format, tolerance", [("fp16", 1e-3), ("fp8", 0.06)])
def test_coarser_formats_stay_near(kv_format, tolerance):
    """Half steps of the formats are 2^-12 and 2^-4 of a value; attention averages them."""
    config = made.DEMO
    state, work = one_sequence(config, "prefill", 0, 100, [5, 2], kv_format)
    k, v = (normal(100, config.num_kv_heads, config.head_dim, seed=seed) for seed in (1, 2))
    state.write_rows(0, work.physical, k, v)
    q = normal(100, config.num_heads, config.head_dim, seed=3)
    out = np.empty_like(q)
    attend_pass(work, q, 0, 0, out)
    error = made.relative_error(out, reference.attend(q, k, v, np.arange(100)))
    assert 1e-5 < error < tolerance


def block_inputs(config, rows, seed=0, decay=1.0):
    c, width = normal(rows, config.conv_channels, seed=seed), config.delta_value_heads
    return reference.delta_inputs(c, normal(rows, width, seed=seed + 1, scale=2), normal(rows, width, seed=seed + 2, scale=2),
                                  np.full(width, -decay, np.float32), np.zeros(width, np.float32), config)


def placed(part, first):
    out = np.zeros((64, *part.shape[1:]), np.float32)
    out[first:first + len(part)] = part
    return out


def steps(state, inputs):
    return np.stack([reference.delta_step(state, *(part[i] for part in inputs)) for i in range(len(inputs[0]))])


@pytest.mark.parametrize("config", [made.TINY, made.DEMO, replace(made.TINY, delta_value_heads=2)],
                         ids=["tiny", "demo", "equal heads"])
@pytest.mark.parametrize("first, rows", [(0, 64), (0, 1), (0, 37), (10, 54), (63, 1), (5, 20)])
@pytest.mark.parametrize("decay", [1e-4, 1.0, 100.0])
def test_a_delta_block_equals_steps(config, first, rows, decay):
    start = normal(config.delta_value_heads, config.delta_head_dim, config.delta_head_dim, seed=9)
    inputs = block_inputs(config, rows, decay=decay)
    expected_state, state = start.astype(np.float64), start.copy()
    expected = steps(expected_state, [part.astype(np.float64) for part in inputs])
    found = delta_block(state, *(placed(part, first) for part in inputs))
    assert made.relative_error(found[first:first + rows], expected) < TOLERANCE
    assert made.relative_error(state, expected_state) < TOLERANCE
    assert np.isfinite(found).all()


def test_a_delta_block_of_one_repeated_key_stays_exact():
    """Equal unit keys, no decay, beta 1: powers of A would reach 1e18 and cancel."""
    config = made.DEMO
    q, k, v, beta, g = block_inputs(config, 64)
    k[...] = k[0]
    beta[...], g[...] = 1, 0
    state = np.zeros((6, 128, 128), np.float32)
    expected_state = state.astype(np.float64)
    expected = steps(expected_state, [part.astype(np.float64) for part in (q, k, v, beta, g)])
    assert made.relative_error(delta_block(state, q, k, v, beta, g), expected) < 1e-5
    assert made.relative_error(state, expected_state) < 1e-5


def test_small_decays_after_a_very_large_one_stay_exact():
    """Sums of log decays near -190 have steps of 1.5e-5 in float32."""
    config = made.TINY
    q, k, v, beta, g = block_inputs(config, 64)
    g[...] = -3e-3
    g[0] = -190
    state = np.zeros((4, 8, 8), np.float32)
    expected_state = state.astype(np.float64)
    expected = steps(expected_state, [part.astype(np.float64) for part in (q, k, v, beta, g)])
    assert made.relative_error(delta_block(state, q, k, v, beta, g), expected) < 1e-6
    assert made.relative_error(state, expected_state) < 1e-6


def test_a_row_of_a_delta_block_does_not_depend_on_later_rows():
    config = made.DEMO
    inputs = block_inputs(config, 64)
    whole = delta_block(np.zeros((6, 128, 128), np.float32), *inputs)
    part = delta_block(np.zeros((6, 128, 128), np.float32), *(placed(x[:23], 0) for x in inputs))
    np.testing.assert_array_equal(part[:23], whole[:23])


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_solve_unit_lower(scale):
    strict = np.tril(normal(3, 64, 64, scale=scale / 8), -1)
    right = normal(3, 64, 5, seed=1)
    expected = np.linalg.solve(np.eye(64) + strict.astype(np.float64), right)
    assert made.relative_error(solve_unit_lower(strict, right), expected) < 1e-5


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 65), (2060, 512), (300, 4000)])
@pytest.mark.parametrize("start, rows", [(0, 1), (0, 16), (60, 8)])
def test_products(phase, shape, start, rows):
    _, work = one_sequence(made.TINY, phase, start, rows, [0, 1])
    weight, x = normal(*shape), normal(rows, shape[1], seed=1)
    out = np.full((rows, shape[0]), np.nan, np.float32)
    multiply(work, x, weight, out)
    assert made.relative_error(out, x.astype(np.float64) @ weight.T.astype(np.float64)) < TOLERANCE
