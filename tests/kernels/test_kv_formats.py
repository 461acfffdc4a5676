"""Formats of keys and values: every byte of e4m3, rounding, saturation, sizes, names."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import q27app
from q27app.config import ModelSection
from q27app.errors import UsageError
from q27app.kernels.kv_codecs import decode_fp8, encode_fp8, encode_fp16
from q27app.kernels.kv_formats import KV_FORMATS, kv_format


def e4m3(code: int) -> float:
    """The definition, one byte at a time."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_every_fp8_byte_has_its_value():
    found = decode_fp8(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(found, np.array([e4m3(code) for code in range(256)], np.float32))


def test_fp8_codes_survive_a_round_trip():
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    np.testing.assert_array_equal(encode_fp8(decode_fp8(codes)), codes)


def test_fp8_rounds_to_the_nearest_even_code():
    positive = decode_fp8(np.arange(127, dtype=np.uint8)).astype(np.float64)
    middle = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    low = np.arange(126)
    even = np.where(low % 2 == 0, low, low + 1)
    np.testing.assert_array_equal(encode_fp8(middle), even)
    np.testing.assert_array_equal(encode_fp8(np.nextafter(middle, np.float32(0))), low)
    np.testing.assert_array_equal(encode_fp8(np.nextafter(middle, np.float32(1e9))), low + 1)
    np.testing.assert_array_equal(encode_fp8(-middle), even | 0x80)


@pytest.mark.parametrize("value, code", [(448, 0x7E), (449, 0x7E), (464, 0x7E), (1e30, 0x7E), (np.inf, 0x7E), (-np.inf, 0xFE),
                                         (0.0, 0), (-0.0, 0x80), (2.0**-10, 0), (1.5 * 2.0**-10, 1), (1e-45, 0)])
def test_fp8_saturates_and_keeps_zero(value, code):
    assert encode_fp8(np.array([value], np.float32))[0] == code


def test_fp8_nan_stays_nan():
    assert np.isnan(decode_fp8(encode_fp8(np.array([np.nan], np.float32))))[0]


def test_fp16_saturates_instead_of_becoming_infinite():
    found = encode_fp16(np.array([1e6, -1e6, 65504, 1.0, 2.0**-24], np.float32))
    np.testing.assert_array_equal(found, np.array([65504, -65504, 65504, 1, 2.0**-24], np.float16))


@pytest.mark.parametrize("name, size", [("fp32", 4), ("fp16", 2), ("fp8", 1)])
def test_row_bytes(name, size):
    assert kv_format(name).key_row_bytes(4, 256) == kv_format(name).value_row_bytes(4, 256) == 1024 * size
    assert kv_format(name) is KV_FORMATS[name]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match="'int3' is unknown.*fp32, fp16, fp8"):
        kv_format("int3")


def test_the_configuration_offers_the_table():
    choices = next(field.metadata["rule"].choices for field in fields(ModelSection) if field.name == "kv")
    assert choices == ("auto", "exact", *KV_FORMATS)


def test_no_other_file_knows_the_names_of_turned_formats():
    package = Path(q27app.__file__).parent
    known = {"kernels/kv_formats.py", "config.py", "kernels/cu/kv_format.cuh", "kernels/cu/wht.cuh"}
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in (".py", ".cu", ".cuh")
             and "turbo" in path.read_text(encoding="utf-8")}
    assert found <= known, f"formats are rows of the table; these know their names: {sorted(found - known)}"
