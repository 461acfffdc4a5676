"""Codecs: hand-worked bytes, equality with a plain transcription of the rules, error bounds, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.errors import FileFormatError
from q27app.weights.codecs import BLOCK_WEIGHTS, decode, encode, first_not_finite
from q27app.weights.dtypes import B1_G128, F16, F32, FP4_G16, Q4_G64, Q8_G128, T2_G128, T3_G128

ROUNDED = {Q4_G64: (7, -8, 8), Q8_G128: (127, -127, 0), T2_G128: (1, -1, 1)}
ALL_FORMATS = (F32, F16, Q8_G128, Q4_G64, T2_G128, B1_G128)


def weights(rows: int, cols: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def row_of(start: list[float], cols: int) -> np.ndarray:
    row = np.zeros((1, cols), np.float32)
    row[0, : len(start)] = start
    return row


# Hand-worked golden bytes. The top of each group is chosen so that the scale is a power of two.


def test_golden_bytes_of_q4():
    # max 7 -> s = 1, stored 0x3C00. Ties go to even: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, -0.5 -> 0, -1.5 -> -2. Codes are
    # q + 8, the even column in the low nibble.
    data, scales = encode(row_of([7, -7, 0.5, 1.5, 2.5, -0.5, -1.5, 0.51, -6.5, 3.49], 64), Q4_G64)
    assert data.tobytes() == bytes([0x1F, 0xA8, 0x8A, 0x96, 0xB2]) + b"\x88" * 27
    assert scales.view(np.uint16).tolist() == [[0x3C00]]


def test_golden_bytes_of_q8():
    # max 127 -> s = 1. -126.5 -> -126 (even), 2.5 -> 2, -1 -> 0xFF.
    data, scales = encode(row_of([127, -127, -126.5, 2.5, -1, 0.5], 128), Q8_G128)
    assert data.tobytes() == bytes([0x7F, 0x81, 0x82, 0x02, 0xFF, 0x00]) + b"\0" * 122
    assert scales.view(np.uint16).tolist() == [[0x3C00]]


def test_golden_bytes_of_t2():
    # s = 2: 2 -> code 2, -2 -> 0, 0 -> 1, 1 -> 0.5 -> rint 0 -> 1; four a byte, first lowest: 2 | 0<<2 | 1<<4 | 1<<6.
    data, scales = encode(row_of([2, -2, 0, 1, 1.01, -1.01, -0.9, 2], 128), T2_G128)
    assert data.tobytes() == bytes([0b01_01_00_10, 0b10_01_00_10]) + b"\x55" * 30
    assert scales.view(np.uint16).tolist() == [[0x4000]]


def test_golden_bytes_of_b1():
    # mean of 128 magnitudes of 1 -> s = 1; a set bit is plus, first column lowest.
    signs = np.ones((1, 128), np.float32)
    signs[0, [1, 2, 8]] = -1
    data, scales = encode(signs, B1_G128)
    assert data.tobytes() == bytes([0xF9, 0xFE]) + b"\xff" * 14
    assert scales.view(np.uint16).tolist() == [[0x3C00]]


def test_a_zero_is_positive_in_b1():
    signs = np.full((1, 128), -2, np.float32)
    signs[0, 3] = 0
    assert encode(signs, B1_G128)[0].tobytes() == bytes([0b1000]) + b"\0" * 15


def test_golden_bytes_of_f16_and_f32():
    assert encode(row_of([1.0, -2.5], 3), F16)[0].tobytes() == bytes([0x00, 0x3C, 0x00, 0xC1, 0, 0])
    assert encode(row_of([1.0], 2), F32)[0].tobytes() == bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0])


def test_golden_values_of_every_byte_of_q4():
    data = np.arange(256, dtype=np.uint8).reshape(8, 32)
    values = decode(Q4_G64, data, np.full((8, 1), 0.5, np.float16), 64)
    expected = [[((byte & 15) - 8) * 0.5, ((byte >> 4) - 8) * 0.5] for byte in range(256)]
    assert values.reshape(256, 2).tolist() == expected


def test_a_group_of_zeros_has_neutral_codes_and_a_zero_scale():
    zeros = np.zeros((1, 128), np.float32)
    expected = {Q4_G64: 0x88, Q8_G128: 0, T2_G128: 0x55}
    for dtype, byte in expected.items():
        data, scales = encode(zeros, dtype)
        assert set(data.ravel().tolist()) == {byte} and not scales.any()
    assert not decode(B1_G128, *encode(zeros, B1_G128), 128).any()


def transcribed(values: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """The rule of the module's table, without blocks, threads or tricks: integer codes and float16 scales."""
    top, bottom, _ = ROUNDED[dtype]
    groups = values.reshape(len(values), -1, dtype.group)
    scale = np.abs(groups).max(axis=2) / np.float32(top)
    scale = np.where(scale == 0, np.float32(1e-8), scale).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[:, :, None]), bottom, top).astype(int)
    return codes.reshape(values.shape), scale.astype(np.float16)


def unpacked(data: np.ndarray, dtype) -> np.ndarray:
    """Integer codes (q, before the offset) of stored bytes, bit by bit."""
    if dtype is Q8_G128:
        return data.view(np.int8).astype(int)
    bits = 4 if dtype is Q4_G64 else 2
    fields = [(data.astype(int) >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(fields, axis=-1).reshape(len(data), -1) - ROUNDED[dtype][2]


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("scale", [1e-42, 3e-38, 1e-7, 0.02, 3000.0])
def test_encoding_equals_the_transcribed_rule(dtype, scale):
    values = weights(37, 384, seed=5, scale=scale)
    values[3, 128:256] = 0
    codes, scales = transcribed(values, dtype)
    data, found = encode(values, dtype)
    assert np.array_equal(unpacked(data, dtype), codes)
    assert np.array_equal(found, scales)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_exact_ties_round_half_to_even(dtype):
    top = ROUNDED[dtype][0]
    values = np.arange(-2 * top, 2 * top + 1, dtype=np.float32) / 2
    values = np.resize(values, (1, 512))
    values[0, ::64] = top
    codes, _ = transcribed(values, dtype)
    assert np.array_equal(unpacked(encode(values, dtype)[0], dtype), codes)


@pytest.mark.parametrize("dtype", [Q4_G64, Q8_G128])
@pytest.mark.parametrize("scale", [1e-5, 0.02, 100.0])
def test_a_round_trip_is_within_half_a_step(dtype, scale):
    values = weights(40, 1024, seed=1, scale=scale)
    data, scales = encode(values, dtype)
    top = ROUNDED[dtype][0]
    step = np.abs(values.reshape(40, -1, dtype.group)).max(axis=2) / top
    # Half a step, and what rounding the scale to float16 moves the largest code: half a unit in its last place.
    rounding = top * np.maximum(step * 2.0**-11, 2.0**-25)
    bound = np.repeat(step * 0.500001 + rounding, dtype.group, axis=1)
    assert np.all(np.abs(decode(dtype, data, scales, 1024) - values) <= bound)


@pytest.mark.parametrize("dtype", [F16, Q4_G64, Q8_G128, T2_G128, B1_G128, F32])
def test_encoding_what_was_decoded_changes_nothing(dtype):
    """With each group's peak at the top code and scales of few bits, so that the division is exact."""
    rng = np.random.default_rng(3)
    scales = (2.0 ** rng.integers(-8, 3, (6, 256 // (dtype.group or 256)))).astype(np.float16)
    if dtype is B1_G128:
        codes = rng.choice([-1, 1], (6, 256))
    else:
        top = ROUNDED.get(dtype, (100,))[0]
        codes = rng.integers(-top, top + 1, (6, 256))
        codes[:, ::64] = top
    values = (codes * np.repeat(scales, 256 // scales.shape[1], axis=1)).astype(np.float32)
    data, found = encode(values, dtype)
    assert np.array_equal(decode(dtype, data, found, 256), values)


@pytest.mark.parametrize("dtype", ALL_FORMATS)
def test_threads_and_blocks_do_not_change_bytes(dtype):
    cols = 1280
    rows = 5 * BLOCK_WEIGHTS // cols + 3
    values = weights(rows, cols, seed=2)
    data, scales = encode(values, dtype, threads=2)
    for start, stop in ((0, 1), (100, 229), (rows - 1, rows)):
        part, part_scales = encode(values[start:stop], dtype, threads=1)
        assert np.array_equal(part, data[start:stop])
        assert scales is None or np.array_equal(part_scales, scales[start:stop])
    whole = decode(dtype, data, scales, cols)
    assert np.array_equal(
        decode(dtype, data[200:300], None if scales is None else scales[200:300], cols), whole[200:300]
    )


@pytest.mark.parametrize("dtype", ALL_FORMATS)
def test_float16_strided_and_read_only_inputs_give_the_same_bytes(dtype):
    values = weights(4, 256, seed=7).astype(np.float16)
    values.flags.writeable = False
    expected = encode(values.astype(np.float32), dtype)[0]
    wide = np.zeros((4, 512), np.float32)
    wide[:, ::2] = values
    assert np.array_equal(encode(values, dtype)[0], expected)
    assert np.array_equal(encode(wide[:, ::2], dtype)[0], expected)


def test_one_row_and_one_group_are_enough():
    data, scales = encode(weights(1, 64), Q4_G64)
    assert data.shape == (1, 32) and scales.shape == (1, 1)


def test_a_matrix_without_rows_encodes_to_nothing():
    data, scales = encode(np.zeros((0, 128), np.float32), Q4_G64)
    assert data.shape == (0, 64) and scales.shape == (0, 2)


@pytest.mark.parametrize("dtype", ALL_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_with_name_and_row(dtype, bad):
    values = weights(5, 256)
    values[3, 200] = bad
    with pytest.raises(FileFormatError, match=r"blk\.1\.x\.weight: row 3, (scale of group|column) \d+ is not finite"):
        encode(values, dtype, name="blk.1.x.weight")


@pytest.mark.parametrize("dtype", [F16, Q4_G64, T2_G128])
def test_values_beyond_float16_are_refused(dtype):
    values = weights(2, 128)
    values[1, 0] = 1e6
    with pytest.raises(FileFormatError, match="row 1, .*float16 cannot hold"):
        encode(values, dtype)


def test_columns_that_a_group_does_not_divide_are_refused_by_name():
    with pytest.raises(FileFormatError, match="w: Q4_G64 stores columns in groups of 64; 100 columns"):
        encode(np.zeros((2, 100), np.float32), Q4_G64, name="w")


@pytest.mark.parametrize("dtype", [T3_G128, FP4_G16])
def test_t3_and_fp4_are_neither_encoded_nor_decoded(dtype):
    with pytest.raises(FileFormatError, match=dtype.name):
        encode(np.zeros((1, 128), np.float32), dtype)
    with pytest.raises(FileFormatError, match=dtype.name):
        decode(dtype, np.zeros((1, 64), np.uint8), np.zeros((1, 8), np.float16), 128)


def test_the_ternary_code_3_is_refused_by_name():
    data = np.full((2, 32), 0x55, np.uint8)
    data[1, 5] |= 0b1100
    with pytest.raises(FileFormatError, match="blk.0.t: T2_G128 data holds the code 3"):
        decode(T2_G128, data, np.ones((2, 1), np.float16), 128, "blk.0.t")


def test_the_first_value_that_is_not_finite_is_found():
    values = np.ones((3000, 100), np.float16)
    assert first_not_finite(values) is None
    values[2500, 7] = np.inf
    assert first_not_finite(values) == (2500, 7)
    assert first_not_finite(np.array([[1.0, np.nan]], np.float32)) == (0, 1)


@pytest.mark.long
def test_q4_encodes_a_hundred_million_weights_a_second():
    """On two cores: half as many in a second of processor time, whatever cores there are and whatever else runs."""
    from time import process_time

    from tests.pace import slowness

    values = weights(8192, 5120)
    times = []
    for _ in range(5):
        start = process_time()
        encode(values, Q4_G64)
        times.append(process_time() - start)
    assert values.size / min(times) > 50e6 / slowness()
