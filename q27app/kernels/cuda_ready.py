"""Rows that are left as the row family reads them (ready.cuh): products of a gate and an up, what was attended, and what the delta
rule gives. Their scale, and what is there of them.

norm(x) is at most sqrt(hidden) long, so that a row of the gate gives at most its length (times the norm's weights) times that;
alike the up, and |silu(g)| <= |g|. The largest product of the two of all rows bounds whatever can come out, so that one power
of two holds for every row of every pass: what a row becomes depends on no other row.

What was attended is a mean of values times a sigmoid: no larger than the largest of its column, or, where values are turned, than
the longest of its block. A normed head of the delta rule is at most sqrt(its size) long; its norm's weights and silu(z), bounded
like a gate's, do the rest.
"""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.cuda_weights import TILE_ROWS, UNIT_COLS, CudaVector, CudaWeight
from q27app.kernels.memory import CudaBuffer

READY_BYTES = 2304
"""A record of 16 rows and 64 columns."""
RECORD_ROWS = 16
RECORD_UNITS = 4
"""Records of a row come in so many, as units of the widest step do."""

READY_HEAD, HEAD_ROWS = 128, 64
"""Size of a head of the delta rule that is left ready, and rows of a pass at most: four times what a pass of the engine has
(batch.MAX_DECODE_ROWS). In a longer one the next stage rounds rows by their own peaks."""

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


def product_scale(sizes: np.ndarray, hidden: int) -> float:
    """The power of two for products of rows of these sizes (lengths of gate and up multiplied), or 0 where one power of two does
    not do: the largest is too far from the others, or is not a number."""
    return _silu_scale(sizes, hidden)


def gated_scale(sizes: np.ndarray, hidden: int, dim: int) -> float:
    """The same for heads of `dim` numbers of the delta rule. sizes: lengths of z's rows times the head's norm."""
    return _silu_scale(sizes, np.sqrt(float(hidden) * dim))


def _silu_scale(sizes: np.ndarray, factor: float) -> float:
    """factor: what can come out for a size of 1, where 1 is usual."""
    sizes = np.asarray(sizes, np.float64)
    largest = sizes.max() * factor * 1.01   # what float32 sums of the sizes may be too small
    if not 1e-30 < largest < 1e30:
        return 0.0
    return _power_of_two(largest, 0.25 * np.median(sizes))   # silu of a usual gate is about half of it, for half of them


def _power_of_two(largest: float, usual: float) -> float:
    """That brings the largest number under TOP, if it leaves a usual one at USUAL or above; else 0."""
    scale = 2.0 ** np.floor(np.log2(TOP / largest))
    return float(scale) if usual * scale >= USUAL else 0.0


def value_scale(sizes: np.ndarray, hidden: int, block: int) -> float:
    """The power of two for what is attended of values that rows of these lengths give, or 0 as product_scale. block: values that
    are turned together."""
    sizes = np.asarray(sizes, np.float64)
    longest = np.sqrt(np.square(sizes).reshape(-1, block).sum(axis=1)).max()
    largest = 1.1 * longest * np.sqrt(hidden) + 2.0 ** -9   # e4m3 may make a value larger by 2^-4 of it, or by 2^-10
    if not 1e-30 < longest < 1e30:
        return 0.0
    return _power_of_two(largest, 2.0 ** -5 * np.median(sizes))   # a mean of many, half of which the gate lets through


class ReadyRows:
    """Of a backend: scales by weight, and the buffers whose rows lie ready in scratch memory instead."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._scales: dict[tuple[int, ...], float] = {}
        self._left: dict[int, cuda_args.Ready] = {}

    def leave(self, norm: CudaVector, weight: CudaWeight, h: CudaBuffer) -> cuda_args.Ready | None:
        """Where gate_up leaves the rows of h, from now on; None: in h itself."""
        self._left.pop(h.address, None)
        if self._backend.is_prefill or not weight.paired:
            return None
        key = weight.address, norm.address
        if key not in self._scales:
            self._scales[key] = product_scale(self._pair_sizes(norm, weight), weight.shape[1])
        return self._leave(h, self._scales[key], self._backend.scratch.ready(ready_bytes(*h.shape)))

    def attended(self, layer, o: CudaBuffer) -> cuda_args.Ready | None:
        """Where attention leaves the rows of o, from now on; None: in o itself."""
        self._left.pop(o.address, None)
        if self._backend.is_prefill or o.shape[1] % (UNIT_COLS * RECORD_UNITS):
            return None
        geometry, block = self._backend.state.geometry, self._backend.state.form.value.multiple
        key = layer.project.address, layer.norm.address, block
        if key not in self._scales:
            (rows, hidden), values = layer.project.shape, geometry.num_kv_heads * geometry.head_dim
            self._scales[key] = value_scale(self._row_sizes(layer.norm, layer.project, rows - values, values), hidden, block)
        return self._leave(o, self._scales[key], self._backend.scratch.attended(o.shape[0]))

    def leave_heads(self, layer, o: CudaBuffer, first: int, dim: int) -> cuda_args.Ready | None:
        """Where the delta rule leaves the rows of o, from now on; None: in o itself. first: z's first row of the layer's matrix."""
        self._left.pop(o.address, None)
        if self._backend.is_prefill or dim != READY_HEAD or o.shape[0] > HEAD_ROWS:
            return None
        key = layer.project.address, layer.norm.address, layer.out_norm.address
        if key not in self._scales:
            sizes = self._row_sizes(layer.norm, layer.project, first, o.shape[1], layer.out_norm)
            self._scales[key] = gated_scale(sizes, layer.project.shape[1], dim)
        return self._leave(o, self._scales[key], self._backend.scratch.ready(ready_bytes(*o.shape)))

    def _leave(self, h: CudaBuffer, scale: float, records: int) -> cuda_args.Ready | None:
        """records: address of the rows of h where there is a scale for them, not 0."""
        if not scale:
            return None
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

    def _pair_sizes(self, norm: CudaVector, weight: CudaWeight) -> np.ndarray:
        """[rows of the gate] lengths of gate and up multiplied, by the device."""
        backend, segment, rows = self._backend, weight.segments[0], weight.segments[0].num_rows
        self._check_runs()
        out = backend.scratch.wide(1, rows)
        args = cuda_args.PairSizes(weight.address, norm.address, out.address, segment.kind, rows, weight.shape[1], segment.tile_bytes, weight.wrap)
        backend.launch("repack", "pair_sizes", (-(-rows // 8),), 256, 0, args, dependent=False)
        return backend.device.download(out.address, 4 * rows).view(np.float32)

    def _row_sizes(self, norm: CudaVector, weight: CudaWeight, first: int, count: int, gain: CudaVector | None = None) -> np.ndarray:
        """[count] lengths of a row list's rows from `first` on, by the device. gain: [any] what they are multiplied by, over and over."""
        backend = self._backend
        self._check_runs()
        out = backend.scratch.wide(1, count)
        for segment in weight.segments:
            start, end = max(first, segment.first_row), min(first + count, segment.first_row + segment.num_rows)
            if start < end:
                tiles, within = divmod(start - segment.first_row, TILE_ROWS)
                assert not within and (gain is None or (start - first) % gain.shape[0] == 0), (start, segment)
                args = cuda_args.RowSizes(weight.address + segment.offset + tiles * segment.tile_bytes, norm.address, gain.address if gain else 0,
                                          out.address + 4 * (start - first), segment.kind, end - start, weight.shape[1], segment.tile_bytes, weight.wrap,
                                          gain.shape[0] if gain else 0)
                backend.launch("repack", "row_sizes", (-(-(end - start) // 8),), 256, 0, args, dependent=False)
        return backend.device.download(out.address, 4 * count).view(np.float32)

    def _check_runs(self) -> None:
        if self._backend.device.is_recording:
            raise Q27Error("a stage is recorded that has not run before.")


def part_of(ready: cuda_args.Ready, start: int) -> cuda_args.Ready:
    """The same from row `start` on, a multiple of 16."""
    return cuda_args.Ready(ready.records + start // RECORD_ROWS * ready.units * READY_BYTES, ready.units, ready.scale, ready.unscale)
