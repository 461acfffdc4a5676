"""The one small interface between the network and the arithmetic.

A layer is five stages: `project` -> (`attend` | `delta`) -> `add_linear` -> `gate_up` -> `add_linear`. The first axis of
every activation is rows (one row = one token of one sequence). `begin(batch)` tells phase, positions, slots and blocks of
the calls that follow. Every method may be asynchronous except those that say "waits".

Rules for a backend:

- A row's bits depend on its sequence's prefix, its position and the phase, never on its company or on where a chunk
  began: row-family phases compute each row alike for 1 to 16 rows; "prefill" works in tiles at fixed absolute positions.
- Norms stand in the prologue of `project`, `gate_up` and `head`; residual additions in `add_linear`.
- Shapes and dtypes are checked before anything is launched; errors are `Q27Error`s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from q27app.kernels.batch import Batch, Drafted, Sampled, SamplingRows

if TYPE_CHECKING:
    from q27app.weights.container import Tensor


class Buffer(Protocol):
    """An array that lives where the backend computes. shape[0] is rows; `rows(n)` is a view of the first n."""

    shape: tuple[int, ...]
    dtype: np.dtype
    name: str

    def rows(self, count: int) -> "Buffer": ...


class Weight(Protocol):
    """One row list [rows, cols] ready for `project`, `gate_up`, `add_linear` or `head`; or a small float32 vector."""

    shape: tuple[int, ...]
    nbytes: int


class LayerGeometry(Protocol):
    """What the stages need of `model.config.ModelConfig` (duck-typed so that kernels does not import model)."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    delta_key_heads: int
    delta_value_heads: int
    delta_head_dim: int
    conv_width: int
    norm_eps: float


class SlotExport(Protocol):
    """A slot's bytes on their way to host memory."""

    def has_left(self) -> bool:
        """The slot may be written again."""
        ...
    def leave(self) -> None:
        """Waits for that."""
        ...
    def data(self) -> np.ndarray:
        """uint8 [slot_bytes]; waits."""
        ...


class State(Protocol):
    """Everything that belongs to sequences: recurrent slots and KV blocks. Owned by the engine thread.

    A slot holds, for one sequence, the convolution window and the delta state of every delta layer and the
    post-final-norm hidden row of the last computed position (input of the MTP layer). A block holds keys and values of 64
    positions of every attention layer, the MTP layer's included.
    """

    num_slots: int
    num_blocks: int
    slot_bytes: int
    block_bytes: int

    def clear_slot(self, slot: int) -> None: ...
    def copy_slot(self, source: int, target: int) -> None: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def export_slot(self, slot: int) -> np.ndarray:
        """uint8 [slot_bytes]; waits."""
        ...
    def reserve_exports(self) -> None:
        """`begin_export` will be called."""
        ...
    def begin_export(self, slot: int) -> SlotExport | None:
        """The same without waiting; the slot stays as it is until it has left. None where that is not possible, or not now."""
        ...
    def end_exports(self) -> None:
        """No more of them."""
        ...
    def import_slot(self, slot: int, data: np.ndarray) -> None: ...
    def export_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        """uint8 [n, block_bytes]; waits."""
        ...
    def import_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None: ...


class Replay(Protocol):
    """A recorded pass: a CUDA graph, or on NumPy the function itself. Calling it runs the pass again."""

    def __call__(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    name: str
    """"numpy" or "cuda"."""
    is_ahead: bool
    """Calls return before their work is done, so the host has time until a call that waits."""
    row_groups: tuple[int, ...]
    """Row-family passes launch alike whose longest sequences lie between the same two of these numbers of rows."""
    lacking_rows: int
    """Rows for which a slot has room beside its states, which may be written so many rows late; nobody sees that."""

    def depth_group(self, batch: Batch) -> int:
        """Row-family passes of one shape launch alike where this is the same. After `begin`."""
        ...

    # memory
    def free_bytes(self) -> int: ...

    @property
    def runtime_bytes(self) -> int:
        """What the driver's context and programs have taken of the card."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str) -> Buffer: ...
    def upload(self, array: np.ndarray, name: str = "") -> Buffer: ...
    def download(self, buffer: Buffer) -> np.ndarray:
        """Waits."""
        ...
    def load(self, tensors: "Sequence[Tensor]", in_host: bool = False) -> Weight:
        """One row list: the tensors' rows one after the other ([out, in] each, equal columns). A [n] float32 tensor
        alone gives a vector. The backend repacks as it likes; the tensors may be unmapped afterwards. in_host: an embedding
        table that stays in the host's memory, where a card reads the rows of its tokens in place; its `nbytes` is then 0."""
        ...
    def without_rows(self, weight: Weight, skip: tuple[int, int]) -> Weight:
        """The same matrix for `head`, in place: products with its rows skip[0] to skip[1] - 1, both multiples of 32, need not be
        computed, and what stands in their places means nothing."""
        ...
    def packed_bytes(self, tensors: "Sequence[Tensor]") -> int:
        """Bytes that `load` will take for them, alone or together; never too few."""
        ...
    def reserve_weights(self, nbytes: int) -> None:
        """The loads that follow take so many bytes in all."""
        ...
    def taken_bytes(self) -> tuple[int, int]:
        """Bytes taken so far for weights, and for buffers."""
        ...
    def scratch_bytes(self, geometry: LayerGeometry, num_delta_layers: int, num_blocks: int, max_record_rows: int) -> int:
        """Bytes that `allocate_state` will take beside slots and blocks. All weights are loaded and all buffers made."""
        ...
    def allocate_state(
        self, geometry: LayerGeometry, num_delta_layers: int, num_kv_layers: int, kv_format: str,
        num_slots: int, num_blocks: int, max_record_rows: int,
    ) -> State: ...
    def checksums(self) -> list[tuple[str, int]]:
        """(names, reference.checksum) of every loaded weight as it lies in memory now; waits."""
        ...
    def record(self, run: Callable[[], None]) -> Replay: ...
    def close(self) -> None: ...

    # the network: x is the residual stream, float32 [rows, hidden]
    def begin(self, batch: Batch, state: State) -> None: ...
    def embed(self, weight: Weight, x: Buffer) -> None:
        """x = rows of the embedding for batch.tokens."""
        ...
    def project(self, norm: Weight, weight: Weight, x: Buffer, y: Buffer) -> None:
        """A: y = rms_norm(x; norm) @ weight.T"""
        ...
    def attend(self, y: Buffer, layer: Any, o: Buffer | None) -> None:
        """B (o None: only write keys and values): y [rows, 2 A D + 2 G D] = per head (query, gate), then keys, then values. q/k norm, RoPE, KV write,
        causal attention, output gate; o [rows, A D]. `layer` is a model.weights.AttentionLayer: norm, project (what made y: how
        large values can be), q_norm, k_norm, kv_index (which KV layer of the state), first_position (0; 1 in the MTP layer: there
        is no key at position 0, and a row that sees no key gets zeros)."""
        ...
    def delta(self, y: Buffer, layer: Any, o: Buffer) -> None:
        """B: y [rows, C + Nv Dv + 2 Nv] = qkv, z, beta, alpha inputs (in .q27 head order). Convolution, gates, delta rule,
        gated norm; o [rows, Nv Dv]. `layer` is a model.weights.DeltaLayer: conv, a, dt_bias, out_norm, delta_index, norm and
        project (what made y: how large z can be), output (what reads o next)."""
        ...
    def add_linear(self, weight: Weight, h: Buffer, x: Buffer, norm: Weight | None = None) -> None:
        """C and E: x += h @ weight.T. norm: of the stage that reads x next, which may get it made ready."""
        ...
    def gate_up(self, norm: Weight, weight: Weight, x: Buffer, h: Buffer) -> None:
        """D: n = rms_norm(x; norm); h = silu(n @ G.T) * (n @ U.T); weight holds the rows of G, then those of U."""
        ...
    def head(self, norm: Weight, weight: Weight, x: Buffer, final: Buffer, logits: Buffer) -> None:
        """final [rows, hidden] = rms_norm(x; norm) for all rows; logits [n, vocab] = final[batch.logit_rows] @ weight.T."""
        ...
    def previous_hidden(self, final: Buffer, hidden: Buffer) -> None:
        """hidden[row] = final[row - 1], and for the first row of a sequence the hidden row kept in its slot. Then, unless
        the pass is deferred, the last row of `final` of each sequence is kept in its slot; a deferred pass leaves that to
        `commit`, which keeps final[accepted - 1]."""
        ...
    def mtp_input(self, enorm: Weight, hnorm: Weight, weight: Weight, embed: Weight, hidden: Buffer, x: Buffer) -> None:
        """x = [rms_norm(embed[batch.tokens]; enorm) ; rms_norm(hidden; hnorm)] @ weight.T (embedding half first)."""
        ...
    def slot_hidden(self, hidden: Buffer) -> None:
        """hidden[row] = the hidden row kept in the slot of the row's sequence (first draft of a chain)."""
        ...
    def commit(self, accepted: np.ndarray | None = None) -> None:
        """After a deferred pass: fold the first accepted[i] rows of sequence i into its slot, bit for bit as if they had
        been decoded one by one. None: use what `accept` left on the device."""
        ...

    # choosing tokens
    def sample(self, logits: Buffer, rows: SamplingRows) -> None: ...
    def accept(self) -> None:
        """Compare each sequence's drafts (the batch's tokens after the first of each sequence) with the sampled rows:
        accepted = 1 + longest agreeing run."""
        ...
    def result(self) -> Sampled:
        """The one small download of a step; waits."""
        ...
    def hold(self) -> None:
        """What was drawn is on its way; `result` tells it also if another pass is started before that is asked for."""
        ...
    def begin_ahead(self, rows: SamplingRows) -> Hashable:
        """A chain of drafts begins where the pass that was just drawn will turn out to have ended, a row for each of its
        sequences; each of them drew, had one known row, and no penalties. `result` does not wait for it, and a deferred pass
        may be committed later. `follow` and the steps come after this; `begin` of a batch with `in_flight` tokens takes what
        they draw. Returns what their launches depend on beside the number of sequences."""
        ...
    def follow(self) -> None:
        """The batch is that of the first draft step: each sequence's last drawn token where it will stand if all that was
        accepted becomes text."""
        ...
    def begin_drafts(self, rows: SamplingRows, limits: np.ndarray) -> None:
        """A chain of draft steps begins on the batch that was begun, one row a sequence. limits: int32 [rows], at least 1."""
        ...
    def draw_drafts(self, logits: Buffer, skip: tuple[int, int] = (0, 0), goes_on: bool = False) -> None:
        """Draw a draft for each row, none of the ids skip[0] to skip[1] - 1 (see `without_rows`). The batch's row
        then is the draft, one position further, and penalties count it; a row that has reached its limit stays where it is, and its
        further drafts mean nothing. goes_on: `mtp_input` of the next step comes next, and all of this need not be so before."""
        ...
    def drafted(self) -> Drafted:
        """What the chain drew, the one small download of it; waits."""
        ...
