"""A pass over the whole network: embed, layers, final norm, logits of the wanted rows; and the draft layer's passes.

The model owns its activation buffers and nothing else; sequences live in the `State` that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels.backend import Backend, Buffer, State
from q27app.kernels.batch import BLOCK_POSITIONS, Batch, Drafted, SamplingRows
from q27app.model.config import ModelConfig
from q27app.model.layers import Scratch, run_layer
from q27app.model.mtp import MtpPass
from q27app.model.replays import Replays, shape_of
from q27app.model.weights import ModelWeights, bind_weights
from q27app.weights.container import Container


class Model:
    """The network on a backend. max_rows: most rows of a pass; max_logit_rows: most logit rows of a pass.
    common_ids: see `mtp.rare_ids`."""

    def __init__(
        self, backend: Backend, config: ModelConfig, weights: ModelWeights, max_rows: int, max_logit_rows: int,
        common_ids: int | None = None,
    ) -> None:
        self.backend, self.config, self.weights = backend, config, weights
        self.max_rows, self.max_logit_rows = max_rows, max_logit_rows
        self.scratch = Scratch.allocate(backend, config, max_rows)
        self.x = backend.empty((max_rows, config.hidden_size), "float32", "residual")
        self.final_rows = backend.empty((max_rows, config.hidden_size), "float32", "final")
        self.logit_rows = backend.empty((max_logit_rows, config.vocab_size), "float32", "logits")
        self.mtp = MtpPass(backend, config, weights.mtp, self.scratch, max_rows, common_ids) if weights.mtp else None
        self.final: Buffer = self.final_rows.rows(0)
        self.replays = Replays(backend)

    @property
    def num_fresh(self) -> int:
        return self.replays.num_fresh

    @property
    def has_mtp(self) -> bool:
        return self.mtp is not None

    @property
    def rare_ids(self) -> tuple[int, int]:
        """Ids from .. to - 1 that narrow drafts never are; (0, 0): there are no narrow ones."""
        return self.mtp.rare if self.mtp is not None else (0, 0)

    def allocate_state(self, kv_format: str, num_slots: int, num_blocks: int, max_record_rows: int) -> State:
        """Slots and KV blocks for this model. max_record_rows: most rows of one deferred pass."""
        self.replays.clear()
        return self.backend.allocate_state(
            self.config, self.config.num_delta_layers, self.config.num_kv_layers, kv_format,
            num_slots, num_blocks, max_record_rows,
        )

    def forward(self, batch: Batch, state: State, warm_mtp: bool = True) -> Buffer:
        """Run the rows of the batch. Returns logits [len(batch.logit_rows), vocab] float32, valid until the next pass.

        warm_mtp: also write the draft layer's keys and values for these rows (pairs of the hidden row before and the
        row's token), so that drafts may start at their end. `self.final` is [rows, hidden] after the final norm.
        """
        self._check(batch)
        rows = batch.num_rows
        final = self.final = self.final_rows.rows(rows)
        logits = self.logit_rows.rows(len(batch.logit_rows))
        self.backend.begin(batch, state)

        parts = [partial(self._run, layers, rows, final, logits, warm_mtp) for layers in _parts(len(self.weights.layers))]
        if batch.phase == "prefill":
            for part in parts:
                part()
        else:
            self.replays.run((id(state), warm_mtp, *shape_of(batch, self.backend.row_groups, self.backend.depth_group(batch))), *parts)
        return logits

    def _run(self, layers: range, rows: int, final: Buffer, logits: Buffer, warm_mtp: bool) -> None:
        """These layers of the pass that was begun, with what comes before the first and behind the last; nothing in it depends on the
        batch but through its shape."""
        backend, weights, x = self.backend, self.weights, self.x.rows(rows)
        if layers.start == 0:
            backend.embed(weights.embed, x)
        for layer, behind in [*zip_longest(weights.layers, weights.layers[1:])][layers.start:layers.stop]:
            run_layer(backend, layer, x, self.scratch, behind)
        if layers.stop == len(weights.layers):
            backend.head(weights.final_norm, weights.head, x, final, logits)
            if self.mtp is not None:
                self.mtp.warm(final, compute=warm_mtp)

    def draft(self, batch: Batch, state: State, first: bool) -> Buffer:
        """One draft step of the MTP layer, a row a sequence: the row's token stands at the row's position.

        first: the hidden rows come from the slots (last computed position); else from the previous draft step's rows.
        Returns logits [rows, vocab] of the token after.
        """
        self._begin_draft(batch, state)
        return self._draft_step(batch, state, first)

    def draft_chain(
        self, batch: Batch, state: State, first: bool, steps: int, rows: SamplingRows, limits: np.ndarray, is_narrow: bool = False,
    ) -> Drafted:
        """Several draft steps, each fed with what the one before drew, and one wait at the end.

        batch, first: of the first step, as in `draft`. rows: how to draw, a row a sequence. limits: int32 [sequences], of
        `steps` steps how many each takes; its block table must reach that far. is_narrow: without the rare ids.
        """
        self._begin_draft(batch, state)
        self.backend.begin_drafts(rows, limits)
        for step in range(steps):
            self.backend.draw_drafts(self._draft_step(batch, state, first and step == 0, is_narrow), self._skip(is_narrow))
        return self.backend.drafted()

    def _skip(self, is_narrow: bool) -> tuple[int, int]:
        return self.rare_ids if is_narrow else (0, 0)

    def draft_ahead(self, state: State, steps: int, rows: SamplingRows, is_narrow: bool = False) -> None:
        """Chains of `steps` drafts behind the pass that was just drawn, before anybody knows what it drew: see
        `Backend.begin_ahead`. The pass's own `result` does not wait for them. rows: how to draw, a row a sequence."""
        assert self.mtp is not None
        mtp, backend, count = self.mtp, self.backend, len(rows.temperature)
        logits = self.logit_rows.rows(count)
        kinds = backend.begin_ahead(rows)

        def run() -> None:
            backend.follow()
            for step in range(steps):
                backend.draw_drafts(mtp.draft(count, step == 0, logits, is_narrow), self._skip(is_narrow), step + 1 < steps)

        self.replays.run((id(state), "ahead", count, steps, kinds, is_narrow), run)

    def _begin_draft(self, batch: Batch, state: State) -> None:
        if self.mtp is None:
            raise Q27Error(f"{self.config.name} has no draft layer (qwen35.nextn_predict_layers is 0).")
        self._check(batch)
        self.backend.begin(batch, state)

    def _draft_step(self, batch: Batch, state: State, first: bool, is_narrow: bool = False) -> Buffer:
        assert self.mtp is not None
        mtp, count, logits = self.mtp, batch.num_rows, self.logit_rows.rows(len(batch.logit_rows))
        key = (id(state), first, is_narrow, *shape_of(batch, self.backend.row_groups, self.backend.depth_group(batch)))
        self.replays.run(key, lambda: mtp.draft(count, first, logits, is_narrow))
        return logits

    def _check(self, batch: Batch) -> None:
        assert 0 < batch.num_rows <= self.max_rows, (batch.num_rows, self.max_rows)
        assert len(batch.logit_rows) <= self.max_logit_rows, (len(batch.logit_rows), self.max_logit_rows)


def _parts(num_layers: int) -> list[range]:
    """Layers of each part of a recorded pass. A part takes the device about twenty times as long as the host needs to hand it over, so
    each may be several times as long as the one before."""
    ends = [*sorted({num_layers // 32, num_layers // 4} if num_layers >= 32 else ()), num_layers]
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def load_model(
    backend: Backend, container: Container, max_rows: int, max_logit_rows: int = BLOCK_POSITIONS,
    progress: Callable[[int, int], None] | None = None, embed_in_host: bool = False, fast_head: bool = False,
    common_ids: int | None = None,
) -> Model:
    """Read the geometry, check and load every tensor, allocate activations. Raises ModelError before any upload.

    fast_head: see `weights.bind_weights`. common_ids: see `mtp.rare_ids`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in container.tensors.items()}
    config = ModelConfig.from_metadata(container.metadata, shapes)
    weights = bind_weights(backend, config, container, progress, embed_in_host, fast_head)
    return Model(backend, config, weights, max_rows, max_logit_rows, common_ids)
