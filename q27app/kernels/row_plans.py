"""Where each warp of the row family begins: worked out when a row list is loaded, once for all lists of one shape, and kept on the
device, as a kernel would need some hundred instructions a warp for it before it asks for its first weights (row_shares.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, GROUP_TILES, STEP_UNITS, UNIT_BYTES, RowShares, Segment, group_count, group_steps,
)
from q27app.kernels.launch import Device
from q27app.kernels.memory import Arena

PLAN = np.dtype([("offset", "<i8"), *((name, "<i4") for name in (
    "second", "left", "flags", "group", "step", "unit", "number", "first_group", "groups", "ends"))])
"""Plan of row_shares.cuh, 48 bytes."""
IS_FIRST, IS_LAST = 16, 32
HAS_HEAD, HAS_TAIL = 1, 2


class _Line:
    """The line of steps: what stands at positions, for arrays of them."""

    def __init__(self, segments: Sequence[Segment], units: int) -> None:
        counts, self.lengths = (np.array([of(segment) for segment in segments]) for of in (group_count, lambda s: group_steps(s, units)))
        self._first_steps = np.concatenate([[0], np.cumsum(counts * self.lengths)[:-1]])
        self.first_groups = np.concatenate([[0], np.cumsum(counts)[:-1]])

    def segment(self, position: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._first_steps, position, "right") - 1

    def group(self, position: np.ndarray) -> np.ndarray:
        """Within its segment; behind the last group at the end of the line."""
        segment = self.segment(position)
        return (position - self._first_steps[segment]) // self.lengths[segment]

    def step(self, position: np.ndarray) -> np.ndarray:
        """Within its group."""
        segment = self.segment(position)
        return (position - self._first_steps[segment]) % self.lengths[segment]

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


def plan_warps(shares: RowShares, segments: Sequence[Segment], units: int, wrap: int) -> np.ndarray:
    """PLAN [rounds, blocks, BLOCK_WARPS]. units, wrap: as of a CudaWeight."""
    line = _Line(segments, units)
    low, high = (part[..., None] for part in _rounds(shares, segments, units, line))
    warps = np.arange(BLOCK_WARPS)
    start, stop = low + ((high - low) * warps >> 4), low + ((high - low) * (warps + 1) >> 4)
    at = np.minimum(start, shares.total - 1)   # there, even if the warp has nothing to do
    segment, group, step = line.segment(at), line.group(at), line.step(at)
    offsets, tile_bytes, num_tiles, step_bytes, step_units, kinds = (np.array(values)[segment] for values in zip(*(
        (s.offset, s.tile_bytes, s.num_tiles, STEP_UNITS[s.kind] * UNIT_BYTES[s.kind], STEP_UNITS[s.kind], s.kind) for s in segments), strict=True))
    out = np.zeros(start.shape, PLAN)
    out["offset"] = offsets + group * GROUP_TILES * tile_bytes + step * step_bytes
    out["second"] = np.where(group * GROUP_TILES + 1 < num_tiles, tile_bytes, 0)
    out["left"] = stop - start
    is_first = (step == 0) | (start == low)
    out["flags"] = segment | kinds << 2 | np.where(is_first, IS_FIRST, 0) | np.where(stop == high, IS_LAST, 0)
    out["group"], out["step"] = group, step
    unit = step * step_units
    out["unit"] = np.where((wrap > 0) & (unit >= wrap), unit - wrap, unit)
    out["first_group"] = line.number(low)
    out["number"] = line.number(at) - line.number(low)
    last = high - 1
    out["groups"] = line.number(last) - line.number(low) + 1
    has_tail = line.step(last) + 1 < line.lengths[line.segment(last)]
    out["ends"] = np.where(line.step(low) > 0, HAS_HEAD, 0) | np.where(has_tail, HAS_TAIL, 0)
    return out


class RowPlans:
    """The plans on a device. One of a shape serves all layers that have it."""

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
            plans = plan_warps(*key)
            address = self._arena.take(plans.nbytes)
            self._device.upload(address, plans.reshape(-1).view(np.uint8))
            self._known[key] = address
        return self._known[key]
