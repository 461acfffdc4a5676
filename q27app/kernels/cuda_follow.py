"""Rows of the stream that an addition leaves ready for the norm behind it (follow.cuh): where, and by which scales.

A stage with a norm looks at every row and says by which power of two the next addition shall leave it; the stage behind that
addition has nothing to convert.
"""

from __future__ import annotations

from typing import NamedTuple

from q27app.kernels import cuda_args
from q27app.kernels.cuda_ready import HEAD_ROWS, READY_BYTES, RECORD_ROWS, ready_bytes, ready_units
from q27app.kernels.cuda_weights import CudaVector
from q27app.kernels.memory import CudaBuffer

FOLLOW_ROWS, FOLLOW_GROUPS = 16, 192
GROUP_COLS = 32
FOLLOW_BYTES = FOLLOW_ROWS * (8 + 8 * FOLLOW_GROUPS)
"""Follow of follow.cuh."""


def follow_parts(max_rows: int) -> int:
    """Launches of the row family of a pass whose rows may be left, at most."""
    return -(-min(max_rows, HEAD_ROWS) // FOLLOW_ROWS)


def followed_bytes(max_rows: int, hidden: int) -> int:
    """Scratch memory of the rows themselves."""
    return ready_bytes(min(max_rows, HEAD_ROWS), hidden)


class Measured(NamedTuple):
    """How a stage with a norm takes its rows: as the addition before left them, by the scales of which of the two Follow (None:
    as x has them), and where it leaves the next scales."""

    of: int | None
    next: int


class FollowedRows:
    """Of a backend: which rows were measured or left. One x at a time, as there is one place for its scales and its rows."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self.clear()

    def clear(self) -> None:
        self._x: tuple[int, tuple[int, ...]] | None = None
        """Address and shape."""
        self._scaled: int | None = None
        self._left: tuple[int, int] | None = None

    def forget(self, x: CudaBuffer) -> None:
        """x becomes something else."""
        if self._x is not None and self._x[0] == x.address:
            self.clear()

    def measure(self, norm: CudaVector | None, x: CudaBuffer) -> Measured | None:
        """By a stage that reads x behind a norm; None: not of such rows."""
        key, of = self._left if self._left is not None and self._x == (x.address, x.shape) else (0, 0)
        rows, cols = x.shape
        self.forget(x)
        if norm is None or self._backend.is_prefill or rows > HEAD_ROWS or cols % 4 or cols > FOLLOW_GROUPS * GROUP_COLS:
            return None
        found = Measured(of, 1 - of) if key == norm.address else Measured(None, 0)
        self._x, self._scaled, self._left = (x.address, x.shape), found.next, None
        return found

    def leave(self, norm: CudaVector | None, x: CudaBuffer) -> int | None:
        """By an addition to x, whose rows go through `norm` next: by the scales of which Follow; None: nothing is left."""
        of = self._scaled if self._x == (x.address, x.shape) else None
        if norm is None or of is None:
            self.forget(x)
            return None
        self._scaled, self._left = None, (norm.address, of)
        return of

    def address(self, index: int | None, start: int) -> int:
        """Of a Follow for the rows from `start` on, a multiple of 16; 0: none."""
        if index is None:
            return 0
        return self._backend.scratch.follow + (index * follow_parts(self._backend.scratch.max_rows) + start // FOLLOW_ROWS) * FOLLOW_BYTES

    def records(self, x: CudaBuffer, start: int) -> cuda_args.Ready:
        """Where the rows of x from `start` on are left. Their scale is each row's own."""
        units = ready_units(x.shape[1])
        return cuda_args.Ready(self._backend.scratch.followed + start // RECORD_ROWS * units * READY_BYTES, units, 1.0, 1.0)
