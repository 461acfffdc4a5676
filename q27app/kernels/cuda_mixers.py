"""Launchers of stage B: attention over the paged cache, the gated delta rule, and the commit of deferred rows."""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch
from q27app.kernels.card import cut_count
from q27app.kernels.cuda_linear import Gated
from q27app.kernels.memory import CudaBuffer

GATED_HEAD = 128
"""Head size whose gated norm the matrix stage applies (staging.cuh)."""

ATTEND_ROWS = 16
"""Rows of one launch of the split attention; its scratch is sized for them."""


def attend_shared_bytes(head_dim: int, tiles: int) -> int:
    """Dynamic shared memory of attend_decode_* (AttendShared)."""
    rows, keys, warps = 16 * tiles, 32, 8
    tile = rows * (head_dim + 16) * 2 + keys * (head_dim + 16) * 2 + keys * (head_dim + 8) * 2
    scores = max(2 * rows * (keys + 4) * 4, warps * head_dim * 4)
    return tile + scores + rows * (keys + 8) * 2 + 5 * rows * 4


class Mixers:
    """attend, delta and commit of a backend."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._deferred: dict[int, tuple[int, int, int, int]] = {}
        self._table = 0
        self._table_of: list[int] = []
        self._gated: dict[int, cuda_args.Delta] = {}

    def attend(self, y: CudaBuffer, layer, o: CudaBuffer | None) -> None:
        backend, state, batch = self._backend, self._backend.state, self._backend.batch
        geometry = state.geometry
        width = 2 * geometry.num_heads * geometry.head_dim + 2 * geometry.num_kv_heads * geometry.head_dim
        if y.shape[1] != width or o is not None and o.shape[1] != geometry.num_heads * geometry.head_dim:
            raise Q27Error(f"attend: y has {y.shape[1]} columns, expected {width}.")
        args = self._attend_args(y, layer, o, batch)
        if o is None:
            backend.launch("attend_decode", "attend_keys", (batch.num_rows, geometry.num_kv_heads), 32, 0, args)
        elif backend.is_prefill:
            self._attend_prefill(args, batch, geometry)
        else:
            self._attend_decode(args, y, o, batch, geometry)

    def _attend_args(self, y: CudaBuffer, layer, o: CudaBuffer | None, batch: Batch) -> cuda_args.Attend:
        backend, state, area, scratch = self._backend, self._backend.state, self._backend.area, self._backend.scratch
        args = cuda_args.Attend()
        args.y, args.q_norm, args.k_norm = y.address, layer.q_norm.address, layer.k_norm.address
        args.rope, args.positions, args.row_starts = scratch.rope, area.at("positions"), area.at("row_starts")
        args.block_tables, args.blocks, args.block_bytes = area.at("tables"), state.blocks, state.block_bytes
        args.layer_offset = layer.kv_index * state.layer_bytes
        args.part_ml, args.part_o, args.max_splits = scratch.part_ml, scratch.part_o, scratch.max_splits
        args.out, args.out_stride = (o.address, o.shape[1]) if o is not None else (0, 0)
        args.num_seqs, args.rows, args.y_stride = batch.num_seqs, batch.num_rows, y.shape[1]
        args.max_blocks, args.first_position, args.eps = area.table_stride, layer.first_position, backend.eps
        return args

    def _attend_prefill(self, args: cuda_args.Attend, batch: Batch, geometry) -> None:
        backend = self._backend
        args.q_half, args.q_factor = backend.scratch.queries(batch.num_rows)
        backend.launch("attend_prefill", "attend_rows", (batch.num_rows,), 256, 0, args, dependent=False)
        warps = backend.device.card.attend_defines()["QUERY_WARPS"]
        queries = warps * 16
        tiles = sum(-(-int(rows) // queries) for rows in np.diff(batch.row_starts))
        shared = (queries + 2 * 64) * (geometry.head_dim + 8) * 2
        backend.launch("attend_prefill", "attend_prefill", (tiles, geometry.num_heads), warps * 32, shared, args, dependent=False)

    def _attend_decode(self, args: cuda_args.Attend, y: CudaBuffer, o: CudaBuffer, batch: Batch, geometry) -> None:
        """Whole sequences, as many as the scratch holds rows for, a launch."""
        backend, area, card = self._backend, self._backend.area, self._backend.device.card
        starts = batch.row_starts
        group, wide = geometry.num_heads // geometry.num_kv_heads, card.is_wide
        seq = 0
        while seq < batch.num_seqs:
            stop = seq + 1
            while stop < batch.num_seqs and starts[stop + 1] - starts[seq] <= ATTEND_ROWS:
                stop += 1
            first, rows = int(starts[seq]), int(starts[stop] - starts[seq])
            largest = int(np.diff(starts[seq:stop + 1]).max())
            per_item = 1 if largest == 1 else 8 if largest <= 8 or not wide else 16
            tiles = -(-per_item * group // 16)
            args.num_seqs, args.row_starts = stop - seq, area.at("row_starts", seq)
            args.block_tables = area.at("tables", seq * area.table_stride)
            skip = first * args.max_splits * geometry.num_heads * 4
            args.part_ml = backend.scratch.part_ml - 2 * skip
            args.part_o = backend.scratch.part_o - geometry.head_dim * skip
            blocks = card.num_sms * (2 if per_item < 16 else 1)
            backend.launch("attend_decode", f"attend_decode_{per_item}", (blocks,), 256,
                           attend_shared_bytes(geometry.head_dim, tiles), args)
            merge = cuda_args.Attend.from_buffer_copy(args)
            merge.positions, merge.part_ml, merge.part_o = area.at("positions", first), backend.scratch.part_ml, backend.scratch.part_o
            merge.y, merge.out = y.row(first), o.row(first)
            backend.launch("attend_decode", "attend_merge", (rows, geometry.num_heads), geometry.head_dim, 0, merge)
            seq = stop

    # the delta rule

    def delta(self, y: CudaBuffer, layer, o: CudaBuffer) -> None:
        backend, state, batch = self._backend, self._backend.state, self._backend.batch
        geometry = state.geometry
        heads, width = geometry.delta_value_heads, geometry.delta_value_heads * geometry.delta_head_dim
        if y.shape[1] != state.channels + width + 2 * heads or o.shape[1] != width:
            raise Q27Error(f"delta: y has {y.shape[1]} columns, expected {state.channels + width + 2 * heads}.")
        args = self._delta_args(batch)
        args.y, args.y_stride, args.z_offset = y.address, y.shape[1], state.channels
        args.beta_offset, args.alpha_offset = state.channels + width, state.channels + width + heads
        args.conv, args.a, args.dt_bias, args.norm = layer.conv.address, layer.a.address, layer.dt_bias.address, layer.out_norm.address
        args.out = o.address
        args.out_stride, args.layer, args.deferred = o.shape[1], layer.delta_index, int(batch.deferred)
        defines = backend.defines["delta_step"]
        threads = geometry.delta_head_dim // defines["SLICES"] * (geometry.delta_head_dim // 16)
        grid = (heads * defines["SLICES"], batch.num_seqs)
        if backend.is_prefill:
            args.channels, args.gates = backend.scratch.channels(batch.num_rows)
            backend.launch("delta_chunk", "delta_inputs", (batch.num_rows,), 256, 0, args, dependent=False)
            backend.launch("delta_chunk", "delta_chunk", grid, threads, 0, args, dependent=False)
            backend.launch("delta_chunk", "delta_outputs", (batch.num_rows + batch.num_seqs,), 256, 0, args, dependent=False)
            return
        if int(np.diff(batch.row_starts).max()) > MAX_DECODE_ROWS:
            raise Q27Error(f"a sequence has more than {MAX_DECODE_ROWS} rows in a {batch.phase} pass.")
        if batch.deferred:
            if batch.num_rows > state.max_record_rows:
                raise Q27Error(f"{batch.num_rows} deferred rows, the state was allocated for {state.max_record_rows}.")
            args.record = state.record + layer.delta_index * state.max_record_rows * state.record_row * 4
            self._deferred[layer.delta_index] = (args.conv, args.a, args.dt_bias, args.norm)
        backend.launch("delta_step", "delta_step", grid, threads, 0, args)
        if not batch.deferred and batch.num_rows > batch.num_seqs:
            backend.launch("delta_step", "delta_window", (-(-state.channels // 256), batch.num_seqs), 256, 0, args)
        self._gated[o.address] = args

    def take_gated(self, o: CudaBuffer) -> Gated | None:
        """The gated norm that `o` still lacks, for the stage that reads it; applied here where that stage cannot."""
        args = self._gated.get(o.address)
        if args is None:
            return None
        if self._backend.state.geometry.delta_head_dim != GATED_HEAD:
            self.finish_gated(o)
            return None
        del self._gated[o.address]
        return Gated(args.norm, args.y + 4 * args.z_offset, args.y_stride)

    def finish_gated(self, o: CudaBuffer) -> None:
        """Apply the gated norm that `o` still lacks, if any."""
        args = self._gated.pop(o.address, None)
        if args is not None:
            self._backend.launch("delta_step", "delta_gate", (o.shape[0],), 256, 0, args)

    def _delta_args(self, batch: Batch) -> cuda_args.Delta:
        backend, state, area = self._backend, self._backend.state, self._backend.area
        args = cuda_args.Delta()
        args.slots, args.slot_bytes, args.state_offset, args.window_offset = state.slots, state.slot_bytes, 0, state.window_offset
        args.state_stride, args.window_stride = state.state_stride, state.window_stride
        args.positions, args.row_starts, args.slot_ids = area.at("positions"), area.at("row_starts"), area.at("slots")
        args.num_seqs, args.eps = batch.num_seqs, backend.eps
        return args

    def commit(self, accepted: int) -> None:
        """Fold the recorded rows; accepted: device address of int32 [seqs]. All delta layers in one launch."""
        backend, state, batch = self._backend, self._backend.state, self._backend.batch
        if not state.num_delta_layers:
            return
        if len(self._deferred) != state.num_delta_layers:
            raise Q27Error(f"commit: {len(self._deferred)} delta layers were recorded, expected {state.num_delta_layers}.")
        pointers = [value for index in range(state.num_delta_layers) for value in self._deferred[index]]
        if pointers != self._table_of:
            self._table = self._table or backend.scratch_arena.take(8 * len(pointers))
            backend.device.upload(self._table, np.array(pointers, np.uint64))
            self._table_of = pointers
        geometry = state.geometry
        args = self._delta_args(batch)
        args.y, args.y_stride, args.record_stride = state.record, state.record_row, state.max_record_rows * state.record_row
        args.beta_offset, args.alpha_offset = state.channels, state.channels + geometry.delta_value_heads
        args.accepted, args.layer_weights = accepted, self._table
        defines = backend.defines["delta_step"]
        threads = geometry.delta_head_dim // defines["SLICES"] * (geometry.delta_head_dim // 16)
        grid = (geometry.delta_value_heads * defines["SLICES"], batch.num_seqs, state.num_delta_layers)
        backend.launch("delta_step", "delta_step", grid, threads, 0, args)
        backend.launch("delta_step", "delta_window", (-(-state.channels // 256), batch.num_seqs, state.num_delta_layers), 256, 0, args)


def max_cuts(card, num_blocks: int, max_context: int = 1 << 18) -> int:
    """Most cuts of a sequence that fills the cache or the window."""
    return cut_count(card.attend_defines(), min(num_blocks * 64, max_context))
