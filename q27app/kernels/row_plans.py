"""Where each warp of the row family begins: worked out when a row list is loaded, once for all lists of one shape, and kept on the
device, as a kernel would need some hundred instructions a warp for it before it asks for its first weights (row_shares.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, GROUP_TILES, KIND_F16, ROUND_GROUPS, STEP_UNITS, TILE_ROWS, UNIT_BYTES, RowShares, Segment, group_count, group_steps,
)
from q27app.kernels.launch import Device
from q27app.kernels.memory import Arena

PLAN = np.dtype([("offset", "<i8"), *((name, "<i4") for name in ("second", "left", "kinds", "group", "step", "unit"))])
"""Plan of row_shares.cuh, 32 bytes."""
GATHER = np.dtype([(name, "<i4") for name in ("warps", "row", "left", "flags")])
"""Gather of row_shares.cuh, 16 bytes."""
TAKES, GIVES, IS_F16 = 1, 2, 4


class _Line:
    """The line of steps: what stands at positions, for arrays of them."""

    def __init__(self, segments: Sequence[Segment], units: int) -> None:
        counts, self.lengths = (np.array([of(segment) for segment in segments]) for of in (group_count, lambda s: group_steps(s, units)))
        self.first_steps = np.concatenate([[0], np.cumsum(counts * self.lengths)[:-1]])
        self.first_groups = np.concatenate([[0], np.cumsum(counts)[:-1]])

    def segment(self, position: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.first_steps, position, "right") - 1

    def group(self, position: np.ndarray) -> np.ndarray:
        """Within its segment; behind the last group at the end of the line."""
        segment = self.segment(position)
        return (position - self.first_steps[segment]) // self.lengths[segment]

    def step(self, position: np.ndarray) -> np.ndarray:
        """Within its group."""
        segment = self.segment(position)
        return (position - self.first_steps[segment]) % self.lengths[segment]

    def number(self, position: np.ndarray) -> np.ndarray:
        """Of its group, through all segments."""
        return self.first_groups[self.segment(position)] + self.group(position)


def _rounds(shares: RowShares, segments: Sequence[Segment], units: int, line: _Line) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), both [rounds, blocks]: a round begins where a group does, but for a block's first."""
    borders = np.array(shares.borders(segments, units))
    begin, end = borders[:-1], borders[1:]
    positions = [begin + (end - begin) * index // shares.rounds for index in range(1, shares.rounds)]
    starts = [begin, *(np.maximum(begin, position - line.step(position)) for position in positions), end]
    return np.stack(starts[:-1]), np.stack(starts[1:])


def plan_warps(shares: RowShares, segments: Sequence[Segment], units: int, wrap: int) -> tuple[np.ndarray, np.ndarray]:
    """(PLAN [rounds, blocks, BLOCK_WARPS], GATHER [rounds, blocks, ROUND_GROUPS]). units, wrap: as of a CudaWeight."""
    line = _Line(segments, units)
    low, high = (part[..., None] for part in _rounds(shares, segments, units, line))
    warps = np.arange(BLOCK_WARPS)
    start, stop = low + ((high - low) * warps >> 4), low + ((high - low) * (warps + 1) >> 4)
    segment, group, step = line.segment(start), line.group(start), line.step(start)   # before the line's end, even where a warp has nothing to do
    offsets, tile_bytes, num_tiles, step_bytes, step_units, kinds = (np.array(values)[segment] for values in zip(*(
        (s.offset, s.tile_bytes, s.num_tiles, STEP_UNITS[s.kind] * UNIT_BYTES[s.kind], STEP_UNITS[s.kind], s.kind) for s in segments), strict=True))
    out = np.zeros(start.shape, PLAN)
    out["offset"] = offsets + group * GROUP_TILES * tile_bytes + step * step_bytes
    out["second"] = np.where(group * GROUP_TILES + 1 < num_tiles, tile_bytes, 0)
    out["left"] = stop - start
    groups = np.where(high > low, line.number(high - 1) - line.number(low) + 1, 0)
    out["kinds"] = segment | kinds << 2 | groups << 4
    out["group"], out["step"] = group, step
    unit = step * step_units
    out["unit"] = np.where((wrap > 0) & (unit >= wrap), unit - wrap, unit)
    return out, _gathers(segments, line, low, high, start, stop)


def _gathers(segments: Sequence[Segment], line: _Line, low: np.ndarray, high: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """GATHER [rounds, blocks, ROUND_GROUPS]. low, high [rounds, blocks, 1]: of a block's round; start, stop [rounds, blocks, BLOCK_WARPS]."""
    number = line.number(low) + np.arange(ROUND_GROUPS)   # what is behind a round's last group is not read
    segment = np.minimum(np.searchsorted(line.first_groups, number, "right") - 1, len(segments) - 1)
    group = number - line.first_groups[segment]
    begin = line.first_steps[segment] + group * line.lengths[segment]
    end = begin + line.lengths[segment]
    has_steps = (start[..., None, :] < np.minimum(end, high)[..., None]) & (stop[..., None, :] > np.maximum(begin, low)[..., None]) & (stop > start)[..., None, :]
    first, last = has_steps.argmax(-1), BLOCK_WARPS - 1 - has_steps[..., ::-1].argmax(-1)
    before = number - line.number(np.take_along_axis(start, first, -1))
    first_rows, num_rows, kinds = (np.array(values)[segment] for values in zip(*((s.first_row, s.num_rows, s.kind) for s in segments), strict=True))
    out, rows = np.zeros(number.shape, GATHER), GROUP_TILES * TILE_ROWS
    out["warps"] = first | last << 8 | np.where(has_steps.any(-1), before, 0) << 16
    out["row"], out["left"] = first_rows + group * rows, num_rows - group * rows
    out["flags"] = np.where(begin < low, TAKES, 0) | np.where(end > high, GIVES, 0) | np.where(kinds == KIND_F16, IS_F16, 0) | group * TILE_ROWS << 3
    return out


class RowPlans:
    """The plans on a device, each with its gathers behind it. One of a shape serves all layers that have it."""

    def __init__(self, device: Device) -> None:
        self._device, self._arena = device, Arena(device, "plans", 1 << 20)
        self._known: dict[tuple, int] = {}

    @property
    def nbytes(self) -> int:
        """Device memory that they take."""
        return self._arena.nbytes

    def of(self, shares: RowShares, segments: tuple[Segment, ...], units: int, wrap: int) -> int:
        """Address of the plans of such a row list. Raises OutOfMemory."""
        key = shares, segments, units, wrap
        if key not in self._known:
            table = np.concatenate([part.reshape(-1).view(np.uint8) for part in plan_warps(*key)])
            address = self._arena.take(table.nbytes)
            self._device.upload(address, table)
            self._known[key] = address
        return self._known[key]
