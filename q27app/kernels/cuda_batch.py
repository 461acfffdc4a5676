"""The arrays of a pass on the device, at fixed addresses: a recorded pass reads whatever the last `put` left there.

    tokens, positions, logit_rows int32 [max_rows]; row_starts int32 [max_seqs + 1]; slots, lacks int32 [max_seqs]; keeps int32 [MAX_KEEPS, 3];
    block_tables int32 [max_seqs, table_stride]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels.batch import MAX_KEEPS, Batch
from q27app.kernels.launch import Device
from q27app.kernels.staging import Slates


def _places(max_rows: int, max_seqs: int, table_stride: int) -> tuple[dict[str, int], int]:
    """Word at which each field begins, and words in all."""
    sizes = {"tokens": max_rows, "positions": max_rows, "logit_rows": max_rows, "row_starts": max_seqs + 1,
             "slots": max_seqs, "lacks": max_seqs, "keeps": 3 * MAX_KEEPS, "tables": max_seqs * table_stride}
    at, end = {}, 0
    for name, size in sizes.items():
        at[name] = end
        end += -(-size // 4) * 4
    return at, end


def area_bytes(max_rows: int, max_seqs: int, table_stride: int) -> int:
    """Device memory of a BatchArea."""
    return 4 * _places(max_rows, max_seqs, table_stride)[1]


class BatchArea:
    """Room for passes of up to max_rows rows of max_seqs sequences. Owned by the backend. send: `Device.upload_pinned` or as it."""

    def __init__(self, device: Device, max_rows: int, max_seqs: int, table_stride: int,
                 send: Callable[[int, np.ndarray], None] | None = None) -> None:
        self.max_rows, self.max_seqs, self.table_stride = max_rows, max_seqs, table_stride
        self._device, self._send = device, send or device.upload_pinned
        self._at, end = _places(max_rows, max_seqs, table_stride)
        self._hosts = Slates(device, 4 * end)
        self.address = device.allocate(4 * end)
        self._tables = np.full((max_seqs, table_stride), -1, np.int32)   # what is known to be on the device, -1 elsewhere

    def at(self, name: str, index: int = 0) -> int:
        """Device address of item `index` of a field."""
        return self.address + 4 * (self._at[name] + index)

    def put(self, batch: Batch, moves: bool = False, lacks: np.ndarray | None = None) -> None:
        """Copy the batch's arrays over. The host waits only if the copy before the last has not happened yet. moves: a kernel will write
        tokens and positions; where everything else lies there, nothing is copied. lacks: see `Lacking.begin`."""
        width, count = batch.block_tables.shape[1], batch.num_seqs
        if width > self.table_stride:
            raise Q27Error(f"a block table has {width} entries, expected at most {self.table_stride}.")
        wanted, used, known = np.maximum(batch.block_tables, 0), self._at["tables"], self._tables[:count]
        is_other, fixed = bool((known[:, :width] != wanted).any()), (batch.row_starts.tobytes(), batch.slots.tobytes(), batch.logit_rows.tobytes())
        if moves and not is_other and not batch.keeps and self._hosts.holds(fixed):
            return
        host = self._hosts.open().view(np.int32)
        for name, values in (("tokens", batch.tokens), ("positions", batch.positions), ("logit_rows", batch.logit_rows),
                             ("row_starts", batch.row_starts), ("slots", batch.slots), ("lacks", () if lacks is None else lacks)):
            host[self._at[name]:self._at[name] + len(values)] = values
        if batch.keeps:
            keeps = np.array([(keep.seq, keep.rows, keep.slot) for keep in batch.keeps], np.int32).reshape(-1)
            host[self._at["keeps"]:self._at["keeps"] + len(keeps)] = keeps
        if self._device.is_recording or is_other:
            tables = host[used:used + count * self.table_stride].reshape(count, self.table_stride)
            tables[:, :width] = wanted
            used += count * self.table_stride
            known[:] = -1
        self._send(self.address, host[:used])
        self._hosts.sent(fixed)
        if is_other and not self._device.is_recording:
            known[:, :width] = wanted

    def release(self) -> None:
        self._device.release(self.address)
