"""Made-up geometries, weights and batches for the tests of this room; nothing here is read from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from q27app.kernels import open_backend
from q27app.kernels.batch import BLOCK_POSITIONS, Batch
from q27app.model.config import ModelConfig
from q27app.model.forward import Model
from q27app.model.weights import bind_weights, expected_shapes

DEMO = ModelConfig(
    name="made", num_layers=4, layer_kinds=("delta", "delta", "delta", "attention"), num_mtp_layers=1, hidden_size=512,
    intermediate_size=1024, vocab_size=4096, num_heads=6, num_kv_heads=1, head_dim=256, rotary_dim=64, rope_theta=1e7,
    delta_key_heads=2, delta_value_heads=6, delta_head_dim=128, conv_width=4, norm_eps=1e-6, max_context=65536, tied=False,
)
"""The head geometry of the 27B at the width of the demo."""

TINY = replace(
    DEMO, layer_kinds=("delta", "attention", "delta", "attention"), hidden_size=48, intermediate_size=40, vocab_size=101,
    num_heads=6, num_kv_heads=2, head_dim=16, rotary_dim=8, rope_theta=1e4, delta_key_heads=2, delta_value_heads=4,
    delta_head_dim=8,
)
"""No width is a multiple of 64; two KV heads, two attention layers."""


@dataclass(frozen=True)
class MadeTensor:
    """What `Backend.load` needs of a container's tensor."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def values(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.array[start:stop]


@dataclass(frozen=True)
class MadeContainer:
    tensors: dict[str, MadeTensor]


def dense_tensors(config: ModelConfig, seed: int) -> dict[str, MadeTensor]:
    """Random weights at natural scale: every error shows in the logits."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = random.standard_normal(shape)
        if name.endswith("ssm_a"):
            values = -np.exp(values)
        elif name.endswith("ssm_conv1d.weight"):
            values *= 0.5
        elif len(shape) == 2 and name != "token_embd.weight":
            values /= np.sqrt(shape[1])
        elif "norm" in name:
            values = 1 + 0.2 * values
        tensors[name] = MadeTensor(name, values.astype(np.float32))
    return tensors


def dense_model(config: ModelConfig, seed: int = 1, max_rows: int = 512) -> Model:
    backend = open_backend("numpy")
    weights = bind_weights(backend, config, MadeContainer(dense_tensors(config, seed)), None)
    return Model(backend, config, weights, max_rows, max_rows)


def make_batch(phase, tokens, positions, slots, tables, logit_rows=None, deferred=False) -> Batch:
    """tokens: one list a sequence; positions: the first position of each; tables: one list of blocks each."""
    lengths = [len(part) for part in tokens]
    width = max(len(table) for table in tables)
    rows = sum(lengths)
    return Batch(
        phase=phase,
        tokens=np.concatenate([np.asarray(part, np.int32) for part in tokens]),
        positions=np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(positions, lengths)]),
        row_starts=np.cumsum([0, *lengths]).astype(np.int32),
        slots=np.asarray(slots, np.int32),
        block_tables=np.asarray([list(table) + [-1] * (width - len(table)) for table in tables], np.int32),
        logit_rows=np.arange(rows, dtype=np.int32) if logit_rows is None else np.asarray(logit_rows, np.int32),
        deferred=deferred,
    )


def begin_alone(backend, batch: Batch, state) -> None:
    """A pass without `embed`, which waits for what `begin` copies: kernels that look at positions early find them there."""
    backend.begin(batch, state)
    backend.device.synchronize()


class Lines:
    """Sequences on one model and one state. A line is (slot, block table, length)."""

    def __init__(self, model: Model, slots: int = 4, blocks: int = 64, kv_format: str = "fp32", record: int = 64) -> None:
        self.model = model
        self.state = model.allocate_state(kv_format, slots, blocks, record)
        self.lengths = [0] * slots
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.free = list(range(blocks))

    def reserve(self, slot: int, positions: int, scattered: bool = False) -> None:
        while len(self.tables[slot]) * BLOCK_POSITIONS < positions:
            self.tables[slot].append(self.free.pop(len(self.free) // 2 if scattered else 0))

    def feed(self, slot: int, tokens, phase: str = "prefill", logit_rows=None) -> np.ndarray:
        """Append tokens of one sequence; logits of the wanted rows (default: all)."""
        return self.feed_many({slot: tokens}, phase, logit_rows)

    def feed_many(self, work: dict[int, list[int]], phase: str, logit_rows=None, deferred: bool = False) -> np.ndarray:
        for slot, tokens in work.items():
            self.reserve(slot, self.lengths[slot] + len(tokens))
        slots = list(work)
        batch = make_batch(phase, list(work.values()), [self.lengths[s] for s in slots], slots,
                           [self.tables[s] for s in slots], logit_rows, deferred)
        logits = self.model.backend.download(self.model.forward(batch, self.state))
        if not deferred:
            for slot, tokens in work.items():
                self.lengths[slot] += len(tokens)
        return logits


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Root of the mean square difference over that of the expected values; of zeros, only zeros are right."""
    difference = np.asarray(found, np.float64) - expected
    size = np.sqrt(np.square(np.asarray(expected, np.float64)).mean())
    return float(np.sqrt(np.square(difference).mean()) / max(size, 1e-30))
