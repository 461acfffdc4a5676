"""The arrays of a pass on the device, at fixed addresses: a recorded pass reads whatever the last `put` left there.

    tokens, positions, logit_rows int32 [max_rows]; row_starts int32 [max_seqs + 1]; slots int32 [max_seqs]; keeps int32 [MAX_KEEPS, 3];
    block_tables int32 [max_seqs, table_stride]
"""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels.batch import MAX_KEEPS, Batch
from q27app.kernels.launch import Device


def _places(max_rows: int, max_seqs: int, table_stride: int) -> tuple[dict[str, int], int]:
    """Word at which each field begins, and words in all."""
    sizes = {"tokens": max_rows, "positions": max_rows, "logit_rows": max_rows, "row_starts": max_seqs + 1,
             "slots": max_seqs, "keeps": 3 * MAX_KEEPS, "tables": max_seqs * table_stride}
    at, end = {}, 0
    for name, size in sizes.items():
        at[name] = end
        end += -(-size // 4) * 4
    return at, end


def area_bytes(max_rows: int, max_seqs: int, table_stride: int) -> int:
    """Device memory of a BatchArea."""
    return 4 * _places(max_rows, max_seqs, table_stride)[1]


class BatchArea:
    """Room for passes of up to max_rows rows of max_seqs sequences. Owned by the backend."""

    def __init__(self, device: Device, max_rows: int, max_seqs: int, table_stride: int) -> None:
        self.max_rows, self.max_seqs, self.table_stride = max_rows, max_seqs, table_stride
        self._device = device
        self._at, end = _places(max_rows, max_seqs, table_stride)
        self._host = device.pinned(4 * end).view(np.int32)
        self._host[:] = 0
        self.address = device.allocate(4 * end)
        self._moment: int | None = None
        self._num_tables = 0   # so many rows of the tables are on the device as they are here

    def at(self, name: str, index: int = 0) -> int:
        """Device address of item `index` of a field."""
        return self.address + 4 * (self._at[name] + index)

    def put(self, batch: Batch) -> None:
        """Copy the batch's arrays over. The host waits only if the copy before has not happened yet."""
        is_recording = self._device.is_recording
        if self._moment is not None and not is_recording and not self._device.has_passed(self._moment):
            self._device.synchronize()
        width = batch.block_tables.shape[1]
        if width > self.table_stride:
            raise Q27Error(f"a block table has {width} entries, expected at most {self.table_stride}.")
        for name, values in (("tokens", batch.tokens), ("positions", batch.positions), ("logit_rows", batch.logit_rows),
                             ("row_starts", batch.row_starts), ("slots", batch.slots)):
            self._host[self._at[name]:self._at[name] + len(values)] = values
        if batch.keeps:
            keeps = np.array([(keep.seq, keep.rows, keep.slot) for keep in batch.keeps], np.int32).reshape(-1)
            self._host[self._at["keeps"]:self._at["keeps"] + len(keeps)] = keeps
        tables = self._host[self._at["tables"]:].reshape(-1)[:self.max_seqs * self.table_stride]
        tables = tables.reshape(self.max_seqs, self.table_stride)[:batch.num_seqs, :width]
        wanted, used = np.maximum(batch.block_tables, 0), self._at["tables"]
        if batch.num_seqs > self._num_tables or (tables != wanted).any() or is_recording:
            tables[:] = wanted
            used += max(self._num_tables, batch.num_seqs) * self.table_stride
            self._num_tables = 0 if is_recording else max(self._num_tables, batch.num_seqs)
        self._device.upload_pinned(self.address, self._host[:used])
        self._moment = self._device.moment()

    def release(self) -> None:
        self._device.release(self.address)
