"""What the CUDA backend is held against, on any device: made weights, the NumPy backend, the same calls on both.

Used with the emulated device by the CPU suite and with the card's by `tests/gpu`. Each check returns its worst relative rms
error, or raises where bits must be equal.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from q27app.kernels import reference
from q27app.kernels.batch import Batch, Keep, SamplingRows, in_flight
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.numpy_backend import NumpyBackend
from q27app.kernels.reference_sample import sample_rows
from q27app.model.config import ModelConfig
from q27app.model.forward import Model
from q27app.model.weights import bind_weights
from q27app.weights.codecs import encode
from q27app.weights.container import Tensor
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, DType

from tests.kernels.made import DEMO, Lines, MadeContainer, dense_tensors, make_batch, relative_error

TENSOR_CORE_TOLERANCE = 5e-4
"""fp16 activations: 2^-12 relative at most, about 2e-4 rms a product."""
TWO_STAGES_TOLERANCE = 7e-4
"""Of one stage behind another."""

NANO = replace(DEMO, hidden_size=128, intermediate_size=192, vocab_size=200)
MIXES: dict[str, list[tuple[int, DType]]] = {
    "q4": [(96, Q4_G64)], "q8": [(80, Q8_G128)], "f16": [(50, F16)], "f32": [(33, F32)],
    "mix": [(64, Q4_G64), (40, Q8_G128), (48, F16)], "pair": [(40, Q4_G64)] * 2, "unlike pair": [(40, Q4_G64), (40, Q8_G128)],
}
"""Row lists: rows and number type of each tensor."""


def made_tensor(random: np.random.Generator, name: str, rows: int, cols: int, dtype: DType) -> Tensor:
    values = (random.standard_normal((rows, cols), np.float32) / np.float32(np.sqrt(cols)))
    return stored(name, values, dtype)


def stored(name: str, values: np.ndarray, dtype: DType) -> Tensor:
    """The tensor as a container holds it."""
    if dtype is F32:
        data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(values.shape[0] if values.ndim == 2 else 1, -1)
        return Tensor(name, F32, values.shape, data)
    data, scales = encode(values, dtype)
    return Tensor(name, dtype, values.shape, np.asarray(data), scales)


class Stage:
    """One row list with its norm on a backend, and its float32 values."""

    def __init__(self, backend: CudaBackend, spec: list[tuple[int, DType]], cols: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.backend, self.cols = backend, cols
        tensors = [made_tensor(random, f"made{i}", rows, cols, dtype) for i, (rows, dtype) in enumerate(spec)]
        self.values = np.concatenate([tensor.values() for tensor in tensors])
        self.is_pair = len(spec) == 2
        self.weight = backend.load(tensors)
        self.norm_values = (1 + 0.2 * random.standard_normal(cols)).astype(np.float32)
        self.norm = backend.load([stored("norm", self.norm_values, F32)])

    def run(self, x: np.ndarray) -> tuple[np.ndarray, float]:
        """(first stage's output, worst error of the stages that take this row list); a batch must have begun."""
        backend, rows = self.backend, len(x)
        if self.is_pair:
            out = backend.upload(np.full((rows, len(self.values) // 2), np.nan, np.float32))
            backend.gate_up(self.norm, self.weight, backend.upload(x), out)
            found = backend.download(out)
            return found, relative_error(found, reference.gate_up(self.norm_values, self.values, x, 1e-6))
        out = backend.upload(np.full((rows, len(self.values)), np.nan, np.float32))
        backend.project(self.norm, self.weight, backend.upload(x), out)
        found = backend.download(out)
        worst = relative_error(found, reference.project(self.norm_values, self.values, x, 1e-6))
        start = np.random.default_rng(rows).standard_normal(found.shape).astype(np.float32)
        out = backend.upload(start)
        backend.add_linear(self.weight, backend.upload(x), out)
        return found, max(worst, relative_error(backend.download(out) - start, x @ self.values.T))


def open_state(backend: CudaBackend, cols: int):
    """A state of few slots and blocks for stages of a width."""
    config = NANO
    geometry = SimpleNamespace(**{name: getattr(config, name) for name in config.__dataclass_fields__} | {"hidden_size": cols})
    return backend.allocate_state(geometry, 1, 1, "fp16", 2, 4, 16)


def sampling_rows(n: int, **changes) -> SamplingRows:
    """Draws of n rows at a temperature of 0.8, but for `changes`."""
    values = {
        "temperature": np.full(n, 0.8, np.float32), "top_k": np.zeros(n, np.int32), "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32), "presence": np.zeros(n, np.float32), "frequency": np.zeros(n, np.float32),
        "seeds": np.arange(n, dtype=np.uint64) * np.uint64(1 << 33) + np.uint64(5), "positions": np.arange(n, dtype=np.int64) + (1 << 33),
        "penalty_starts": np.zeros(n + 1, np.int32), "penalty_ids": np.zeros(0, np.int32), "penalty_counts": np.zeros(0, np.int32),
        "num_logprobs": np.full(n, -1, np.int32), "masks": None,
    }
    return SamplingRows(**(values | changes))


def rows_with_peaks(random: np.random.Generator, rows: int, cols: int, last: np.ndarray) -> np.ndarray:
    """Rows of very different size, peaks of 1e6 in some; the last is `last`."""
    x = (random.standard_normal((rows, cols)) * np.exp(3 * random.standard_normal((rows, 1)))).astype(np.float32)
    x[::2, 5] = 1e6
    x[-1] = last
    return x


def check_linear(backend: CudaBackend, state, stage: Stage, phase: str, counts: tuple[int, ...]) -> float:
    """Every row count against NumPy, and the same row's bits in all of them."""
    random = np.random.default_rng(7)
    last, bits, worst = random.standard_normal(stage.cols).astype(np.float32), None, 0.0
    for rows in counts:
        x = rows_with_peaks(random, rows, stage.cols, last)
        lengths = [16] * (rows // 16) + ([rows % 16] if rows % 16 else [])
        if phase == "prefill":
            lengths = [rows]
        batch = make_batch(phase, [[0] * n for n in lengths], [0] * len(lengths), [0] * len(lengths), [[0]] * len(lengths))
        backend.begin(batch, state)
        found, error = stage.run(x)
        assert np.isfinite(found).all(), f"{phase}, {rows} rows: not finite"
        worst = max(worst, error)
        bits = found[-1] if bits is None else bits
        assert np.array_equal(bits, found[-1]), f"{phase}: a row's bits changed with {rows} rows"
    return worst


class Both:
    """A gate and an up [width, cols] each, and what comes behind them [down, width], on a backend. peak: what a row of the gate is
    larger than the others."""

    def __init__(self, backend: CudaBackend, cols: int, width: int, dtype: DType, last: DType, peak: float = 1.0, down: int = 72) -> None:
        random = np.random.default_rng(4)
        self.backend, self.cols = backend, cols
        norm = (1 + 0.2 * random.standard_normal(cols)).astype(np.float32)
        parts = [made_tensor(random, name, width, cols, dtype).values() for name in ("gate", "up")]
        parts[0][5] *= peak
        tensors = [stored(name, part, dtype) for name, part in zip(("gate", "up"), parts)]
        last_matrix = made_tensor(random, "down", down, width, last)
        self.values = norm, np.concatenate([tensor.values() for tensor in tensors]), last_matrix.values()
        self.norm, self.pair, self.down = backend.load([stored("norm", norm, F32)]), backend.load(tensors), backend.load([last_matrix])
        self.h = backend.empty((48, width), "float32", "h")

    @property
    def is_ready(self) -> bool:
        """The products of the last pass are left as the next stage reads them."""
        return self.backend.ready.of(self.h) is not None

    def run(self, state, x: np.ndarray, phase: str = "decode", looks: bool = False) -> tuple[np.ndarray, float]:
        """(what is added, error of it, or with `looks` of the products, which are downloaded in between). Rows with a peak are left
        out of it: all of them is one rounded number, its error squared in the products."""
        backend, rows, (norm, pair, down) = self.backend, len(x), self.values
        lengths = [rows] if phase == "prefill" else [16] * (rows // 16) + ([rows % 16] if rows % 16 else [])
        backend.begin(make_batch(phase, [[0] * n for n in lengths], [0] * len(lengths), [0] * len(lengths), [[0]] * len(lengths)), state)
        h, plain, expected = self.h.rows(rows), np.abs(x).max(axis=1) < 1e5, reference.gate_up(norm, pair, x, 1e-6)
        backend.gate_up(self.norm, self.pair, backend.upload(x), h)
        products = backend.download(h) if looks else None
        out = backend.upload(np.zeros((rows, len(down)), np.float32))
        backend.add_linear(self.down, h, out)
        found = backend.download(out)
        return found, relative_error(products[plain], expected[plain]) if looks else relative_error(found[plain], expected[plain] @ down.T)


def check_both(both: Both, state, counts: tuple[int, ...]) -> float:
    """Both stages with every row count against NumPy, and the same row's bits in all of them."""
    random = np.random.default_rng(7)
    last, bits, worst = random.standard_normal(both.cols).astype(np.float32), None, 0.0
    for rows in counts:
        found, error = both.run(state, rows_with_peaks(random, rows, both.cols, last))
        assert np.isfinite(found).all(), f"{rows} rows: not finite"
        worst, bits = max(worst, error), found[-1] if bits is None else bits
        assert np.array_equal(bits, found[-1]), f"a row's bits changed with {rows} rows"
    return worst


def model_tensors(config: ModelConfig, dtype: DType, seed: int = 3) -> dict[str, Tensor]:
    """A dense model's tensors; matrices as dtype, but alpha and beta F16 and the rest F32 as in the tiers."""
    out = {}
    for name, made in dense_tensors(config, seed).items():
        is_matrix = made.array.ndim == 2 and "conv1d" not in name
        small = "ssm_alpha" in name or "ssm_beta" in name
        out[name] = stored(name, made.array, (F16 if small and dtype is not F32 else dtype) if is_matrix else F32)
    return out


def bound_model(backend, config: ModelConfig, tensors: dict[str, Tensor], max_rows: int, common_ids: int | None = None) -> Model:
    weights = bind_weights(backend, config, MadeContainer(tensors), None)
    return Model(backend, config, weights, max_rows, min(max_rows, 64), common_ids)


def pair_of_lines(device, config: ModelConfig, dtype: DType, kv_format: str, max_rows: int = 128, blocks: int = 16,
                  common_ids: int | None = None) -> tuple[Lines, Lines]:
    """The same model and sequences on NumPy and on the device."""
    tensors = model_tensors(config, dtype)
    expected = Lines(bound_model(NumpyBackend(), config, tensors, max_rows, common_ids), 4, blocks, kv_format, 64)
    return expected, Lines(bound_model(CudaBackend(device), config, tensors, max_rows, common_ids), 4, blocks, kv_format, 64)


def check_model(expected: Lines, found: Lines, prompt: int = 70) -> dict[str, float]:
    """A whole life: prefill, decode, resumed prefill, several rows of two sequences, verify and commit, drafts."""
    random = np.random.default_rng(0)
    vocab = found.model.config.vocab_size
    tokens = [int(t) for t in random.integers(0, vocab, prompt + 40)]
    errors: dict[str, float] = {}

    def both(name: str, step) -> None:
        errors[name] = relative_error(step(found), step(expected))

    last = min(prompt, 8)
    both("prefill", lambda lines: lines.feed(0, tokens[:prompt], "prefill", list(range(prompt - last, prompt))))
    both("decode", lambda lines: lines.feed(0, tokens[prompt:prompt + 1], "decode"))
    both("prefill resumed", lambda lines: lines.feed(0, tokens[prompt + 1:prompt + 4]))
    both("two sequences", lambda lines: lines.feed_many({0: tokens[prompt + 4:prompt + 9], 1: tokens[:3]}, "decode"))
    both("verify", lambda lines: lines.feed_many({0: tokens[prompt + 9:prompt + 14], 1: tokens[3:6]}, "verify", None, True))
    for lines in (expected, found):
        lines.model.backend.commit(np.array([3, 2], np.int32))
        lines.lengths[0] += 3
        lines.lengths[1] += 2
    both("after commit", lambda lines: lines.feed_many({0: tokens[prompt + 12:prompt + 13], 1: tokens[5:6]}, "decode"))
    if found.model.has_mtp:
        both("draft", lambda lines: draft(lines, 0, tokens[prompt + 13], first=True))
        both("second draft", lambda lines: draft(lines, 1, tokens[prompt + 14], first=False))
    return errors


def check_keeps(lines: Lines) -> None:
    """States that a prefill keeps on its way have the bits of prefills that end there, and change nothing else. 4 slots."""
    model, state = lines.model, lines.state
    first, second = [index % 50 for index in range(130)], [7 + index % 31 for index in range(66)]
    batch = make_batch("prefill", [first, second], [0, 0], [0, 1], [[0, 1, 2], [3, 4]], [129])
    kept = replace(batch, keeps=(Keep(0, 64, 3), Keep(1, 64, 2)))

    def run(one: Batch) -> list[np.ndarray]:
        for slot in range(4):
            state.clear_slot(slot)
        model.forward(one, state, True)
        return [state.export_slot(slot) for slot in range(4)]

    expected, found = run(batch), run(kept)
    assert not expected[2].any() and not expected[3].any()
    for slot in (0, 1):
        np.testing.assert_array_equal(found[slot], expected[slot])
    np.testing.assert_array_equal(found[3], run(make_batch("prefill", [first[:64]], [0], [0], [[0]], [63]))[0])
    np.testing.assert_array_equal(found[2], run(make_batch("prefill", [second[:64]], [0], [0], [[0]], [63]))[0])
    np.testing.assert_array_equal(run(replace(batch, keeps=(Keep(0, 128, 2),)))[2],
                                  run(make_batch("prefill", [first[:128]], [0], [0], [[0, 1]], [127]))[0])


def check_pass_behind(lines: Lines, rows: SamplingRows) -> None:
    """A decode pass whose tokens are what the pass before drew has the bits of one that is told them, the first one's result is
    not lost, and its own draws may be made again with masks. rows: draws of two rows."""
    model, state, backend = lines.model, lines.state, lines.model.backend

    def begin() -> Batch:
        for slot in (0, 1):
            state.clear_slot(slot)
        model.forward(make_batch("prefill", [[1, 2, 3], [9, 8]], [0, 0], [0, 1], [[0], [1]], []), state, True)
        batch = make_batch("decode", [[4], [7]], [3, 2], [0, 1], [[0], [1]])
        backend.sample(model.forward(batch, state, True), rows)
        return make_batch("decode", [[in_flight(1)], [in_flight(0)]], [3, 4], [1, 0], [[1], [0]])

    def end(batch: Batch) -> tuple[list[int], np.ndarray]:
        logits = model.forward(batch, state, True)
        backend.sample(logits, rows)
        return backend.result().tokens.tolist(), backend.download(logits)

    behind = begin()
    known = backend.result().tokens
    told = end(replace(behind, tokens=np.array([known[1], known[0]], np.int32)))
    states = [state.export_slot(slot) for slot in (0, 1)]
    begin()
    backend.hold()
    logits = model.forward(behind, state, True)
    backend.sample(logits, rows)
    np.testing.assert_array_equal(backend.result().tokens, known)
    assert backend.result().tokens.tolist() == told[0]
    np.testing.assert_array_equal(backend.download(logits), told[1])
    masks = np.full((2, -(-told[1].shape[1] // 32)), 0xFFFFFFFF, np.uint32)
    masks[1, told[0][1] // 32] &= ~np.uint32(1 << told[0][1] % 32)
    backend.sample(logits, replace(rows, masks=masks))
    again = backend.result().tokens.tolist()
    assert again == sample_rows(told[1], replace(rows, masks=masks))[0].tolist() and again[0] == told[0][0] and again[1] != told[0][1]
    for slot in (0, 1):
        np.testing.assert_array_equal(state.export_slot(slot), states[slot])


def draft(lines: Lines, step: int, token: int, first: bool) -> np.ndarray:
    """Logits of one draft step of sequence 0, `step` positions after its end."""
    position = lines.lengths[0] + step
    lines.reserve(0, position + 1)
    batch = make_batch("draft", [[token]], [position], [0], [lines.tables[0]])
    return lines.model.backend.download(lines.model.draft(batch, lines.state, first))
