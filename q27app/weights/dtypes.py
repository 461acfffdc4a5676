"""The number formats of a `.q27` file: one table row each. Bytes are defined here, arithmetic in `codecs`.

code  name      bytes of a row of `cols`   scales of a row   readable
0     F32       4 * cols                   -                 yes
1     F16       2 * cols                   -                 yes
2     Q8_G128   cols                       f16, cols / 128   yes
3     Q4_G64    cols / 2                   f16, cols / 64    yes
4     T2_G128   cols / 4                   f16, cols / 128   yes
5     T3_G128   26 for 128 columns         f16, cols / 128   no
6     B1_G128   cols / 8                   f16, cols / 128   yes
7     FP4_G16   cols / 2                   ue4m3, cols / 16  no
"""

from __future__ import annotations

from dataclasses import dataclass

from q27app.errors import FileFormatError


@dataclass(frozen=True)
class DType:
    """One format.

    group: weights along a row that share a scale; 0 means that there are no scales.
    block_bytes: data bytes of one group, or of one element where group is 0.
    scale_bytes: bytes of one scale.
    """

    name: str
    code: int
    group: int
    block_bytes: int
    scale_bytes: int = 0

    @property
    def bits(self) -> float:
        """Data bits of one weight, without its share of the scale."""
        return self.block_bytes * 8 / (self.group or 1)

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of the scale."""
        return (self.block_bytes + self.scale_bytes) * 8 / (self.group or 1)

    def __str__(self) -> str:
        return self.name


F32 = DType("F32", 0, 0, 4)
F16 = DType("F16", 1, 0, 2)
Q8_G128 = DType("Q8_G128", 2, 128, 128, 2)
Q4_G64 = DType("Q4_G64", 3, 64, 32, 2)
T2_G128 = DType("T2_G128", 4, 128, 32, 2)
T3_G128 = DType("T3_G128", 5, 128, 26, 2)
B1_G128 = DType("B1_G128", 6, 128, 16, 2)
FP4_G16 = DType("FP4_G16", 7, 16, 8, 1)

ALL = (F32, F16, Q8_G128, Q4_G64, T2_G128, T3_G128, B1_G128, FP4_G16)
DTYPES_BY_CODE = {dtype.code: dtype for dtype in ALL}
DTYPES_BY_NAME = {dtype.name: dtype for dtype in ALL}
READABLE = frozenset({F32, F16, Q8_G128, Q4_G64, T2_G128, B1_G128})


def row_bytes(dtype: DType, cols: int) -> int:
    """Data bytes of a row of `cols` weights. FileFormatError if a group does not divide the columns."""
    if not dtype.group:
        return dtype.block_bytes * cols
    return scales_per_row(dtype, cols) * dtype.block_bytes


def scales_per_row(dtype: DType, cols: int) -> int:
    """Scales of a row of `cols` weights, 0 for formats without. FileFormatError if a group does not divide `cols`."""
    if not dtype.group:
        return 0
    if cols % dtype.group:
        raise FileFormatError(
            f"{dtype.name} stores columns in groups of {dtype.group}; {cols} columns do not fit.",
            "Keep this tensor in F16 or F32 (tier f16 or f32).",
        )
    return cols // dtype.group


def require_readable(dtype: DType, where: str = "") -> None:
    """FileFormatError, with the format's name, for the formats that exist but are neither read nor written."""
    if dtype not in READABLE:
        readable = ", ".join(d.name for d in ALL if d in READABLE)
        raise FileFormatError(
            f"{where}{': ' if where else ''}{dtype.name} tensors are not supported; supported are {readable}.",
            "Convert the source again: q27app convert SOURCE DESTINATION --tier q4s",
        )
