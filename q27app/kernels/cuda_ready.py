"""Products of a gate and an up that are left as the row family reads them (ready.cuh): their scale, and what is there of them.

norm(x) is at most sqrt(hidden) long, so that a row of the gate gives at most its length (times the norm's weights) times that;
alike the up, and |silu(g)| <= |g|. The largest product of the two of all rows bounds whatever can come out, so that one power
of two holds for every row of every pass: what a row becomes depends on no other row.
"""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.cuda_weights import UNIT_COLS, CudaVector, CudaWeight
from q27app.kernels.memory import CudaBuffer

READY_BYTES = 2304
"""A record of 16 rows and 64 columns."""
RECORD_ROWS = 16
RECORD_UNITS = 4
"""Records of a row come in so many, as units of the widest step do."""

TOP = 2.0 ** 15
"""No half gets larger, half of what one can be."""
USUAL = 2.0 ** -6
"""What halves of a middling row must be where the inputs of a pass are independent: 2^4 below are those of every second four
columns, and what trained inputs may be smaller still has 2^4 to the smallest half of full precision, 2^-14."""


def ready_units(cols: int) -> int:
    """Records of 16 rows of so many columns."""
    return -(-cols // (UNIT_COLS * RECORD_UNITS)) * RECORD_UNITS


def ready_bytes(rows: int, cols: int) -> int:
    return -(-rows // RECORD_ROWS) * ready_units(cols) * READY_BYTES


def fixed_scale(sizes: np.ndarray, hidden: int) -> float:
    """The power of two for products of rows of these sizes (lengths of gate and up multiplied), or 0 where one power of two does
    not do: the largest is too far from the others, or is not a number."""
    sizes = np.asarray(sizes, np.float64)
    largest = sizes.max() * hidden * 1.01   # what float32 sums of the sizes may be too small
    if not 1e-30 < largest < 1e30:
        return 0.0
    scale = 2.0 ** np.floor(np.log2(TOP / largest))
    usual = 0.25 * np.median(sizes) * scale   # silu of a usual gate is about half of it, for half of them
    return float(scale) if usual >= USUAL else 0.0


class ReadyRows:
    """Of a backend: scales by weight, and the buffers whose rows lie ready in scratch memory instead."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._scales: dict[tuple[int, int], float] = {}
        self._left: dict[int, cuda_args.Ready] = {}

    def leave(self, norm: CudaVector, weight: CudaWeight, h: CudaBuffer) -> cuda_args.Ready | None:
        """Where gate_up leaves the rows of h, from now on; None: in h itself."""
        self._left.pop(h.address, None)
        if self._backend.is_prefill or not weight.paired:
            return None
        scale = self._scale(norm, weight)
        if not scale:
            return None
        records = self._backend.scratch.ready(ready_bytes(*h.shape))
        self._left[h.address] = cuda_args.Ready(records, ready_units(h.shape[1]), scale, 1 / scale)
        return self._left[h.address]

    def of(self, h: CudaBuffer) -> cuda_args.Ready | None:
        return self._left.get(h.address)

    def forget(self) -> None:
        """Scratch memory is about to go."""
        self._left.clear()

    def finish(self, h: CudaBuffer) -> None:
        """Put into h what was left ready instead."""
        ready = self._left.pop(h.address, None)
        if ready is not None:
            args = cuda_args.ReadyFloats(ready, h.address, h.shape[1])
            self._backend.launch("repack", "ready_floats", (h.shape[0],), 256, 0, args, dependent=False)

    def _scale(self, norm: CudaVector, weight: CudaWeight) -> float:
        key = weight.address, norm.address
        if key not in self._scales:
            self._scales[key] = fixed_scale(self._sizes(norm, weight), weight.shape[1])
        return self._scales[key]

    def _sizes(self, norm: CudaVector, weight: CudaWeight) -> np.ndarray:
        """[rows of the gate] lengths of gate and up multiplied, by the device."""
        backend, segment, rows = self._backend, weight.segments[0], weight.segments[0].num_rows
        if backend.device.is_recording:
            raise Q27Error("a stage is recorded that has not run before.")
        out = backend.scratch.wide(1, rows)
        args = cuda_args.PairSizes(weight.address, norm.address, out.address, segment.kind, rows, weight.shape[1], segment.tile_bytes, weight.wrap)
        backend.launch("repack", "pair_sizes", (-(-rows // 8),), 256, 0, args, dependent=False)
        return backend.device.download(out.address, 4 * rows).view(np.float32)


def part_of(ready: cuda_args.Ready, start: int) -> cuda_args.Ready:
    """The same from row `start` on, a multiple of 16."""
    return cuda_args.Ready(ready.records + start // RECORD_ROWS * ready.units * READY_BYTES, ready.units, ready.scale, ready.unscale)
