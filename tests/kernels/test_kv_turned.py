"""Codecs that turn a row: bytes worked out by hand, the definition written again as loops, errors, ties, NaN, saturation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.errors import UsageError
from q27app.kernels import kv_turned
from q27app.kernels.kv_formats import KV_FORMATS, kv_format
from q27app.kernels.kv_turned import FIVE_BITS, THREE_BITS, turn, turn_back

CODECS = {"3 bits": (THREE_BITS, kv_turned.LEVELS_3, kv_turned.THRESHOLDS_3), "5 bits": (FIVE_BITS, kv_turned.LEVELS_5, kv_turned.THRESHOLDS_5)}
each_codec = pytest.mark.parametrize("name", CODECS)

# x = 2 at place 0: n = 2, turned to -D2 / sqrt(128) = -+0.0883883. 3 bits: between the thresholds 0.044243 and 0.092804,
# so level 0.066822, index 5 (low 1, high 1) where D2 is -, else 2 (low 2, high 0); norm 2 / (sqrt(128) 0.066822) = 2.6455 =
# 0x414a. The first four signs of D2 are ++++: 2 2 2 2 = 0xaa in the first byte ... 5 bits: 7 thresholds up to 0.0858847 are
# below, so level 0.0927002, index 23 (low 7, high 1) or 8 (low 8, high 0); norm 2 / (sqrt(128) 0.0927002) = 1.9069 = 0x3fa1.
GOLDEN = {
    "3 bits": "4a41aa6956565a6696a95a59556aa69655a5669599a599669565a69699969966566590eeac16dc8f623f7a35a5b76265a5be",
    "5 bits": "a13f8888877878777877887778787887878888778777777788787888788777777788787877878787778887877878778777787888788787877887"
              "878778787877777890eeac16dc8f623f7a35a5b76265a5be",
}


def bytes_by_hand(code: str) -> str:
    """The golden bytes again, from D2's signs alone."""
    positive, negative, bits, norm = {"3 bits": (5, 2, 2, 0x414A), "5 bits": (23, 8, 4, 0x3FA1)}[code]
    index = [negative if sign > 0 else positive for sign in kv_turned.SIGNS_2]
    low = sum((value & ((1 << bits) - 1)) << bits * place for place, value in enumerate(index)).to_bytes(16 * bits, "little")
    high = sum((value >> bits) << place for place, value in enumerate(index)).to_bytes(16, "little")
    return (norm.to_bytes(2, "little") + low + high).hex()


@each_codec
def test_a_unit_row_has_the_bytes_worked_out_by_hand(name):
    row = np.zeros(128, np.float32)
    row[0] = 2
    assert CODECS[name][0].encode(row).tobytes().hex() == GOLDEN[name] == bytes_by_hand(name)


def definition(row: np.ndarray, levels: tuple[float, ...], thresholds: tuple[float, ...]) -> tuple[list[float], float]:
    """(turned numbers, norm) of 128 numbers, in float64 and by the matrix."""
    x = [float(value) for value in row]
    n = math.sqrt(sum(value * value for value in x))
    signed = [float(sign) * value / n for sign, value in zip(kv_turned.SIGNS_1, x)]
    turned = [float(kv_turned.SIGNS_2[i]) / math.sqrt(128) * sum((-1) ** (i & j).bit_count() * signed[j] for j in range(128))
              for i in range(128)]
    chosen = [levels[sum(limit <= abs(value) for limit in thresholds)] for value in turned]
    return turned, n / math.sqrt(sum(value * value for value in chosen))


@each_codec
def test_codes_follow_the_definition(name):
    codec, levels, thresholds = CODECS[name]
    all_thresholds = [-limit for limit in reversed(thresholds)] + [0.0, *thresholds]
    bits = len(levels).bit_length() - 1
    for row in np.random.default_rng(4).standard_t(3, (6, 128)).astype(np.float32):
        turned, norm = definition(row, levels, thresholds)
        block = codec.encode(row)
        assert np.frombuffer(block[:2].tobytes(), np.float16)[0] == pytest.approx(norm, rel=2**-10)
        for place, value in enumerate(turned):
            low = block[2 + place * bits // 8] >> place * bits % 8 & ((1 << bits) - 1)
            index = int(low) | int(block[-16 + place // 8] >> place % 8 & 1) << bits
            if min(abs(value - limit) for limit in all_thresholds) > 1e-6:
                assert index == sum(limit <= value for limit in all_thresholds), (place, value)


def test_the_turn_keeps_products_and_turns_back():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 50, 256)).astype(np.float32)
    np.testing.assert_allclose(turn_back(turn(a)), a, atol=2e-6)
    np.testing.assert_allclose((turn(a) * turn(b)).sum(-1), (a * b).sum(-1), atol=1e-4)
    assert np.abs(turn(np.eye(128, dtype=np.float32))).max() == pytest.approx(128**-0.5, rel=1e-6)


def test_a_length_is_added_as_the_tree_says():
    """One rounded operation after the other: another order gives other last bits in one row of many."""
    rows = np.random.default_rng(6).standard_normal((200, 128)).astype(np.float32)
    expected = []
    for row in rows:
        square = [value * value for value in row]
        sums = [(square[i] + square[i + 1]) + (square[i + 2] + square[i + 3]) for i in range(0, 128, 4)]
        while len(sums) > 1:
            sums = [sums[i] + sums[i + len(sums) // 2] for i in range(len(sums) // 2)]
        expected.append(np.sqrt(sums[0]))
    np.testing.assert_array_equal(kv_turned._length(rows), np.array(expected, np.float32))


COSINES = {"3 bits": 0.983, "5 bits": 0.99878}
"""What these levels give on normal rows."""


@each_codec
@pytest.mark.parametrize("rows", ["normal", "heavy tails", "one peak"])
def test_errors_are_those_of_the_levels(name, rows):
    random, codec = np.random.default_rng(1), CODECS[name][0]
    x = {"normal": random.standard_normal((2000, 256)), "heavy tails": random.standard_t(3, (2000, 256)),
         "one peak": 0.05 * random.standard_normal((2000, 256))}[rows].astype(np.float32)
    if rows == "one peak":
        x[np.arange(2000), random.integers(0, 256, 2000)] = 20
    found = codec.turn_back(codec.decode(codec.encode(x)))
    cosine = (found * x).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(x, axis=-1)
    tolerance = {"normal": 3e-4, "heavy tails": 1e-3, "one peak": 0.03}[rows]
    assert cosine.mean() == pytest.approx(COSINES[name], abs=tolerance)
    lengths = np.linalg.norm(found.reshape(-1, 128), axis=-1) / np.linalg.norm(x.reshape(-1, 128), axis=-1)
    np.testing.assert_allclose(lengths, 1, atol=2**-10)   # the stored norm makes up for the levels' own


@each_codec
def test_zero_and_tiny_rows_are_zero_bytes(name):
    codec = CODECS[name][0]
    row = np.zeros((3, 128), np.float32)
    row[1, 7], row[2, 7] = -1e-10, 2e-10
    codes = codec.encode(row)
    assert not codes[:2].any() and not codec.decode(codes).any()
    assert codes[2].any() and not codes[2, :2].any()   # its norm is below every half


@each_codec
def test_nan_poisons_its_block_alone(name):
    codec = CODECS[name][0]
    row = np.ones((1, 256), np.float32)
    row[0, 130] = np.nan
    codes = codec.encode(row).reshape(2, -1)
    assert codes[1, :2].tobytes() == b"\x00\x7e" and not codes[1, 2:].any()
    decoded = codec.decode(codes.reshape(1, -1))
    assert np.isfinite(decoded[0, :128]).all() and np.isnan(decoded[0, 128:]).all()


@each_codec
@pytest.mark.parametrize("value", [7e4, 1e30, np.inf, -np.inf])
def test_large_rows_saturate(name, value):
    codec = CODECS[name][0]
    row = np.full(128, value, np.float32)
    np.testing.assert_array_equal(codec.encode(row), codec.encode(np.full(128, np.sign(value) * 65504, np.float32)))
    assert codec.encode(row)[:2].tobytes() == np.float16(65504).tobytes()


@each_codec
def test_a_number_on_a_threshold_goes_up_and_both_zeros_are_one(name):
    """Equal first two numbers: half of the turned ones are exactly 0, some of them -0."""
    codec, levels, _ = CODECS[name]
    row = np.zeros(128, np.float32)
    row[:2] = kv_turned.SIGNS_1[:2]
    turned = turn(row)
    assert (turned == 0).sum() == 64 and 0 < np.signbit(turned[turned == 0]).sum() < 64
    decoded = codec.decode(codec.encode(row))
    on_zero = decoded[turned == 0]
    assert (on_zero == on_zero[0]).all() and on_zero[0] == pytest.approx(decoded.max() * levels[0] / level_of(decoded, levels))


def level_of(decoded: np.ndarray, levels: tuple[float, ...]) -> float:
    """The level that the largest decoded number stands for, where there are only it and the smallest."""
    ratio = decoded.max() / decoded[decoded > 0].min()
    return min(levels, key=lambda level: abs(level / levels[0] - ratio))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.integers(0, 2**32 - 1), st.integers(-6, 6), st.booleans())
def test_a_power_of_two_changes_the_norm_alone_and_rows_do_not_touch(name, seed, exponent, negative):
    codec = CODECS[name][0]
    rows = np.random.default_rng(seed).standard_normal((5, 256)).astype(np.float32)
    codes = codec.encode(rows).reshape(10, -1)
    np.testing.assert_array_equal(codec.encode(rows[3]), codec.encode(rows)[3])
    scaled = codec.encode(rows * np.float32(2.0**exponent)).reshape(10, -1)
    np.testing.assert_array_equal(scaled[:, 2:], codes[:, 2:])
    norms = [part[:, :2].copy().view(np.float16).astype(np.float32) for part in (codes, scaled)]
    np.testing.assert_array_equal(norms[1], norms[0] * np.float32(2.0**exponent))
    if negative:   # every index mirrors, up to numbers that are exactly 0
        mirrored = codec.decode(codec.encode(-rows))
        np.testing.assert_array_equal(mirrored, -codec.decode(codec.encode(rows)))


@pytest.mark.parametrize("name, key, value, token", [
    ("fp16", 2048, 2048, 69_632), ("fp8", 1024, 1024, 34_816), ("turbo3", 400, 400, 13_600), ("turbo3v", 2048, 400, 41_616),
    ("turbo5k", 656, 400, 17_952)])
def test_bytes_of_a_token_of_the_27b(name, key, value, token):
    form = kv_format(name)
    assert (form.key_row_bytes(4, 256), form.value_row_bytes(4, 256)) == (key, value) and 17 * (key + value) == token


def test_heads_that_cannot_be_coded_are_refused():
    for form in KV_FORMATS.values():
        assert form.fits(256) and form.fits(128)
    kv_format("fp8").check(16)
    with pytest.raises(UsageError, match="turbo5k codes heads of a multiple of 128 numbers, this model's have 64"):
        kv_format("turbo5k").check(64)
