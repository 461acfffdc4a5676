"""How keys and values are stored: the table of formats, each with its codecs, its needs and what it is good for.

    name      keys      values    bytes of 4 heads of 256 (keys, values)
    fp32      fp32      fp32      4096, 4096   exact; what the NumPy backend takes by default
    fp16      fp16      fp16      2048, 2048
    fp8       e4m3      e4m3      1024, 1024
    turbo5k   5 bits    3 bits     656,  400   turned before they are rounded (kv_turned.py)
    turbo3v   fp16      3 bits    2048,  400   tells errors of keys and of values apart
    turbo3    3 bits    3 bits     400,  400

Heads of a position are coded one by one. The table stands in order of exactness. A further format is a row here, its codec,
and what `cu/kv_format.cuh` says of its number.
"""

from __future__ import annotations

from dataclasses import dataclass

from q27app.errors import UsageError
from q27app.kernels.kv_codecs import FP8, FP16, FP32, RowCodec
from q27app.kernels.kv_turned import FIVE_BITS, THREE_BITS


@dataclass(frozen=True)
class KVFormat:
    """One row of the table.

    min_compute_capability: the oldest NVIDIA card whose kernels read it. kernel_code: its number in the kernels, None: not
    for a card. note: what it costs and gives, for people. is_automatic: a plan may choose it by itself; is_deepest: when the
    longest window is wished.
    """

    name: str
    key: RowCodec
    value: RowCodec
    min_compute_capability: tuple[int, int]
    kernel_code: int | None
    note: str
    is_automatic: bool = True
    is_deepest: bool = False

    def key_row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of the keys of one position in one layer."""
        return self.key.row_bytes(heads, head_dim)

    def value_row_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of the values of one position in one layer."""
        return self.value.row_bytes(heads, head_dim)

    @property
    def is_turned(self) -> bool:
        """Rows are turned before they are rounded: coarser than the plain formats."""
        return self.value.multiple > 1

    def fits(self, head_dim: int) -> bool:
        """Heads of this size can be coded."""
        return head_dim % self.key.multiple == 0 and head_dim % self.value.multiple == 0

    def check(self, head_dim: int) -> None:
        """Raises UsageError where heads of this size cannot be coded."""
        if not self.fits(head_dim):
            raise UsageError(f"KV format {self.name} codes heads of a multiple of {max(self.key.multiple, self.value.multiple)} "
                             f"numbers, this model's have {head_dim}.", "Choose fp16 or fp8.")


KV_FORMATS: dict[str, KVFormat] = {
    form.name: form
    for form in (
        KVFormat("fp32", FP32, FP32, (7, 5), None, "exact", is_automatic=False),
        KVFormat("fp16", FP16, FP16, (7, 5), 0, "practically exact"),
        KVFormat("fp8", FP8, FP8, (8, 9), 1, "half the bytes of fp16"),
        KVFormat("turbo5k", FIVE_BITS, THREE_BITS, (7, 5), 4, "a quarter of the bytes of fp16"),
        KVFormat("turbo3v", FP16, THREE_BITS, (7, 5), 3, "exact keys, small values", is_automatic=False),
        KVFormat("turbo3", THREE_BITS, THREE_BITS, (7, 5), 2, "a fifth of the bytes of fp16, the deepest window",
                 is_automatic=False, is_deepest=True),
    )
}


def kv_format(name: str) -> KVFormat:
    """Look a format up. Raises UsageError for a name that does not exist."""
    form = KV_FORMATS.get(name)
    if form is None:
        raise UsageError(f"KV format {name!r} is unknown.", f"Choose one of {', '.join(KV_FORMATS)}.")
    return form
