"""Weights on the device: row lists packed for the tensor cores (quant.cuh), and small float32 vectors.

A row list is cut into tiles of 16 rows, numbered through the list; each tensor of the list is one segment. Two tensors of
one shape and number type are a gate and an up matrix: their tiles alternate, so that a block holds both halves of a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from q27app.errors import GpuError, OutOfMemory
from q27app.kernels import cuda_args
from q27app.kernels.staging import Copier

if TYPE_CHECKING:
    from q27app.kernels.card import Card
    from q27app.kernels.row_plans import RowPlans
    from q27app.weights.container import Tensor

KIND_F16, KIND_Q8, KIND_Q4 = 0, 1, 2
UNIT_BYTES = {KIND_F16: 2048, KIND_Q8: 1056, KIND_Q4: 544}
STEP_UNITS = {KIND_Q4: 4, KIND_Q8: 2, KIND_F16: 1}
"""Units of a step of the row family (row_shares.cuh)."""

UNIT_COLS, TILE_ROWS, GROUP_TILES, BLOCK_WARPS, ROUND_GROUPS = 64, 16, 2, 16, 36


def round_places(shared_bytes: int) -> int:
    """Groups that a warp may be in between two barriers of the row family, so that 16 rows' sums fit."""
    return 3 if rows_shared_bytes(16, 0, False, 3, 0) <= shared_bytes else 2


WHOLE_LOSS = 0.04
"""Blocks take whole groups where that leaves the largest share at most so much above the mean."""

BORDER_BYTES = GROUP_TILES * 16 * TILE_ROWS * 4
"""Of the sums that a block leaves to the next."""

PLAN_BYTES, GATHER_BYTES = 32, 16
"""Of a warp's plan and of a group's gather (row_plans.py)."""

FUSED_ROWS = 2
"""Up to so many rows every block converts for itself; more are converted once, in a launch of their own."""
RING_UNIT_BYTES = 8 * UNIT_COLS * 2 + 64
"""Of 8 rows' halves and starts (row_ring.cuh)."""
RING_READY_BYTES = 64
"""So much more where sums take the place of starts."""
FEW_RING_BYTES = 3 * 1024
"""Of one or two rows that were left ready, a warp's two steps (row_ring.cuh)."""

VECTOR_COLS = 8
"""A float32 matrix of at most so many columns (the convolution's taps) stays as it is."""

_KINDS = {"Q8_G128": (KIND_Q8, 128), "Q4_G64": (KIND_Q4, 64)}


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
class RowShares:
    """How the row family shares a row list out (row_shares.cuh): block b takes the line of steps from border b to border b + 1,
    `total` b / blocks, where `whole` at the nearest end of a group. total: steps of all; rounds: parts of a block's share with a
    barrier after each; places: groups that a warp is in within a round, at most."""

    blocks: int
    total: int
    whole: bool
    rounds: int = 1
    places: int = 1

    def borders(self, segments: Sequence[Segment], units: int) -> list[int]:
        """[blocks + 1] positions on the line."""
        out, start, index = [], 0, 0
        for block in range(self.blocks):
            position = self.total * block // self.blocks
            while position >= start + group_count(segments[index]) * group_steps(segments[index], units):
                start += group_count(segments[index]) * group_steps(segments[index], units)
                index += 1
            length = group_steps(segments[index], units)
            within = (position - start) % length
            if self.whole:
                position += -within if within < length - within else length - within
            out.append(position)
        return [*out, self.total]


def group_count(segment: Segment) -> int:
    return -(-segment.num_tiles // GROUP_TILES)


def group_steps(segment: Segment, units: int) -> int:
    return units // STEP_UNITS[segment.kind]


def row_shares(num_sms: int, segments: Sequence[Segment], units: int, max_places: int) -> RowShares:
    """Equal shares for at most num_sms blocks, none of them empty; a group lies in two blocks at most. max_places: round_places."""
    groups, lengths = sum(map(group_count, segments)), [group_steps(segment, units) for segment in segments]
    total = sum(group_count(segment) * length for segment, length in zip(segments, lengths, strict=True))
    blocks = max(1, min(num_sms, groups))
    shares = RowShares(blocks, total, True)
    sizes = [end - start for start, end in pairwise(shares.borders(segments, units))]
    if min(sizes) <= 0 or max(sizes) * blocks > total * (1 + WHOLE_LOSS):
        shares = RowShares(max(1, min(blocks, total // max(lengths))), total, False)
    return _with_rounds(shares, segments, units, max_places)


def _with_rounds(shares: RowShares, segments: Sequence[Segment], units: int, max_places: int) -> RowShares:
    """So many rounds that no warp is in more than max_places groups of one; a round may begin up to a group early."""
    shortest, longest = (pick(group_steps(segment, units) for segment in segments) for pick in (min, max))
    largest = max(end - start for start, end in pairwise(shares.borders(segments, units)))
    rounds = 1
    while True:
        round_steps = largest if rounds == 1 else -(-largest // rounds) + longest
        places = -(-round_steps // (BLOCK_WARPS * shortest)) + 1
        if places <= max_places and round_steps // shortest + 2 <= ROUND_GROUPS or rounds * longest > largest:
            return replace(shares, rounds=rounds, places=places)
        rounds += 1


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
    """A packed row list of packed_bytes at address; nbytes of them on the device, 0 where it stays in host memory.
    units: 64-column pieces of a tile; wrap: units after which the activations repeat (float32 matrices are a high and a low half
    side by side), 0 = never. plans: address of what each warp does of it (row_plans.py)."""

    shape: tuple[int, int]
    packed_bytes: int
    nbytes: int
    address: int
    segments: tuple[Segment, ...]
    units: int
    wrap: int
    paired: bool
    shares: RowShares
    plans: int

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

    def segment_args(self):
        return (cuda_args.Segment * cuda_args.MAX_SEGMENTS)(*(segment.args() for segment in self.segments))


def without_rows(weight: CudaWeight, skip: tuple[int, int], card: Card, plans: RowPlans) -> CudaWeight:
    """The weight without its rows skip[0] to skip[1] - 1, the others where they were. Both are borders of tiles, the weight is one
    matrix."""
    first, end = skip
    if len(weight.segments) != 1 or weight.paired or first % TILE_ROWS or end % TILE_ROWS or not 0 < first < end < weight.shape[0]:
        raise GpuError(f"rows {first} to {end} of a weight {list(weight.shape)} of {len(weight.segments)} segments cannot be left out.")
    whole, tiles = weight.segments[0], end // TILE_ROWS
    segments = (replace(whole, num_tiles=first // TILE_ROWS, num_rows=first),
                replace(whole, first_tile=tiles, num_tiles=whole.num_tiles - tiles, first_row=end, num_rows=whole.num_rows - end,
                        offset=whole.offset + tiles * whole.tile_bytes))
    shares = row_shares(max(1, card.num_sms), segments, weight.units, round_places(card.shared_bytes))
    return replace(weight, nbytes=0, segments=segments, shares=shares, plans=plans.of(shares, segments, weight.units, weight.wrap))


def rows_shared_bytes(rows: int, units: int, fused: bool, places: int, ring: int, ready: bool = False) -> int:
    """Dynamic shared memory of linear_rows (Memory in linear_rows.cu). units: staged ones; fused: rows that every block converts;
    ring: Card.row_ring; ready: rows that were left ready."""
    is_few, row_groups = fused or ready and rows <= FUSED_ROWS, 2 if rows > 8 else 1
    sums = BLOCK_WARPS * places * GROUP_TILES * row_groups * (2 if is_few else 8) * 20 * 4
    fixed = 64 + 2 * 2 * 16 * 4 + ROUND_GROUPS * GATHER_BYTES + BLOCK_WARPS * PLAN_BYTES
    if fused:
        return fixed + sums + units * 16 + rows * (units * UNIT_COLS + 8) * 2
    unit_bytes = RING_UNIT_BYTES + (RING_READY_BYTES if ready else 0)
    return fixed + sums + BLOCK_WARPS * (FEW_RING_BYTES if is_few else ring * unit_bytes if ring // row_groups > 1 else 0)


def unit_count(tensor: "Tensor") -> int:
    """Units of a tile: float32 as a high and a low half, the others up to whole steps."""
    units, most = -(-tensor.cols // UNIT_COLS), max(STEP_UNITS.values())
    return 2 * units if tensor.dtype.name == "F32" else -(-units // most) * most


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


LOAD_THREADS = 8
"""Most threads that read a piece of a file."""


class Loader:
    """Packs tensors on the device through a bounded staging buffer, while the next piece is being read."""

    PIECE_BYTES = 32 << 20

    def __init__(self, backend) -> None:
        self._backend, self._device = backend, backend.device
        self._staging = [self._device.allocate(self.PIECE_BYTES + (1 << 20)) for _ in range(2)]
        self._host = [self._device.pinned(self.PIECE_BYTES + (1 << 20)) for _ in range(2)]
        self._events = [None, None]
        self._turn = 0
        self._copier = Copier(min(LOAD_THREADS, os.cpu_count() or 1))

    def load(self, tensors: Sequence["Tensor"], in_host: bool = False) -> CudaWeight | CudaVector:
        first = tensors[0]
        if len(tensors) == 1 and first.dtype.name == "F32" and (len(first.shape) == 1 or first.cols <= VECTOR_COLS):
            return self._vector(first)
        self._check(tensors)
        cols = first.cols
        wrap = -(-cols // UNIT_COLS) if all(tensor.dtype.name == "F32" for tensor in tensors) else 0
        units = unit_count(first)
        paired = len(tensors) == 2 and first.shape == tensors[1].shape and first.dtype == tensors[1].dtype
        segments, nbytes = plan_segments(tensors, units, paired)
        card = self._device.card
        shares = row_shares(max(1, card.num_sms), segments, units, round_places(card.shared_bytes))
        if shares.total * units >= 1 << 31:
            raise GpuError(f"{first.name} has {first.rows} rows of {cols} columns, too many for the GPU.")
        try:
            plans = self._backend.plans.of(shares, segments, units, wrap)
            address = self._device.host_memory(nbytes + 4096) if in_host else self._backend.weights_arena.take(nbytes + 4096)
        except OutOfMemory as error:
            raise OutOfMemory(f"{first.name}: {error.message}", error.hint) from error
        for index, tensor in enumerate(tensors):
            segment = segments[0] if paired else segments[index]
            stride = segment.tile_bytes * (2 if paired else 1)
            self._pack(tensor, address + segment.offset + (index * segment.tile_bytes if paired else 0), stride, units, wrap)
        shape = (sum(tensor.rows for tensor in tensors), cols)
        weight = CudaWeight(shape, nbytes, 0 if in_host else nbytes, address, segments, units, wrap, paired, shares, plans)
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
        self._copier.copy(host[:size], np.ascontiguousarray(rows).reshape(-1))
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
        self._copier.close()
        for address in self._staging:
            self._device.release(address)
        self._staging, self._host = [], []


def packed_bytes(tensor: "Tensor") -> int:
    """Device memory that a tensor takes, the space between weights included; a few percent of a percent too much."""
    gap = 4096 + 512
    if tensor.dtype.name == "F32" and (len(tensor.shape) == 1 or tensor.cols <= VECTOR_COLS):
        return 4 * tensor.rows * tensor.cols + gap
    return -(-tensor.rows // TILE_ROWS) * unit_count(tensor) * UNIT_BYTES[kind_of(tensor)[0]] + gap
