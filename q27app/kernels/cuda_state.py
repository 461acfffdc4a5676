"""What belongs to sequences on the device: slots of recurrent state, and blocks of keys and values.

slot:   [delta layer][value head][value dim][key dim] f32, then [delta layer][position % 4][channel] f32, then
        [hidden] f32
        Rows that the delta states of a slot may still lack lie apart (cuda_lacking.py): whoever reads or writes a slot here settles or drops them.
block:  [kv layer]([kv head][64][a head's bytes] keys, the same of values), in the KV format's codes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q27app.errors import Q27Error, UsageError
from q27app.kernels import cuda_args
from q27app.kernels.batch import BLOCK_POSITIONS
from q27app.kernels.cuda_lacking import Lacking
from q27app.kernels.kv_formats import KV_FORMATS, kv_format as find_format
from q27app.kernels.slot_exports import SlotExport, SlotExports

TURNED_HEAD = 256
"""Head size of the formats that turn rows (kv_format.cuh)."""


def record_row(geometry) -> int:
    """Floats of a deferred row (RECORD in delta_step.cu): channels, keys before their norms, what each column learns of them, decays."""
    heads = geometry.delta_value_heads
    return -(-((3 * geometry.delta_key_heads + 2 * heads) * geometry.delta_head_dim + heads) // 4) * 4


class CudaState:
    """See `backend.State`. Owned by the engine thread."""

    def __init__(self, backend, geometry, num_delta_layers: int, num_kv_layers: int, kv_format: str, num_slots: int,
                 num_blocks: int, max_record_rows: int) -> None:
        form = find_format(kv_format)
        card = backend.device.card
        usable = [other.name for other in KV_FORMATS.values() if other.kernel_code is not None
                  and card.capability >= other.min_compute_capability and (not other.is_turned or geometry.head_dim == TURNED_HEAD)]
        hint = f"Choose one of {', '.join(usable)}."
        if form.kernel_code is None:
            raise UsageError(f"KV format {form.name} is not for the GPU.", hint)
        if form.is_turned and geometry.head_dim != TURNED_HEAD:
            raise UsageError(f"KV format {form.name} needs heads of {TURNED_HEAD} numbers on the GPU, this model's have "
                             f"{geometry.head_dim}.", hint)
        if card.capability < form.min_compute_capability:
            raise UsageError(f"KV format {form.name} needs compute capability "
                             f"{'.'.join(map(str, form.min_compute_capability))}, this card is used as "
                             f"{card.capability[0]}.{card.capability[1]}.", hint)
        if min(num_slots, num_blocks) < 1:
            raise Q27Error(f"{num_slots} slots and {num_blocks} blocks, expected at least one of each.")
        self._device = backend.device
        self.geometry, self.form = geometry, form
        self.num_slots, self.num_blocks, self.max_record_rows = num_slots, num_blocks, max_record_rows
        self.num_delta_layers, self.num_kv_layers = num_delta_layers, num_kv_layers
        dim, heads = geometry.delta_head_dim, geometry.delta_value_heads
        self.channels = (2 * geometry.delta_key_heads + heads) * dim
        self.state_stride = 4 * heads * dim * dim
        self.window_stride = 4 * geometry.conv_width * self.channels
        self.window_offset = num_delta_layers * self.state_stride
        self.hidden_offset = self.window_offset + num_delta_layers * self.window_stride
        self.slot_bytes = self.hidden_offset + 4 * geometry.hidden_size
        row = form.key_row_bytes(geometry.num_kv_heads, geometry.head_dim)
        row += form.value_row_bytes(geometry.num_kv_heads, geometry.head_dim)
        self.layer_bytes = BLOCK_POSITIONS * row
        self.block_bytes = num_kv_layers * self.layer_bytes
        self.record_row = record_row(geometry)
        self._exports: SlotExports | None = None
        self.slots = self._device.allocate(num_slots * self.slot_bytes)
        self.blocks = self._device.allocate(max(num_blocks * self.block_bytes, 256))
        self.record = self._device.allocate(max(num_delta_layers * max_record_rows * self.record_row * 4, 256))
        self.lacking = Lacking(backend, self)
        for address, size in ((self.slots, num_slots * self.slot_bytes), (self.blocks, num_blocks * self.block_bytes)):
            self._device.fill(address, size)

    def slot(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise Q27Error(f"slot {index} does not exist, expected 0 to {self.num_slots - 1}.")
        return self.slots + index * self.slot_bytes

    def block(self, index: int) -> int:
        if not 0 <= index < self.num_blocks:
            raise Q27Error(f"KV block {index} does not exist, expected 0 to {self.num_blocks - 1}.")
        return self.blocks + index * self.block_bytes

    def fill_args(self, args: cuda_args.Delta) -> None:
        """Where the slots lie, for kernels of the delta rule."""
        args.slots, args.slot_bytes, args.state_offset, args.window_offset = self.slots, self.slot_bytes, 0, self.window_offset
        args.state_stride, args.window_stride = self.state_stride, self.window_stride
        args.lacking, args.lacking_stride = self.lacking.address, self.lacking.stride

    def clear_slot(self, slot: int) -> None:
        self.lacking.drop([slot])
        self._device.fill(self.slot(slot), self.slot_bytes)

    def copy_slot(self, source: int, target: int) -> None:
        self.lacking.settle([source])
        self.lacking.drop([target])
        self._device.copy(self.slot(target), self.slot(source), self.slot_bytes)

    def copy_block(self, source: int, target: int) -> None:
        self._device.copy(self.block(target), self.block(source), self.block_bytes)

    def export_slot(self, slot: int) -> np.ndarray:
        self.lacking.settle([slot])
        return self._device.download(self.slot(slot), self.slot_bytes)

    def reserve_exports(self) -> None:
        self._exports = self._exports or SlotExports(self._device, self.slot_bytes)

    def begin_export(self, slot: int) -> SlotExport | None:
        self.lacking.settle([slot])
        return None if self._exports is None else self._exports.begin(self.slot(slot))

    def end_exports(self) -> None:
        if self._exports is not None:
            self._exports.close()
        self._exports = None

    def import_slot(self, slot: int, data: np.ndarray) -> None:
        self.lacking.drop([slot])
        self._device.upload(self.slot(slot), _bytes(data, (self.slot_bytes,), "a slot"))

    def export_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        out = np.empty((len(blocks), self.block_bytes), np.uint8)
        for start, stop in _runs(blocks):
            self.block(blocks[stop - 1])
            self._device.download(self.block(blocks[start]), (stop - start) * self.block_bytes, out[start:stop].reshape(-1))
        return out

    def import_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        data = _bytes(data, (len(blocks), self.block_bytes), f"{len(blocks)} blocks")
        for start, stop in _runs(blocks):
            self.block(blocks[stop - 1])
            self._device.upload(self.block(blocks[start]), data[start:stop])

    def release(self) -> None:
        self.end_exports()
        for address in (self.slots, self.blocks, self.record, self.lacking.address):
            if address:
                self._device.release(address)


MAX_RUN = 64
"""Neighbouring blocks that are copied together, most."""


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of stretches of the list whose blocks are neighbours in memory."""
    numbers = np.asarray(blocks, np.int64)
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *cuts.tolist(), len(numbers)] if len(numbers) else [0]
    return [(at, min(at + MAX_RUN, stop)) for start, stop in zip(edges, edges[1:]) for at in range(start, stop, MAX_RUN)]


def _bytes(data: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    data = np.ascontiguousarray(data)
    if data.dtype != np.uint8 or data.shape != shape:
        raise Q27Error(f"data for {what} is {data.dtype} {list(data.shape)}, expected uint8 {list(shape)}.")
    return data
