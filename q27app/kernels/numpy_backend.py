"""`backend.Backend` in NumPy: float32, no other threads than BLAS's own; the default on a machine without a GPU.

Row-wise arithmetic is `reference`'s. What would be slow there, or would let a row's neighbours change its bits, has its own
file: `numpy_linear`, `numpy_attention`, `numpy_delta`; sampling is `reference_sample`'s. Sequences live in `numpy_state`,
what a batch implies in `numpy_pass`. One thread owns a backend and its states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.errors import OutOfMemory, Q27Error
from q27app.gpu import read_host
from q27app.kernels import reference
from q27app.kernels.backend import LayerGeometry, Replay
from q27app.kernels.batch import Batch, Drafted, Sampled, SamplingRows
from q27app.kernels.blas_threads import leave_a_core, use_threads
from q27app.kernels.graph import Rerun
from q27app.kernels.numpy_attention import attend_pass
from q27app.kernels.numpy_delta import delta_tiles
from q27app.kernels.numpy_linear import multiply, multiply_rows
from q27app.kernels.numpy_pass import Pass, begin_pass
from q27app.kernels.numpy_state import DeferredRows, NumpyState
from q27app.kernels.reference_draft import DraftChain, chain_ahead, followed, with_drafts
from q27app.kernels.reference_sample import count_accepted, sample_rows


@dataclass(frozen=True, eq=False)
class NumpyBuffer:
    """An array with a name; `rows` gives views."""

    array: np.ndarray
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def rows(self, count: int) -> "NumpyBuffer":
        assert 0 <= count <= len(self.array), (self.name, count, self.array.shape)
        return NumpyBuffer(self.array[:count], self.name)


@dataclass(frozen=True, eq=False)
class NumpyWeight:
    """float32 [rows, cols] or [n]; unquantised once, when loaded."""

    array: np.ndarray
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class NumpyBackend:
    """See `backend.Backend`."""

    name, is_ahead, row_groups, lacking_rows = "numpy", False, (), 0

    def __init__(self) -> None:
        self._blas_threads = leave_a_core() or 1
        self._pass: Pass | None = None
        self._loaded: list[NumpyWeight] = []
        self._buffer_bytes = 0
        self._sampled: Sampled | None = None
        self._held: Sampled | None = None
        self._chain: DraftChain | None = None

    # memory

    runtime_bytes = 0

    def free_bytes(self) -> int:
        """Memory that the host could give to this process."""
        return int(read_host().memory_available or 0)

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str) -> NumpyBuffer:
        try:
            buffer = NumpyBuffer(np.zeros(shape, dtype), name)
            self._buffer_bytes += buffer.array.nbytes
            return buffer
        except (MemoryError, ValueError) as error:
            raise OutOfMemory(f"buffer {name} {dtype} {list(shape)} does not fit into memory.",
                              "Use a smaller context or fewer slots.") from error

    def upload(self, array: np.ndarray, name: str = "") -> NumpyBuffer:
        return NumpyBuffer(np.array(array, order="C"), name)

    def download(self, buffer: NumpyBuffer) -> np.ndarray:
        return buffer.array.copy()

    def load(self, tensors: Sequence[Any], in_host: bool = False) -> NumpyWeight:
        name = " + ".join(tensor.name for tensor in tensors)
        cols = {tuple(tensor.shape[1:]) for tensor in tensors}
        if not tensors or len(cols) != 1 or (len(tensors) > 1 and cols == {()}):
            shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
            raise Q27Error(f"cannot stack {shapes or 'nothing'}: expected matrices with equal columns, or one vector.")
        shape = (sum(tensor.shape[0] for tensor in tensors), *cols.pop())
        array = self.empty(shape, np.float32, name).array
        start = 0
        for tensor in tensors:
            array[start:start + tensor.shape[0]] = tensor.values()
            start += tensor.shape[0]
        weight = NumpyWeight(array, name)
        self._buffer_bytes -= array.nbytes
        self._loaded.append(weight)
        return weight

    def without_rows(self, weight: NumpyWeight, skip: tuple[int, int]) -> NumpyWeight:
        return weight

    def packed_bytes(self, tensors: Sequence[Any]) -> int:
        return sum(4 * int(np.prod(tensor.shape)) for tensor in tensors)

    def reserve_weights(self, nbytes: int) -> None:
        """Every weight is an array of its own."""

    def taken_bytes(self) -> tuple[int, int]:
        return sum(weight.array.nbytes for weight in self._loaded), self._buffer_bytes

    def scratch_bytes(self, geometry: LayerGeometry, num_delta_layers: int, num_blocks: int, max_record_rows: int) -> int:
        """Arrays of a pass come and go."""
        return 0

    def checksums(self) -> list[tuple[str, int]]:
        return [(weight.name, reference.checksum(weight.array.view(np.uint32))) for weight in self._loaded]

    def allocate_state(
        self, geometry: LayerGeometry, num_delta_layers: int, num_kv_layers: int, kv_format: str,
        num_slots: int, num_blocks: int, max_record_rows: int,
    ) -> NumpyState:
        return NumpyState(geometry, num_delta_layers, num_kv_layers, kv_format, num_slots, num_blocks, max_record_rows)

    def record(self, run: Callable[[], None]) -> Replay:
        return Rerun(run)

    def close(self) -> None:
        self._pass = None
        self._sampled = None

    # the network

    def begin(self, batch: Batch, state: NumpyState) -> None:
        self._pass = begin_pass(batch := with_drafts(batch, self._chain, self._sampled), state)
        if self._blas_threads > 1:
            use_threads(1 if self._pass.tiles is not None else self._blas_threads)  # tiles are shared among threads
        if batch.deferred:
            state.deferred = DeferredRows(batch, {}, {})

    def embed(self, weight: NumpyWeight, x: NumpyBuffer) -> None:
        _expect(x, self._work.batch.num_rows, weight.shape[1])
        x.array[...] = self._embedded(weight)

    def project(self, norm: NumpyWeight, weight: NumpyWeight, x: NumpyBuffer, y: NumpyBuffer) -> None:
        self._expect_product(norm, weight, x, y, weight.shape[0])
        multiply(self._work, self._normed(x, norm), weight.array, y.array)

    def depth_group(self, batch: Batch) -> int:
        return 0

    def attend(self, y: NumpyBuffer, layer: Any, o: NumpyBuffer | None) -> None:
        work = self._work
        geometry, rows = work.state.geometry, work.batch.num_rows
        width = geometry.num_heads * geometry.head_dim
        _expect(y, rows, 2 * width + 2 * geometry.num_kv_heads * geometry.head_dim)
        cos, sin = work.rope()
        q, gate, k, v = reference.attention_inputs(
            y.array, layer.q_norm.array, layer.k_norm.array, cos, sin, geometry)
        work.state.write_rows(layer.kv_index, work.physical, k, v)
        if o is None:
            return
        _expect(o, rows, width)
        attended = np.empty(q.shape, np.float32)
        attend_pass(work, q, layer.kv_index, layer.first_position, attended)
        o.array[...] = reference.apply_gate(attended, gate).reshape(rows, width)

    def delta(self, y: NumpyBuffer, layer: Any, o: NumpyBuffer) -> None:
        work = self._work
        geometry, rows = work.state.geometry, work.batch.num_rows
        width = geometry.delta_value_heads * geometry.delta_head_dim
        _expect(y, rows, work.state.conv.shape[-1] + width + 2 * geometry.delta_value_heads)
        _expect(o, rows, width)
        u, z, beta_in, alpha_in = reference.split_delta(y.array, geometry)
        if work.batch.deferred:
            assert work.state.deferred is not None
            work.state.deferred.inputs[layer.delta_index] = (u.copy(), beta_in.copy(), alpha_in.copy())
            work.state.deferred.weights[layer.delta_index] = layer
        outputs = np.empty(z.shape, np.float32)
        for seq, (slot, span) in enumerate(work.sequences()):
            window = work.state.conv[slot, layer.delta_index]
            state = work.state.delta[slot, layer.delta_index]
            if work.batch.deferred:
                window, state = window.copy(), state.copy()
            keeps = {keep.rows: keep.slot for keep in work.batch.keeps if keep.seq == seq}
            for count, target in keeps.items():
                history = np.concatenate([window, u[span][:count]])
                work.state.conv[target, layer.delta_index] = history[len(history) - len(window):]
            inputs = _advance_window(window, u[span], beta_in[span], alpha_in[span], layer, geometry)
            if work.tiles is None:
                _delta_rows(state, inputs, outputs[span])
            else:
                kept = {count: work.state.delta[target, layer.delta_index] for count, target in keeps.items()}
                tiles = [tile for tile in work.tiles if tile.seq == seq]
                delta_tiles(tiles, state, span.start, inputs, outputs, kept)
        o.array[...] = reference.gated_norm(outputs, layer.out_norm.array, z, geometry.norm_eps).reshape(rows, width)

    def add_linear(self, weight: NumpyWeight, h: NumpyBuffer, x: NumpyBuffer, norm: NumpyWeight | None = None) -> None:
        _expect(h, self._work.batch.num_rows, weight.shape[1])
        _expect(x, self._work.batch.num_rows, weight.shape[0])
        x.array[...] += self._product(h.array, weight)

    def gate_up(self, norm: NumpyWeight, weight: NumpyWeight, x: NumpyBuffer, h: NumpyBuffer) -> None:
        self._expect_product(norm, weight, x, h, weight.shape[0] // 2)
        h.array[...] = reference.silu_multiply(self._product(self._normed(x, norm), weight))

    def head(
        self, norm: NumpyWeight, weight: NumpyWeight, x: NumpyBuffer, final: NumpyBuffer, logits: NumpyBuffer
    ) -> None:
        """Logit rows are few, so in every phase each is multiplied alone."""
        work = self._work
        _expect(x, work.batch.num_rows, weight.shape[1])
        _expect(final, work.batch.num_rows, weight.shape[1])
        _expect(logits, len(work.batch.logit_rows), weight.shape[0])
        final.array[...] = self._normed(x, norm)
        multiply_rows(final.array[work.batch.logit_rows], weight.array, logits.array)

    def previous_hidden(self, final: NumpyBuffer, hidden: NumpyBuffer) -> None:
        work = self._work
        for slot, span in work.sequences():
            hidden.array[span.start + 1:span.stop] = final.array[span.start:span.stop - 1]
            hidden.array[span.start] = work.state.hidden[slot]
            if not work.batch.deferred:
                work.state.hidden[slot] = final.array[span.stop - 1]
        for keep in work.batch.keeps:
            work.state.hidden[keep.slot] = final.array[int(work.batch.row_starts[keep.seq]) + keep.rows - 1]
        if work.batch.deferred:
            assert work.state.deferred is not None
            work.state.deferred.final = final.array.copy()

    def mtp_input(
        self, enorm: NumpyWeight, hnorm: NumpyWeight, weight: NumpyWeight, embed: NumpyWeight, hidden: NumpyBuffer,
        x: NumpyBuffer,
    ) -> None:
        work = self._work
        _expect(hidden, work.batch.num_rows, weight.shape[1] // 2)
        _expect(x, work.batch.num_rows, weight.shape[0])
        joined = reference.mtp_join(
            enorm.array, hnorm.array, self._embedded(embed), hidden.array, work.state.geometry.norm_eps)
        multiply(work, joined, weight.array, x.array)

    def slot_hidden(self, hidden: NumpyBuffer) -> None:
        hidden.array[...] = self._work.state.hidden[self._work.batch.slots[self._work.seq_of_row]]

    def commit(self, accepted: np.ndarray | None = None) -> None:
        """The recorded rows go through the arithmetic of a plain decode, so the slots get its bits."""
        state = self._work.state
        record = state.deferred
        if record is None:
            raise Q27Error("commit without a deferred pass before it.")
        if accepted is None:
            if self._sampled is None or len(self._sampled.accepted) != record.batch.num_seqs:
                raise Q27Error("commit without accepted counts: accept has not run after this deferred pass.")
            accepted = self._sampled.accepted
        lengths = np.diff(record.batch.row_starts)
        accepted = np.asarray(accepted)
        if accepted.shape != lengths.shape or (accepted < 0).any() or (accepted > lengths).any():
            raise Q27Error(f"accepted counts {accepted.tolist()}, expected 0 to {lengths.tolist()}.")
        state.deferred = None
        for seq, count in enumerate(accepted.tolist()):
            if count:
                slot, start = int(record.batch.slots[seq]), int(record.batch.row_starts[seq])
                self._fold(state, record, slot, slice(start, start + count))

    def _fold(self, state: NumpyState, record: DeferredRows, slot: int, span: slice) -> None:
        for index, (u, beta_in, alpha_in) in record.inputs.items():
            window, matrix = state.conv[slot, index], state.delta[slot, index]
            inputs = _advance_window(
                window, u[span], beta_in[span], alpha_in[span], record.weights[index], state.geometry)
            _delta_rows(matrix, inputs, np.empty(inputs[2].shape, np.float32))
        if record.final is not None:
            state.hidden[slot] = record.final[span.stop - 1]

    # choosing tokens

    def sample(self, logits: NumpyBuffer, rows: SamplingRows) -> None:
        tokens, margins, logprobs = sample_rows(logits.array, rows)
        self._sampled = Sampled(tokens, margins, np.ones(self._work.batch.num_seqs, np.int32), logprobs)

    def accept(self) -> None:
        if self._sampled is None:
            raise Q27Error("accept without a sample before it.")
        drawn = self._sampled
        accepted = count_accepted(self._work.batch, drawn.tokens)
        self._sampled = Sampled(drawn.tokens, drawn.margins, accepted, drawn.logprobs)

    def result(self) -> Sampled:
        found, self._held = self._held or self._sampled, None
        if found is None:
            raise Q27Error("result without a sample before it.")
        return found

    def hold(self) -> None:
        self._held = self._sampled

    def begin_ahead(self, rows: SamplingRows) -> int:
        self._chain = chain_ahead(rows, followed(self._work.batch, self.result()))
        return 0

    def follow(self) -> None:
        batch, state, sampled = self._work.batch, self._work.state, self.result()
        if state.deferred is not None and state.deferred.final is not None:   # not committed yet
            state.hidden[batch.slots] = state.deferred.final[batch.row_starts[:-1] + sampled.accepted - 1]
        self._pass = begin_pass(followed(batch, sampled), state)

    def begin_drafts(self, rows: SamplingRows, limits: np.ndarray) -> None:
        self._chain = DraftChain(rows, limits)

    def draw_drafts(self, logits: NumpyBuffer, skip: tuple[int, int] = (0, 0), goes_on: bool = False) -> None:
        self._pass = begin_pass(self._drafts.draw(logits.array, self._work.batch, skip), self._work.state)

    def drafted(self) -> Drafted:
        return self._drafts.result()

    @property
    def _drafts(self) -> DraftChain:
        if self._chain is None:
            raise Q27Error("no chain of drafts has begun: call begin_drafts first.")
        return self._chain

    # inside

    @property
    def _work(self) -> Pass:
        if self._pass is None:
            raise Q27Error("no pass has begun: call begin(batch, state) first.")
        return self._pass

    def _normed(self, x: NumpyBuffer, norm: NumpyWeight) -> np.ndarray:
        return reference.rms_norm(x.array, norm.array, self._work.state.geometry.norm_eps)

    def _product(self, x: np.ndarray, weight: NumpyWeight) -> np.ndarray:
        out = np.empty((len(x), weight.shape[0]), np.float32)
        multiply(self._work, x, weight.array, out)
        return out

    def _embedded(self, weight: NumpyWeight) -> np.ndarray:
        tokens = self._work.batch.tokens
        if tokens.min() < 0 or tokens.max() >= weight.shape[0]:
            raise Q27Error(f"token ids from {tokens.min()} to {tokens.max()}, expected 0 to {weight.shape[0] - 1}.")
        return reference.embed(weight.array, tokens)

    def _expect_product(
        self, norm: NumpyWeight, weight: NumpyWeight, x: NumpyBuffer, y: NumpyBuffer, width: int
    ) -> None:
        rows = self._work.batch.num_rows
        _expect(x, rows, weight.shape[1])
        _expect(y, rows, width)
        if norm.shape != (weight.shape[1],):
            raise Q27Error(f"norm {norm.name} is {list(norm.shape)}, expected [{weight.shape[1]}].")


def _advance_window(window: np.ndarray, u, beta_in, alpha_in, layer: Any, geometry: LayerGeometry):
    """(q, k, v, beta, g) of a sequence's rows; window [K - 1, C] moves on in place."""
    c, moved = reference.convolve(window, u, layer.conv.array)
    window[...] = moved
    return reference.delta_inputs(c, beta_in, alpha_in, layer.a.array, layer.dt_bias.array, geometry)


def _delta_rows(state: np.ndarray, inputs, outputs: np.ndarray) -> None:
    """One position after the other; state in place, outputs [rows, Nv, Dv]."""
    q, k, v, beta, g = inputs
    for row in range(len(outputs)):
        outputs[row] = reference.delta_step(state, q[row], k[row], v[row], beta[row], g[row])


def _expect(buffer: NumpyBuffer, rows: int, width: int) -> None:
    if buffer.shape != (rows, width) or buffer.dtype != np.float32:
        raise Q27Error(f"buffer {buffer.name} is {buffer.dtype} {list(buffer.shape)}, "
                       f"expected float32 [{rows}, {width}].")
