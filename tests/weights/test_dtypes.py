"""The table of formats: codes, bytes and refusals."""

from __future__ import annotations

import pytest

from q27app.errors import FileFormatError
from q27app.weights.dtypes import (
    ALL,
    B1_G128,
    DTYPES_BY_CODE,
    DTYPES_BY_NAME,
    F16,
    F32,
    FP4_G16,
    Q4_G64,
    Q8_G128,
    READABLE,
    T2_G128,
    T3_G128,
    require_readable,
    row_bytes,
    scales_per_row,
)


def test_codes_are_those_of_the_file_format():
    names = ["F32", "F16", "Q8_G128", "Q4_G64", "T2_G128", "T3_G128", "B1_G128", "FP4_G16"]
    assert [DTYPES_BY_CODE[code].name for code in range(8)] == names
    assert [DTYPES_BY_NAME[name].code for name in names] == list(range(8))


@pytest.mark.parametrize(
    ("dtype", "size", "groups"),
    [
        (F32, 1024, 0),
        (F16, 512, 0),
        (Q8_G128, 256, 2),
        (Q4_G64, 128, 4),
        (T2_G128, 64, 2),
        (T3_G128, 52, 2),
        (B1_G128, 32, 2),
        (FP4_G16, 128, 16),
    ],
)
def test_a_row_of_256_columns(dtype, size, groups):
    assert (row_bytes(dtype, 256), scales_per_row(dtype, 256)) == (size, groups)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (F32, 32),
        (F16, 16),
        (Q8_G128, 8.125),
        (Q4_G64, 4.25),
        (T2_G128, 2.125),
        (T3_G128, 1.75),
        (B1_G128, 1.125),
        (FP4_G16, 4.5),
    ],
)
def test_bits_per_weight_count_the_scales(dtype, bits):
    assert dtype.bits_per_weight == bits


def test_unquantised_rows_take_any_number_of_columns():
    assert (row_bytes(F32, 7), row_bytes(F16, 7)) == (28, 14)


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype.group])
@pytest.mark.parametrize("measure", [row_bytes, scales_per_row])
def test_columns_that_the_group_does_not_divide_are_refused(dtype, measure):
    cols = dtype.group + 4
    with pytest.raises(
        FileFormatError, match=f"{dtype.name} stores columns in groups of {dtype.group}; {cols} columns"
    ):
        measure(dtype, cols)


def test_t3_and_fp4_are_refused_by_name_and_the_rest_is_readable():
    assert READABLE == {F32, F16, Q8_G128, Q4_G64, T2_G128, B1_G128}
    for dtype in ALL:
        if dtype in READABLE:
            require_readable(dtype)
    with pytest.raises(FileFormatError, match="file: x: T3_G128 tensors are not supported"):
        require_readable(T3_G128, "file: x")
    with pytest.raises(FileFormatError, match="^FP4_G16 tensors are not supported"):
        require_readable(FP4_G16)
