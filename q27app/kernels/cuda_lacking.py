"""Rows that states lack: a sequence that takes one row a pass beside others has its delta states written with every fourth row alone.

What a row adds to the states (its keys, what each column learned of them, decays) is kept beside them, and whoever looks at the states
next applies it first, with the arithmetic of the row itself, so that no bit depends on when that happens: `delta_flow` on its way,
everybody else after `settle`. The slots of a pass are written together, as soon as one of them has to be, so that three of four passes
write nothing however the sequences came together.

record: [slot][delta layer]([key head][3][head dim] keys, then of each share of 64 value dims [4] decays, the last unused, and [3][64] what its
        columns learned) f32
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args

MAX_LACKING = 3
"""Rows that a state may lack (LACKS in delta_flow.cu)."""

STEADY_PASSES = 4
"""A slot's states are written with every row until so many passes in a row went through delta_flow, or did so before its last pass of another kind: to
settle costs what is saved by about two rows, so company that comes and goes would lose by it, while a pass with drafts now and then costs no more than that."""


def share_launch(geometry) -> tuple[int, int]:
    """Shares of a sequence in delta_flow.cu, and threads that take one (HEAD_SHARES, Flow::THREADS)."""
    dim, columns = geometry.delta_head_dim, min(64, geometry.delta_head_dim)
    return geometry.delta_value_heads * dim // columns, columns // 2 * (dim // 16)


def lacking_floats(geometry) -> int:
    """Of a slot and layer (LACKING in delta_flow.cu)."""
    columns = min(64, geometry.delta_head_dim)
    return geometry.delta_key_heads * MAX_LACKING * geometry.delta_head_dim + share_launch(geometry)[0] * (4 + MAX_LACKING * columns)


class Lacking:
    """Of a `CudaState`, which owns it. rows: int32 [slots], how many each lacks; the device is told of those of a pass (`begin`). steady: see STEADY_PASSES.
    _run, _run_before: passes of delta_flow in a row, now and before the last pass of another kind."""

    def __init__(self, backend, state) -> None:
        self._backend, self._state, self.steady = backend, state, STEADY_PASSES
        self.rows, self._run, self._run_before = (np.zeros(state.num_slots, np.int32) for _ in range(3))
        self.stride = state.num_delta_layers * lacking_floats(state.geometry)
        nbytes = state.num_slots * self.stride * 4 if backend.lacking_rows else 0
        self.address = backend.device.allocate(nbytes) if nbytes else 0
        if nbytes:
            backend.device.fill(self.address, nbytes)

    def begin(self, slots: np.ndarray) -> np.ndarray:
        """Of a pass of `delta_flow` that is about to run: what it is told of each sequence (Delta.lacks). A recording that contains this writes the states with
        every row, and may only be replayed while they lack none."""
        rows = self.rows[slots]
        if self._backend.device.is_recording:
            self.settle(slots)
            return ~rows
        writes = (rows == MAX_LACKING).any() | (np.maximum(self._run, self._run_before)[slots] < self.steady)
        self._run[slots] += 1
        self.rows[slots] = np.where(writes, 0, rows + 1)
        return np.where(writes, ~rows, rows)

    def end(self, slots: np.ndarray) -> None:
        """Before a pass of another kind."""
        self.settle(slots)
        self._run_before[slots], self._run[slots] = self._run[slots], 0

    def drop(self, slots: Iterable[int]) -> None:
        """Their states are about to be written as a whole."""
        for slot in slots:
            self.rows[slot] = self._run[slot] = self._run_before[slot] = 0

    def settle(self, slots: Iterable[int]) -> None:
        """Write the states with the rows that they lack."""
        late = [int(slot) for slot in slots if self.rows[slot]]
        if late and self._backend.device.is_recording:   # each replay would apply them again
            raise Q27Error(f"slots {late} lack rows of passes before a recording that begins one of its own.")
        for first in range(0, len(late), cuda_args.MAX_SETTLED):
            some = late[first:first + cuda_args.MAX_SETTLED]
            args = cuda_args.Settle()
            self._state.fill_args(args.delta)
            for place, slot in enumerate(some):
                args.slots[place], args.rows[place] = slot, int(self.rows[slot])
            shares, threads = share_launch(self._state.geometry)
            grid = (shares, len(some), self._state.num_delta_layers)
            self._backend.launch("delta_flow", "delta_settle", grid, threads, 0, args, dependent=False)
        for slot in late:
            self.rows[slot] = 0
