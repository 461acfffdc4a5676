"""What belongs to sequences on the NumPy backend: recurrent slots and paged keys and values.

    conv    float32 [slots, delta layers, K - 1, C]      raw rows before the convolution, oldest first
    delta   float32 [slots, delta layers, Nv, Dk, Dv]    S, key index first
    hidden  float32 [slots, hidden]                      final norm's row of the last computed position
    keys    one array a KV layer, [kv heads, blocks * 64, items] in the format's storage dtype; values alike

A head's consecutive blocks are one contiguous run, so a tile of keys is a view where the block table ascends. An exported
slot is conv, delta, hidden; an exported block is for each layer keys then values, each [kv heads, 64, items]. Memory is
committed when it is first written. What a block held before is never read: readers get positions that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from q27app.errors import OutOfMemory, Q27Error
from q27app.kernels.backend import LayerGeometry
from q27app.kernels.batch import BLOCK_POSITIONS, Batch
from q27app.kernels.kv_codecs import RowCodec
from q27app.kernels.kv_formats import kv_format


@dataclass
class DeferredRows:
    """Inputs of a deferred pass, kept until `commit`: for each delta layer u [rows, C], beta and alpha inputs [rows, Nv];
    `final` [rows, hidden] if the draft layer wants it. `weights`: the layers' DeltaLayer, by delta index."""

    batch: Batch
    inputs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
    weights: dict[int, object]
    final: np.ndarray | None = None


class NumpyState:
    """See `backend.State`. Owned by the engine thread."""

    def __init__(
        self, geometry: LayerGeometry, num_delta_layers: int, num_kv_layers: int, format_name: str,
        num_slots: int, num_blocks: int, max_record_rows: int,
    ) -> None:
        if min(num_slots, num_blocks) < 1 or min(num_delta_layers, num_kv_layers, max_record_rows) < 0:
            raise Q27Error(f"{num_slots} slots and {num_blocks} blocks, expected at least one of each.")
        self.geometry, self.format = geometry, kv_format(format_name)
        self.format.check(geometry.head_dim)
        self.num_slots, self.num_blocks, self.max_record_rows = num_slots, num_blocks, max_record_rows
        heads, dim, groups = geometry.delta_value_heads, geometry.delta_head_dim, geometry.num_kv_heads
        channels = (2 * geometry.delta_key_heads + heads) * dim
        key, value = self.format.key, self.format.value
        self.slot_bytes = 4 * (num_delta_layers * ((geometry.conv_width - 1) * channels + heads * dim * dim)
                               + geometry.hidden_size)
        self.block_bytes = num_kv_layers * BLOCK_POSITIONS * (
            key.row_bytes(groups, geometry.head_dim) + value.row_bytes(groups, geometry.head_dim))
        try:
            self.conv = np.zeros((num_slots, num_delta_layers, geometry.conv_width - 1, channels), np.float32)
            self.delta = np.zeros((num_slots, num_delta_layers, heads, dim, dim), np.float32)
            self.hidden = np.zeros((num_slots, geometry.hidden_size), np.float32)
            self.keys = [self._blocks(key) for _ in range(num_kv_layers)]
            self.values = [self._blocks(value) for _ in range(num_kv_layers)]
        except MemoryError as error:
            needed = num_slots * self.slot_bytes + num_blocks * self.block_bytes
            raise OutOfMemory(f"{num_slots} slots and {num_blocks} KV blocks need {needed / 1e9:.1f} GB, which this machine "
                              "does not give.", "Use a smaller context or fewer slots.") from error
        self.deferred: DeferredRows | None = None

    def _blocks(self, codec: RowCodec) -> np.ndarray:
        geometry = self.geometry
        shape = (geometry.num_kv_heads, self.num_blocks * BLOCK_POSITIONS, codec.items(geometry.head_dim))
        return np.zeros(shape, codec.storage)

    # slots

    def clear_slot(self, slot: int) -> None:
        for part in self._slot_parts(slot):
            part[...] = 0

    def copy_slot(self, source: int, target: int) -> None:
        for old, new in zip(self._slot_parts(source), self._slot_parts(target), strict=True):
            new[...] = old

    def export_slot(self, slot: int) -> np.ndarray:
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in self._slot_parts(slot)])

    def reserve_exports(self) -> None: ...

    def begin_export(self, slot: int) -> None:
        """A copy would wait all the same."""

    def end_exports(self) -> None: ...

    def import_slot(self, slot: int, data: np.ndarray) -> None:
        data = _bytes_of(data, (self.slot_bytes,), "a slot")
        start = 0
        for part in self._slot_parts(slot):
            part.reshape(-1).view(np.uint8)[...] = data[start:start + part.nbytes]
            start += part.nbytes

    def _slot_parts(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not 0 <= slot < self.num_slots:
            raise Q27Error(f"slot {slot} does not exist, expected 0 to {self.num_slots - 1}.")
        return self.conv[slot], self.delta[slot], self.hidden[slot]

    # blocks

    def copy_block(self, source: int, target: int) -> None:
        source_rows, target_rows = self._block_rows(source), self._block_rows(target)
        for array in (*self.keys, *self.values):
            array[:, target_rows] = array[:, source_rows]

    def export_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        out = np.empty((len(blocks), self.block_bytes), np.uint8)
        for data, block in zip(out, blocks, strict=True):
            start = 0
            for part in self._block_parts(block):
                piece = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                data[start:start + piece.size] = piece
                start += piece.size
        return out

    def import_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        data = _bytes_of(data, (len(blocks), self.block_bytes), f"{len(blocks)} blocks")
        for row, block in zip(data, blocks, strict=True):
            start = 0
            for part in self._block_parts(block):
                piece = row[start:start + part.nbytes].copy()
                part[...] = piece.view(part.dtype).reshape(part.shape)
                start += part.nbytes

    def _block_rows(self, block: int) -> slice:
        if not 0 <= block < self.num_blocks:
            raise Q27Error(f"KV block {block} does not exist, expected 0 to {self.num_blocks - 1}.")
        return slice(block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS)

    def _block_parts(self, block: int) -> list[np.ndarray]:
        rows = self._block_rows(block)
        return [array[:, rows] for pair in zip(self.keys, self.values, strict=True) for array in pair]

    # rows of keys and values

    def write_rows(self, kv_index: int, physical: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Store keys and values [rows, G, D] at physical rows (block * 64 + position % 64)."""
        self.keys[kv_index][:, physical] = self.format.key.encode(k).transpose(1, 0, 2)
        self.values[kv_index][:, physical] = self.format.value.encode(v).transpose(1, 0, 2)

    def read_keys(self, kv_index: int, head: int, rows: slice | np.ndarray) -> np.ndarray:
        """Keys [n, D] float32 of one KV head at physical rows (`Pages.rows`), in their codec's frame; a view where format
        and rows allow it.

        All of them must have been written."""
        return self.format.key.decode(self.keys[kv_index][head, rows])

    def read_values(self, kv_index: int, head: int, rows: slice | np.ndarray) -> np.ndarray:
        """Values, likewise."""
        return self.format.value.decode(self.values[kv_index][head, rows])


class Pages:
    """Where one sequence's positions lie in the arrays of keys and values; `table` is its row of the block tables."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table.astype(np.int64)
        self._jumps = [0, *np.cumsum(np.diff(self.table) != 1).tolist()]

    def rows(self, start: int, stop: int) -> slice | np.ndarray:
        """Physical rows of positions start .. stop, at least one: a slice where their blocks follow each other."""
        first = start // BLOCK_POSITIONS
        if self._jumps[first] == self._jumps[(stop - 1) // BLOCK_POSITIONS]:
            origin = (int(self.table[first]) - first) * BLOCK_POSITIONS
            return slice(origin + start, origin + stop)
        positions = np.arange(start, stop)
        return self.table[positions // BLOCK_POSITIONS] * BLOCK_POSITIONS + positions % BLOCK_POSITIONS


def _bytes_of(data: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    data = np.ascontiguousarray(data)
    if data.dtype != np.uint8 or data.shape != shape:
        raise Q27Error(f"data for {what} is {data.dtype} {list(data.shape)}, expected uint8 {list(shape)}.")
    return data
