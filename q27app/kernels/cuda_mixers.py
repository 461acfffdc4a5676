"""Launchers of the gated delta rule and of the commit of deferred rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch
from q27app.kernels.cuda_batch import BatchArea
from q27app.kernels.cuda_lacking import MAX_LACKING
from q27app.kernels.cuda_linear import Gated
from q27app.kernels.cuda_state import CudaState
from q27app.kernels.memory import CudaBuffer

GATED_HEAD = 128
"""Head size whose gated norm the matrix stage applies (staging.cuh)."""


CHUNK = 16
"""Positions of a block of delta_chunk."""
INPUT_ROWS = 8
"""Rows of a block of delta_inputs."""
MANY_SEQS = 3
"""From so many sequences of one row on small blocks take them, of which more are on their way at a time."""

FLOW_SEQS = 2
"""From so many on, where blocks can take one share of a head after another, with the next ones on their way (delta_flow.cu)."""

AHEAD_BYTES = 4 << 20
"""Of the matrix behind the delta rule: so much is on its way while a row of a sequence or two goes through the rule."""
AHEAD_OF_ROWS = 2 << 20
"""And so much while several rows of a sequence do, which are left ready, so that the matrix is next."""


def chunk_launch(dim: int) -> tuple[int, int, int]:
    """Splits of a head, threads and shared memory of delta_chunk (CHUNK_COLUMNS, CHUNK_THREADS, ChunkShared). dim: of a head."""
    columns = 64 if dim >= 64 else 32
    row, warps = 2 * (dim + 8) + columns + 4 + 2 * (CHUNK + 8) + 4, columns // 8
    return dim // columns, 32 * warps + 32, (2 * CHUNK * row + warps * 12 * 32) * 4


@dataclass(frozen=True)
class DeltaForm:
    """How a head is shared out (Form in delta_few.cuh): value dims of a block, columns of a lane, whether for several rows of a sequence."""

    columns: int
    num: int
    is_wide: bool = False

    def blocks(self, num_heads: int, dim: int) -> int:
        """For all heads of a sequence."""
        return num_heads * dim // self.columns

    def threads(self, dim: int) -> int:
        """Threads of a block."""
        own = self.columns // self.num * (dim // 16)
        return max(own, -(-(2 * dim + self.columns) // 32) * 32) if self.is_wide else own


def flow_launch(dim: int, num_seqs: int, num_heads: int, num_sms: int) -> tuple[tuple[int], int, int]:
    """Grid, threads and shared memory of delta_flow (Flow, Flowing). dim: of a head. Where a head is two shares, the
    number of blocks is even: the one that has a head's last columns waits for the one before it, never for one that has not begun."""
    columns = min(64, dim)
    shared = 3 * (columns * dim + MAX_LACKING * (dim + columns) + 4) * 4 + 2 * (2 * dim + columns) * 4 + 2 * 32 + 3 * (8 + 4)
    return (min(num_seqs * num_heads * dim // columns, 2 * num_sms),), columns // 2 * (dim // 16), -(-shared // 16) * 16


def delta_forms(dim: int) -> dict[str, DeltaForm]:
    """By kernel. dim: of a head."""
    half, several = min(64, dim), 1 if dim < 64 else 2
    return {"delta_step": DeltaForm(32, several, True), "delta_steps": DeltaForm(half, several, True), "delta_one": DeltaForm(half, 1),
            "delta_many": DeltaForm(32, 2), "delta_fold": DeltaForm(dim // 4 if dim >= 128 else dim, 1)}


class Mixers:
    """delta and commit of a backend."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._gated: dict[int, cuda_args.Delta] = {}

    def _flows(self, batch: Batch) -> bool:
        """Whether a pass goes through delta_flow."""
        return (batch.phase == "decode" and not batch.deferred and batch.num_seqs >= FLOW_SEQS and "delta_flow" in self._backend.defines
                and batch.is_single)

    def begin(self, batch: Batch, state: CudaState) -> np.ndarray | None:
        """Before a pass is put on the device: what delta_flow is told of the rows that states lack; for other kernels they lack none from now on."""
        if batch.phase == "draft" or not state.num_delta_layers:
            return None
        state.lacking.drop(keep.slot for keep in batch.keeps)
        if self._flows(batch):
            return state.lacking.begin(batch.slots)
        state.lacking.end(batch.slots)
        return None

    def delta(self, y: CudaBuffer, layer, o: CudaBuffer) -> None:
        backend, state, batch = self._backend, self._backend.state, self._backend.batch
        geometry = state.geometry
        heads, width = geometry.delta_value_heads, geometry.delta_value_heads * geometry.delta_head_dim
        if y.shape[1] != state.channels + width + 2 * heads or o.shape[1] != width:
            raise Q27Error(f"delta: y has {y.shape[1]} columns, expected {state.channels + width + 2 * heads}.")
        args = self._delta_args(batch, backend.area)
        args.y, args.y_stride, args.z_offset = y.address, y.shape[1], state.channels
        args.beta_offset, args.alpha_offset = state.channels + width, state.channels + width + heads
        args.conv, args.a, args.dt_bias, args.norm = layer.conv.address, layer.a.address, layer.dt_bias.address, layer.out_norm.address
        args.out = o.address
        args.out_stride, args.layer, args.deferred = o.shape[1], layer.delta_index, int(batch.deferred)
        self._gated.pop(o.address, None)
        left = backend.ready.leave_heads(layer, o, state.channels, geometry.delta_head_dim)
        if backend.is_prefill:
            args.channels, args.gates, args.pairs = backend.scratch.channels(batch.num_rows)
            args.keeps, args.num_keeps = backend.area.at("keeps"), len(batch.keeps)
            splits, threads, shared = chunk_launch(geometry.delta_head_dim)
            blocks = batch.num_rows // CHUNK + 2 * batch.num_seqs   # at least as many as there are
            groups = (-(-batch.num_rows // INPUT_ROWS), -(-(2 * geometry.delta_key_heads + heads) // 8))
            windows = (batch.num_seqs + len(batch.keeps)) * -(-state.channels // 256)
            backend.launch("delta_chunk", "delta_inputs", groups, 256, 0, args, dependent=False)
            backend.launch("delta_chunk", "delta_pairs", (blocks, geometry.delta_key_heads), 256, 0, args, dependent=False)
            backend.launch("delta_chunk", "delta_chunk", (heads * splits, batch.num_seqs), threads, shared, args, dependent=False)
            backend.launch("delta_chunk", "delta_outputs", (batch.num_rows + windows,), 256, 0, args, dependent=False)
            return
        largest = int(np.diff(batch.row_starts).max())
        if largest > MAX_DECODE_ROWS:
            raise Q27Error(f"a sequence has more than {MAX_DECODE_ROWS} rows in a {batch.phase} pass.")
        if batch.deferred:
            if batch.num_rows > state.max_record_rows:
                raise Q27Error(f"{batch.num_rows} deferred rows, the state was allocated for {state.max_record_rows}.")
            args.record = state.record + layer.delta_index * state.max_record_rows * state.record_row * 4
        dim = geometry.delta_head_dim
        if not batch.is_single:
            kernel = "delta_step" if batch.num_seqs == 1 else "delta_steps"
        else:
            kernel = "delta_many" if batch.num_seqs >= MANY_SEQS else "delta_one"
        if left is None:
            self._gated[o.address] = args
        else:
            args.out, args.ready = backend.scratch.head_words, left
        if self._flows(batch):
            grid, threads, shared = flow_launch(dim, batch.num_seqs, heads, backend.device.card.num_sms)
            backend.launch("delta_flow", "delta_flow", grid, threads, shared, args)
            return
        form = delta_forms(dim)[kernel]
        grid, shared = (form.blocks(heads, dim), batch.num_seqs), 0
        if kernel == "delta_one":
            if grid[0] * grid[1] <= backend.device.card.num_sms:
                shared = backend.device.card.sm_shared // 2   # not used, but one is then alone on a multiprocessor, where two would wait for each other
            args.ahead, args.ahead_bytes = layer.output.address, min(layer.output.nbytes, AHEAD_BYTES)
        elif not batch.is_single and left is not None:
            args.ahead, args.ahead_bytes = layer.output.address, min(layer.output.nbytes, AHEAD_OF_ROWS)
        backend.launch("delta_step", kernel, grid, form.threads(dim), shared, args)
        if not batch.deferred and not batch.is_single:
            backend.launch("delta_step", "delta_window", (-(-state.channels // 256), batch.num_seqs), 256, 0, args)

    def take_gated(self, o: CudaBuffer) -> Gated | None:
        """The gated norm that `o` still lacks, unless it was left ready, for the stage that reads it; applied here where that stage cannot."""
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

    def _delta_args(self, batch: Batch, area: BatchArea) -> cuda_args.Delta:
        backend, state = self._backend, self._backend.state
        args = cuda_args.Delta()
        state.fill_args(args)
        args.positions, args.row_starts, args.slot_ids, args.lacks = (area.at(name) for name in ("positions", "row_starts", "slots", "lacks"))
        args.num_seqs, args.eps = batch.num_seqs, backend.eps
        return args

    def commit(self, accepted: int, batch: Batch, area: BatchArea) -> None:
        """Fold the recorded rows of the deferred pass `batch`, which lies in `area`; accepted: device address of int32 [seqs].
        All delta layers in one launch."""
        backend, state = self._backend, self._backend.state
        if not state.num_delta_layers:
            return
        geometry = state.geometry
        args = self._delta_args(batch, area)
        args.y, args.y_stride, args.record_stride = state.record, state.record_row, state.max_record_rows * state.record_row
        args.accepted = accepted
        dim = geometry.delta_head_dim
        form = delta_forms(dim)["delta_fold"]
        blocks = form.blocks(geometry.delta_value_heads, dim) + -(-state.channels // form.threads(dim))
        backend.launch("delta_step", "delta_fold", (blocks, batch.num_seqs, state.num_delta_layers), form.threads(dim), 0, args)
