"""Weights on the device: row lists packed for the tensor cores (quant.cuh), and small float32 vectors.

A row list is cut into tiles of 16 rows, numbered through the list; each tensor of the list is one segment. Two tensors of
one shape and number type are a gate and an up matrix: their tiles alternate, so that a block holds both halves of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from q27app.errors import GpuError, OutOfMemory
from q27app.kernels import cuda_args
from q27app.kernels.card import Card

if TYPE_CHECKING:
    from q27app.weights.container import Tensor

KIND_F16, KIND_Q8, KIND_Q4 = 0, 1, 2
UNIT_BYTES = {KIND_F16: 2048, KIND_Q8: 1056, KIND_Q4: 544}
KIND_COSTS = {KIND_F16: 1.5, KIND_Q8: 1.0, KIND_Q4: 1.0}
"""Time of a byte when tiles are shared out: few stages of F16 fit the ring, so that its tiles take longer."""

UNIT_COLS, TILE_ROWS, WARPS, TILE_SUMS = 64, 16, 8, 160
VECTOR_COLS = 8
"""A float32 matrix of at most so many columns (the convolution's taps) stays as it is."""

_KINDS = {"Q8_G128": (KIND_Q8, 128), "Q4_G64": (KIND_Q4, 64)}
SPLIT_CHOICES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Segment:
    """Rows of one tensor. offset: bytes from the weight's start; tile_bytes: from one of its tiles to the next."""

    first_tile: int
    num_tiles: int
    first_row: int
    num_rows: int
    kind: int
    tile_bytes: int
    offset: int

    def args(self) -> cuda_args.Segment:
        return cuda_args.Segment(self.first_tile, self.num_tiles, self.first_row, self.num_rows, self.kind,
                                 self.tile_bytes, self.offset)


@dataclass(frozen=True)
class CudaVector:
    """Float32 numbers as they stand in the container."""

    shape: tuple[int, ...]
    address: int

    @property
    def nbytes(self) -> int:
        return 4 * int(np.prod(self.shape))

    @property
    def packed_bytes(self) -> int:
        return self.nbytes


@dataclass(frozen=True)
class CudaWeight:
    """A packed row list of packed_bytes at address; nbytes of them on the device, 0 where it stays in host memory. units: 64-column pieces of a tile; wrap: units after which the activations repeat (float32
    matrices are a high and a low half side by side), 0 = never. splits: of the columns; runs: first tile of each of an even
    number of runs that the row family shares out, and the end."""

    shape: tuple[int, int]
    packed_bytes: int
    nbytes: int
    address: int
    segments: tuple[Segment, ...]
    units: int
    wrap: int
    paired: bool
    splits: int
    runs: tuple[int, ...]

    @property
    def num_tiles(self) -> int:
        last = self.segments[-1]
        return last.first_tile + last.num_tiles

    @property
    def activation_units(self) -> int:
        return self.wrap or self.units

    @property
    def is_f16(self) -> bool:
        """Every matrix is F16: the activations' rounding is the larger part of the error."""
        return not self.wrap and all(segment.kind == KIND_F16 for segment in self.segments)

    @property
    def split_units(self) -> int:
        return split_size(self.units, self.splits)

    def segment_args(self):
        return (cuda_args.Segment * cuda_args.MAX_SEGMENTS)(*(segment.args() for segment in self.segments))


def rows_shared_bytes(card: Card, rows: int, split_units: int, wide: bool) -> int:
    """Dynamic shared memory of linear_rows (Memory in linear_rows.cu)."""
    ring = card.linear_rows_defines()["RING_BYTES_16" if wide else "RING_BYTES_8"]
    tiles = 2 if not wide and ring >= 4 * UNIT_BYTES[KIND_Q8] else 1
    fixed = 64 + 2 * 2 * WARPS * 4 + 256 + 2 * WARPS * tiles * (2 if wide else 1) * TILE_SUMS * 4
    return fixed + split_units * (16 if wide else 8) * 4 + rows * (split_units * UNIT_COLS + 8) * 2 + 2 * WARPS * ring


def split_size(units: int, splits: int) -> int:
    """Units of the largest split: whole pairs of units where the units are even (split_unit in staging.cuh)."""
    pair = 1 if units % 2 else 2
    return -(-(units // pair) // splits) * pair


def choose_splits(card: Card, units: int, num_tiles: int, step: int) -> int:
    """K splits of a matrix on a card: what fits 8 rows, leaves few multiprocessors idle and costs little to merge.

    Costs count units of a block; staging the rows weighs as much as 1.5 tiles, a tile's merge as 2 units."""
    best, best_cost = 0, float("inf")
    blocks = -(-num_tiles // step)
    for splits in SPLIT_CHOICES:
        size = split_size(units, splits)
        if splits > max(1, units // 2) or rows_shared_bytes(card, 8, size, False) > card.shared_bytes:
            continue
        tiles = -(-blocks // max(1, min(card.num_sms // splits, blocks))) * step
        cost = (tiles + 1.5) * size * (1 + 0.08 * (splits - 1)) + (2 * tiles if splits > 1 else 0)
        if cost < best_cost * 0.999:
            best, best_cost = splits, cost
    if not best:
        raise GpuError(f"A matrix of {units * UNIT_COLS} columns does not fit the card's {card.shared_bytes} bytes of shared memory.")
    return best


def partition(costs: np.ndarray, runs: int, step: int) -> tuple[int, ...]:
    """[runs + 1] borders of runs of tiles, multiples of step, of nearly equal cost; runs may be empty."""
    blocks = costs.reshape(-1, step).sum(axis=1)
    ends = np.concatenate([[0], np.cumsum(blocks)])
    wanted = ends[-1] * np.arange(runs + 1) / runs
    borders = np.maximum.accumulate(np.searchsorted(ends, wanted - 1e-6 * ends[-1]))
    borders[0], borders[-1] = 0, len(blocks)
    return tuple(int(border) * step for border in borders)


def kind_of(tensor: "Tensor") -> tuple[int, int]:
    """(kind, columns of a scale group) that a tensor is packed as."""
    return _KINDS.get(tensor.dtype.name, (KIND_F16, 0))


def plan_segments(tensors: Sequence["Tensor"], units: int, paired: bool) -> tuple[tuple[Segment, ...], int]:
    """Segments of a row list and its bytes."""
    segments, tile, row, offset = [], 0, 0, 0
    if paired:
        kind, _ = kind_of(tensors[0])
        tiles, tile_bytes = 2 * -(-tensors[0].rows // TILE_ROWS), units * UNIT_BYTES[kind]
        return (Segment(0, tiles, 0, tensors[0].rows, kind, tile_bytes, 0),), tiles * tile_bytes
    for tensor in tensors:
        kind, _ = kind_of(tensor)
        tiles, tile_bytes = -(-tensor.rows // TILE_ROWS), units * UNIT_BYTES[kind]
        segments.append(Segment(tile, tiles, row, tensor.rows, kind, tile_bytes, offset))
        tile, row, offset = tile + tiles, row + tensor.rows, offset + tiles * tile_bytes
    return tuple(segments), offset


class Loader:
    """Packs tensors on the device through a bounded staging buffer, while the next piece is being read."""

    PIECE_BYTES = 32 << 20

    def __init__(self, backend) -> None:
        self._backend, self._device = backend, backend.device
        self._staging = [self._device.allocate(self.PIECE_BYTES + (1 << 20)) for _ in range(2)]
        self._host = [self._device.pinned(self.PIECE_BYTES + (1 << 20)) for _ in range(2)]
        self._events = [None, None]
        self._turn = 0

    def load(self, tensors: Sequence["Tensor"], in_host: bool = False) -> CudaWeight | CudaVector:
        first = tensors[0]
        if len(tensors) == 1 and first.dtype.name == "F32" and (len(first.shape) == 1 or first.cols <= VECTOR_COLS):
            return self._vector(first)
        self._check(tensors)
        cols = first.cols
        wrap = -(-cols // UNIT_COLS) if all(tensor.dtype.name == "F32" for tensor in tensors) else 0
        units = 2 * wrap or -(-cols // UNIT_COLS)
        paired = len(tensors) == 2 and first.shape == tensors[1].shape and first.dtype == tensors[1].dtype
        segments, nbytes = plan_segments(tensors, units, paired)
        card, step = self._device.card, 2 if paired else 1
        num_tiles = segments[-1].first_tile + segments[-1].num_tiles
        splits = 1 if wrap else choose_splits(card, units, num_tiles, step)
        if wrap and rows_shared_bytes(card, 8, wrap, False) > card.shared_bytes:
            raise GpuError(f"{first.name} is F32 with {cols} columns, too many for the GPU.", "Convert with --tier f16.")
        costs = np.concatenate([np.full(s.num_tiles, s.tile_bytes * KIND_COSTS[s.kind]) for s in segments])
        if num_tiles >= 1 << 16:
            raise GpuError(f"{first.name} has {first.rows} rows, the GPU takes at most {TILE_ROWS << 16}.")
        groups = min(card.num_sms, cuda_args.MAX_RUNS // 2) // splits
        runs = partition(costs, 2 * max(1, min(groups, -(-num_tiles // (2 * step)))), step)
        try:
            address = self._device.host_memory(nbytes + 4096) if in_host else self._backend.weights_arena.take(nbytes + 4096)
        except OutOfMemory as error:
            raise OutOfMemory(f"{first.name}: {error.message}", error.hint) from error
        for index, tensor in enumerate(tensors):
            segment = segments[0] if paired else segments[index]
            stride = segment.tile_bytes * (2 if paired else 1)
            self._pack(tensor, address + segment.offset + (index * segment.tile_bytes if paired else 0), stride, units, wrap)
        shape = (sum(tensor.rows for tensor in tensors), cols)
        weight = CudaWeight(shape, nbytes, 0 if in_host else nbytes, address, segments, units, wrap, paired, splits, runs)
        self._backend.reserve_for(weight)
        return weight

    def _check(self, tensors: Sequence["Tensor"]) -> None:
        names, kinds = {tensor.dtype.name for tensor in tensors}, [tensor.name for tensor in tensors]
        if len({tensor.cols for tensor in tensors}) != 1 or len(tensors) > cuda_args.MAX_SEGMENTS:
            raise GpuError(f"{', '.join(kinds)}: expected at most {cuda_args.MAX_SEGMENTS} matrices of equal columns.")
        if "F32" in names and len(names) > 1:
            raise GpuError(f"{', '.join(kinds)} mix F32 with {', '.join(sorted(names - {'F32'}))}.", "Convert with --tier f16.")
        if tensors[0].cols % 4:
            raise GpuError(f"{kinds[0]} has {tensors[0].cols} columns, expected a multiple of 4.")

    def _vector(self, tensor: "Tensor") -> CudaVector:
        values = np.ascontiguousarray(tensor.values(), np.float32)
        address = self._backend.weights_arena.take(values.nbytes)
        self._device.upload(address, values)
        return CudaVector(tuple(tensor.shape), address)

    def _pack(self, tensor: "Tensor", target: int, stride: int, units: int, wrap: int) -> None:
        kind, group_cols = kind_of(tensor)
        name = tensor.dtype.name
        exact = name in ("F16", "F32") or kind != KIND_F16
        row_bytes = tensor.data.shape[1] if exact else 2 * tensor.cols
        groups = tensor.scales.shape[1] if tensor.scales is not None and exact else 0
        step = max(TILE_ROWS, self.PIECE_BYTES // (row_bytes + 2 * groups) // TILE_ROWS * TILE_ROWS)
        if TILE_ROWS * (row_bytes + 2 * groups) > self.PIECE_BYTES:
            raise GpuError(f"{tensor.name} has rows of {row_bytes} bytes, too long to load.")
        for start in range(0, tensor.rows, step):
            stop = min(start + step, tensor.rows)
            data, scales = self._send(tensor, start, stop, exact, groups)
            for part in (1, 2) if wrap else (0,):
                tiles = target + start // TILE_ROWS * stride + (wrap * UNIT_BYTES[KIND_F16] if part == 2 else 0)
                args = cuda_args.Repack(data, scales, tiles, stride, kind, stop - start, tensor.cols, wrap or units, row_bytes,
                                        groups, group_cols or 1, part)
                self._backend.launch("repack", "repack", (wrap or units, -(-(stop - start) // TILE_ROWS)), 32, 0, args, dependent=False)
            self._events[self._turn] = self._device.mark()
            self._turn ^= 1

    def _send(self, tensor: "Tensor", start: int, stop: int, exact: bool, groups: int) -> tuple[int, int]:
        """Rows start .. stop into the staging buffer whose turn it is: addresses of codes and scales."""
        turn = self._turn
        if self._events[turn] is not None:
            self._device.wait(self._events[turn])
            self._events[turn] = None
        rows = tensor.data[start:stop] if exact else tensor.values(start, stop).astype(np.float16).view(np.uint8)
        host, size = self._host[turn], rows.nbytes
        host[:size].reshape(rows.shape)[...] = rows
        offset = -(-size // 256) * 256
        end = size
        if groups:
            scales = tensor.scales[start:stop].view(np.uint8)
            end = offset + scales.nbytes
            host[offset:end].reshape(scales.shape)[...] = scales
        self._device.upload_pinned(self._staging[turn], host[:end])
        return self._staging[turn], self._staging[turn] + offset if groups else 0

    def close(self) -> None:
        """Give the staging memory back once nothing more is loaded."""
        self._device.synchronize()
        for address in self._staging:
            self._device.release(address)
        self._staging, self._host = [], []


def packed_bytes(tensor: "Tensor") -> int:
    """Device memory that a tensor takes, the space between weights included; a few percent of a percent too much."""
    gap = 4096 + 512
    if tensor.dtype.name == "F32" and (len(tensor.shape) == 1 or tensor.cols <= VECTOR_COLS):
        return 4 * tensor.rows * tensor.cols + gap
    units = -(-tensor.cols // UNIT_COLS) * (2 if tensor.dtype.name == "F32" else 1)
    return -(-tensor.rows // TILE_ROWS) * units * UNIT_BYTES[kind_of(tensor)[0]] + gap
