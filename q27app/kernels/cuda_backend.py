"""The backend on an NVIDIA card: memory, weights, the current pass, and one launcher for each stage.

Reading order: `launch` (the device), `cuda_weights` (how matrices lie), `cuda_linear` and `cuda_mixers` (the stages),
`cu/*.cu`. Everything runs in order on one stream of the primary context, on the engine's thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.backend import LayerGeometry, Replay
from q27app.kernels.batch import Batch, Drafted, Sampled, SamplingRows
from q27app.kernels.compiler import Job
from q27app.kernels.card import MAX_CONTEXT
from q27app.kernels.cuda_attention import ITEM_ROWS, Attention, decode_by_warpgroups
from q27app.kernels.cuda_batch import BatchArea, area_bytes
from q27app.kernels.cuda_lacking import MAX_LACKING
from q27app.kernels.cuda_linear import LinearStages
from q27app.kernels.cuda_mixers import Mixers
from q27app.kernels.cuda_ready import HEAD_ROWS, ReadyRows, ready_bytes
from q27app.kernels.cuda_sampling import Sampler, sampler_sizes
from q27app.kernels.cuda_scratch import Scratch
from q27app.kernels.cuda_state import CudaState, record_row
from q27app.kernels.cuda_weights import CudaVector, CudaWeight, Loader, packed_bytes, without_rows
from q27app.kernels.graph import Rerun
from q27app.kernels.kv_formats import kv_format as find_format
from q27app.kernels.launch import CudaDevice, Device
from q27app.kernels.memory import Arena, CudaBuffer, Tally
from q27app.kernels.row_plans import RowPlans

if TYPE_CHECKING:
    from q27app.weights.container import Tensor

SMALL_ROWS, MAX_SEQS = 64, 64
SAMPLED_ROWS = 64
FEW_BYTES = 1 << 14
"""Larger arrays go by the copy engine."""
FIXED_SOURCES = ("linear_rows", "linear_tiles", "rows", "repack", "sample", "accept", "checksum", "draft")


def geometry_defines(geometry: LayerGeometry, card, kv_format: str) -> dict[str, dict[str, int]]:
    """Defines of the sources that know the heads, by source."""
    attend = {"HEAD_DIM": geometry.head_dim, "NUM_HEADS": geometry.num_heads, "NUM_KV_HEADS": geometry.num_kv_heads,
              "ROTARY_DIM": geometry.rotary_dim, "KV_FORMAT": find_format(kv_format).kernel_code or 0}
    delta = {"DELTA_DIM": geometry.delta_head_dim, "DELTA_KEY_HEADS": geometry.delta_key_heads,
             "DELTA_VALUE_HEADS": geometry.delta_value_heads, "CONV_WIDTH": geometry.conv_width}
    prefill = attend | card.prompt_defines() | {"WARPGROUPS": int(card.has_warpgroups)}
    by_warpgroups = decode_by_warpgroups(card, find_format(kv_format), geometry.head_dim, geometry.num_heads // geometry.num_kv_heads)
    decode = attend | card.attend_defines() | {"WARPGROUPS": int(by_warpgroups)}
    return {"attend_rows": attend, "attend_decode": decode, "attend_prefill": prefill,
            "delta_step": delta, "delta_chunk": delta} | ({"delta_flow": delta} if card.has_warpgroups else {})


def fixed_defines(card) -> dict[str, dict[str, int]]:
    """Defines of the sources that know no model, by source."""
    known = {"linear_tiles": card.linear_tiles_defines(), "linear_rows": {"ROW_RING": card.row_ring}}
    return {source: known.get(source, {}) for source in FIXED_SOURCES}


class CudaBackend:
    """See `backend.Backend`. device: an open `launch.Device`; `open` makes one from options."""

    name, is_ahead, row_groups = "cuda", True, ITEM_ROWS

    def __init__(self, device: Device, progress: Callable[[int, int], None] | None = None) -> None:
        self.device = device
        self.lacking_rows = MAX_LACKING if device.card.has_warpgroups else 0
        self.defines: dict[str, dict[str, int]] = fixed_defines(device.card)
        self._functions: dict[tuple[str, str], Any] = {}
        device.prepare([Job.of(source, defines) for source, defines in self.defines.items()], progress)
        self.weights_arena = Arena(device, "weights")
        self.buffers_arena = Arena(device, "activations")
        self.scratch_arena = Arena(device, "scratch")
        self.plans = RowPlans(device)
        self._loader: Loader | None = None
        self._held: list[tuple[str, int, int]] = []
        self._sums = 0
        self._linear, self._mixers, self._attention = LinearStages(self), Mixers(self), Attention(self)
        self._max_rows, self._max_logit_rows = SMALL_ROWS, SAMPLED_ROWS
        self._halves_width = self._wide_width = 64
        self._paired_width = 0
        self._states: list[CudaState] = []
        self._areas: list[BatchArea] = []
        """Of drafts, which run behind passes that are still to be committed; of few rows; of many."""
        self._deferred: tuple[Batch, BatchArea] | None = None
        self._ahead_of: tuple[Batch, BatchArea] | None = None
        self._kept_of: Batch | None = None
        """The deferred pass whose accepted rows' last hidden row the slots have."""
        self._sampler: Sampler | None = None
        self._final: CudaBuffer | None = None
        self.eps = 1e-6

    @classmethod
    def open(cls, cache: Path, index: int = 0, nvcc: str | None = None, force_arch: str | None = None, memory_cap: int | None = None,
             progress: Callable[[int, int], None] | None = None) -> "CudaBackend":
        """Open a card. cache: folder of compiled kernels. force_arch "86" and memory_cap (bytes) play an older, smaller card."""
        return cls(CudaDevice(cache, index, nvcc, force_arch, memory_cap), progress)

    # memory

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    @property
    def ready(self) -> ReadyRows:
        """What is left as the row family reads it."""
        return self._linear.ready

    @property
    def runtime_bytes(self) -> int:
        return self.device.context_bytes

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str) -> CudaBuffer:
        dtype = np.dtype(dtype)
        address = self.buffers_arena.take(int(np.prod(shape)) * dtype.itemsize)
        if name == "logits":
            self._max_logit_rows = max(self._max_logit_rows, shape[0])
        elif len(shape) == 2:
            self._max_rows = max(self._max_rows, shape[0])
        return CudaBuffer(address, tuple(shape), dtype, name)

    def upload(self, array: np.ndarray, name: str = "") -> CudaBuffer:
        buffer = self.empty(array.shape, array.dtype, name)
        self.device.upload(buffer.address, array)
        return buffer

    def download(self, buffer: CudaBuffer) -> np.ndarray:
        self._mixers.finish_gated(buffer)
        self.ready.finish(buffer)
        return self.device.download(buffer.address, buffer.nbytes).view(buffer.dtype).reshape(buffer.shape)

    def load(self, tensors: "Sequence[Tensor]", in_host: bool = False) -> CudaWeight | CudaVector:
        self._loader = self._loader or Loader(self)
        weight = self._loader.load(tensors, in_host)
        self._held.append((" + ".join(tensor.name for tensor in tensors), weight.address, weight.packed_bytes))
        return weight

    def without_rows(self, weight: CudaWeight, skip: tuple[int, int]) -> CudaWeight:
        return without_rows(weight, skip, self.device.card, self.plans)

    def checksums(self) -> list[tuple[str, int]]:
        self._sums = self._sums or self.weights_arena.take(8 * len(self._held))
        self.device.fill(self._sums, 8 * len(self._held))
        for index, (_, address, nbytes) in enumerate(self._held):
            blocks = max(1, min(4 * self.device.card.num_sms, nbytes // 4096))
            self.launch("checksum", "checksum", (blocks,), 256, 0, cuda_args.Checksum(address, self._sums + 8 * index, nbytes // 4),
                        dependent=False)
        sums = self.device.download(self._sums, 8 * len(self._held)).view(np.uint64)
        return [(name, int(value)) for (name, _, _), value in zip(self._held, sums, strict=True)]

    def reserve_for(self, weight: CudaWeight) -> None:
        """Remember what scratch a weight needs."""
        self._halves_width = max(self._halves_width, weight.activation_units * 64)
        if weight.paired:
            self._paired_width = max(self._paired_width, weight.shape[0] // 2)
        elif len(weight.segments) == 2:
            self._wide_width = max(self._wide_width, weight.shape[0])

    def allocate_state(self, geometry: LayerGeometry, num_delta_layers: int, num_kv_layers: int, kv_format: str, num_slots: int,
                       num_blocks: int, max_record_rows: int) -> CudaState:
        """Slots, blocks and, with the first state, the scratch of every stage: nothing is allocated after this."""
        state = CudaState(self, geometry, num_delta_layers, num_kv_layers, kv_format, num_slots, num_blocks, max_record_rows)
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        self.defines |= geometry_defines(geometry, self.device.card, kv_format)
        self._functions.clear()
        self.device.prepare([Job.of(source, defines) for source, defines in self.defines.items()])
        for source in self.defines:
            self.device.module(Job.of(source, self.defines[source]))
        self.eps = geometry.norm_eps
        self._reserve_scratch(geometry, num_blocks)
        self._states.append(state)
        return state

    def packed_bytes(self, tensors: "Sequence[Tensor]") -> int:
        return sum(packed_bytes(tensor) for tensor in tensors)

    def reserve_weights(self, nbytes: int) -> None:
        self.weights_arena.reserve(nbytes)

    def taken_bytes(self) -> tuple[int, int]:
        return self.weights_arena.nbytes, self.buffers_arena.nbytes

    def scratch_bytes(self, geometry: LayerGeometry, num_delta_layers: int, num_blocks: int, max_record_rows: int) -> int:
        record = num_delta_layers * max_record_rows * record_row(geometry) * 4
        stride = min(num_blocks, MAX_CONTEXT // 64)
        areas = sum(area_bytes(rows, MAX_SEQS, stride) for rows in self._area_rows())
        return self._arena_bytes(geometry, num_blocks) + record + areas + self.plans.nbytes

    def _area_rows(self) -> tuple[int, int, int]:
        return SMALL_ROWS, SMALL_ROWS, max(self._max_rows, SMALL_ROWS)

    def _make_scratch(self, arena: Arena | Tally, geometry: LayerGeometry, num_blocks: int) -> Scratch:
        return Scratch(
            arena, geometry, self.device.card, max_rows=self._max_rows, num_blocks=num_blocks,
            halves_width=self._halves_width,
            wide_width=max(self._wide_width, 2 * geometry.hidden_size),
            ready_bytes=max(ready_bytes(self._max_rows, self._paired_width),
                            ready_bytes(min(self._max_rows, HEAD_ROWS), geometry.delta_value_heads * geometry.delta_head_dim)),
        )

    def _arena_bytes(self, geometry: LayerGeometry, num_blocks: int) -> int:
        """What the scratch arena has to hold."""
        tally = Tally()
        self._make_scratch(tally, geometry, num_blocks)
        for size in sampler_sizes(geometry.vocab_size, min(self._max_logit_rows, SAMPLED_ROWS), MAX_SEQS):
            tally.take(size)
        return tally.nbytes

    def _reserve_scratch(self, geometry: LayerGeometry, num_blocks: int) -> None:
        self.device.synchronize()
        self.scratch_arena.release()
        for area in self._areas:
            area.release()
        self.scratch_arena.reserve(self._arena_bytes(geometry, num_blocks))
        self.scratch = self._make_scratch(self.scratch_arena, geometry, num_blocks)
        half = geometry.rotary_dim // 2
        frequencies = np.float64(geometry.rope_theta) ** (np.arange(half) * (-2.0 / geometry.rotary_dim))
        self.device.upload(self.scratch.frequencies, frequencies)
        stride = min(num_blocks, MAX_CONTEXT // 64)
        self._areas = [BatchArea(self.device, rows, MAX_SEQS, stride, self.send) for rows in self._area_rows()]
        self._sampler = Sampler(self, geometry.vocab_size, min(self._max_logit_rows, SAMPLED_ROWS), MAX_SEQS)
        self._mixers = Mixers(self)
        self.ready.forget()
        self._linear.followed.clear()

    def launch(self, source: str, name: str, grid: tuple[int, ...], block: int, shared: int, args: ctypes.Structure,
               dependent: bool = True) -> None:
        """One kernel on the stream. dependent: it may start while the one before still runs (it waits by itself)."""
        function = self._functions.get((source, name))
        if function is None:
            function = self.device.module(Job.of(source, self.defines[source]))[name]
            self._functions[source, name] = function
        self.device.launch(function, grid, block, shared, args, dependent)

    def send(self, address: int, data: np.ndarray) -> None:
        """Page-locked memory to the card: small arrays by a kernel, beside which the ones around it need not stop."""
        if data.nbytes > FEW_BYTES:
            return self.device.upload_pinned(address, data)
        self._copy(data.ctypes.data, address, data.nbytes, True)

    def fetch(self, data: np.ndarray, address: int) -> None:
        """The other way; there when an event marked after it is."""
        self._copy(address, data.ctypes.data, data.nbytes, False)

    def _copy(self, source: int, target: int, nbytes: int, is_ready: bool) -> None:
        assert nbytes % 4 == 0, nbytes
        words = nbytes // 4
        self.launch("rows", "copy_words", (-(-words // 256),), 256, 0, cuda_args.CopyWords(source, target, words, int(is_ready)))

    def record(self, run: Callable[[], None]) -> Replay:
        """`run` as a graph. Run it once before, so that everything is loaded. Inside another recording it is part of that."""
        return Rerun(run) if self.device.is_recording else self.device.record(run)

    def close(self) -> None:
        self.device.close()

    # the network

    def begin(self, batch: Batch, state: CudaState) -> None:
        """What is copied here is there for a pass, as `embed` starts when all before it has ended. A stage that is run alone is
        to be preceded by `device.synchronize`: attention and the delta rule look at positions before they wait. In a recording: see `Lacking.begin`."""
        if batch.num_seqs > MAX_SEQS or batch.num_rows > self.scratch.max_rows:
            raise Q27Error(f"a pass of {batch.num_rows} rows of {batch.num_seqs} sequences, expected at most "
                           f"{self.scratch.max_rows} of {MAX_SEQS}.")
        self.batch, self.state, self._kept_of = batch, state, None
        self.is_prefill = batch.phase == "prefill"
        self.area = self._areas[0 if batch.phase == "draft" else 1 if batch.num_rows <= SMALL_ROWS else 2]
        self.area.put(batch, lacks=self._mixers.begin(batch, state))
        if batch.deferred:
            self._deferred = batch, self.area
        if batch.is_in_flight:
            self._sampler.take_drafts(batch)
        self._turn_rows()

    def _turn_rows(self) -> None:
        """Rotary angles of the rows' positions, as they are on the device."""
        half = self.state.geometry.rotary_dim // 2
        self.launch("rows", "rope_angles", (self.batch.num_rows,), 256, 0,
                    cuda_args.Rope(self.area.at("positions"), self.scratch.frequencies, self.scratch.rope, half))

    def embed(self, weight: CudaWeight, x: CudaBuffer) -> None:
        self._linear.embed(weight, self.area.at("tokens"), x)

    def project(self, norm: CudaVector, weight: CudaWeight, x: CudaBuffer, y: CudaBuffer) -> None:
        self._linear.project(norm, weight, x, y)

    def depth_group(self, batch: Batch) -> int:
        return int(self._attention.is_deep(batch))

    def attend(self, y: CudaBuffer, layer: Any, o: CudaBuffer | None) -> None:
        self._attention.attend(y, layer, o)

    def delta(self, y: CudaBuffer, layer: Any, o: CudaBuffer) -> None:
        self._mixers.delta(y, layer, o)

    def add_linear(self, weight: CudaWeight, h: CudaBuffer, x: CudaBuffer, norm: CudaVector | None = None) -> None:
        self._linear.add_linear(weight, h, x, self._mixers.take_gated(h), norm)

    def gate_up(self, norm: CudaVector, weight: CudaWeight, x: CudaBuffer, h: CudaBuffer) -> None:
        self._linear.gate_up(norm, weight, x, h)

    def head(self, norm: CudaVector, weight: CudaWeight, x: CudaBuffer, final: CudaBuffer, logits: CudaBuffer) -> None:
        self._linear.final_norm(norm, x, final)
        count = len(self.batch.logit_rows)
        if count:
            self._linear.logits(weight, final, self.area.at("logit_rows"), count, logits)

    def previous_hidden(self, final: CudaBuffer, hidden: CudaBuffer) -> None:
        args = self._hidden_args(final, hidden)
        self.launch("rows", "previous_hidden", (final.shape[0],), 256, 0, args)
        if self.batch.deferred:
            self._final = final
        else:
            self.launch("rows", "keep_hidden", (self.batch.num_seqs,), 256, 0, args)
            if self.batch.keeps:
                self.launch("rows", "keep_states", (len(self.batch.keeps),), 256, 0, args)

    def slot_hidden(self, hidden: CudaBuffer) -> None:
        self.launch("rows", "slot_hidden", (hidden.shape[0],), 256, 0, self._hidden_args(None, hidden))

    def _hidden_args(self, final: CudaBuffer | None, hidden: CudaBuffer | None, of: tuple[Batch, BatchArea] | None = None,
                     ) -> cuda_args.Hidden:
        """of: another pass than the one that was begun last."""
        state, (batch, area) = self.state, of or (self.batch, self.area)
        return cuda_args.Hidden(final.address if final else 0, hidden.address if hidden else 0, state.slots, area.at("row_starts"),
                                area.at("slots"), 0, area.at("keeps"), state.slot_bytes, state.hidden_offset, batch.num_seqs,
                                state.geometry.hidden_size)

    def mtp_input(self, enorm: CudaVector, hnorm: CudaVector, weight: CudaWeight, embed: CudaWeight, hidden: CudaBuffer,
                  x: CudaBuffer) -> None:
        self._linear.mtp_input(enorm, hnorm, weight, embed, self.area.at("tokens"), hidden, x, self._sampler.take_turn())

    def commit(self, accepted: np.ndarray | None = None) -> None:
        if self._deferred is None:
            raise Q27Error("commit without a deferred pass before it.")
        if accepted is not None:
            self._sampler.put_accepted(accepted)
        self._keep_accepted(self._deferred)
        self._mixers.commit(self._sampler.accepted, *self._deferred)

    def _keep_accepted(self, of: tuple[Batch, BatchArea]) -> None:
        """The hidden rows of what was accepted of a deferred pass."""
        self._kept_of = of[0]
        if self._final is not None:
            args = self._hidden_args(self._final, None, of)
            args.accepted = self._sampler.accepted
            self.launch("rows", "keep_hidden", (of[0].num_seqs,), 256, 0, args)

    # choosing tokens

    def sample(self, logits: CudaBuffer, rows: SamplingRows) -> None:
        self._sampler.sample(logits, rows)

    def accept(self) -> None:
        self._sampler.accept()

    def result(self) -> Sampled:
        return self._sampler.result(self.batch.num_seqs)

    def hold(self) -> None:
        self._sampler.hold(self.batch.num_seqs)

    def begin_ahead(self, rows: SamplingRows) -> Hashable:
        each = np.arange(self.batch.num_seqs + 1, dtype=np.int32)
        self._ahead_of = self.batch, self.area
        self._sampler.start_download(self.batch.num_seqs)
        if self.batch.deferred and self.batch is not self._kept_of:
            self._keep_accepted(self._ahead_of)
        kinds = self._sampler.begin_ahead(rows)
        self.batch = replace(self.batch, phase="draft", tokens=each[:-1], positions=each[:-1], row_starts=each, logit_rows=each[:-1], deferred=False)
        self.area = self._areas[0]
        self.area.put(self.batch, moves=True)
        self._sampler.end_download()
        return kinds, self._ahead_of[0].deferred

    def follow(self) -> None:
        assert self._ahead_of is not None
        self._sampler.follow(self._ahead_of[1], self.area)
        self._turn_rows()

    def begin_drafts(self, rows: SamplingRows, limits: np.ndarray) -> None:
        self._sampler.begin_drafts(rows, limits)

    def draw_drafts(self, logits: CudaBuffer, skip: tuple[int, int] = (0, 0), goes_on: bool = False) -> None:
        self._sampler.draw_drafts(logits, skip, goes_on)

    def drafted(self) -> Drafted:
        return self._sampler.drafted()
