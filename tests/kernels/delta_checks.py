"""The delta stage of the CUDA backend alone, on any device: results against the reference, bits that must not change."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from q27app.kernels import reference
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_ready import HEAD_ROWS
from q27app.kernels.memory import CudaBuffer
from q27app.model.config import ModelConfig
from q27app.weights.container import Tensor
from q27app.weights.dtypes import F16, F32
from tests.kernels.cuda_checks import made_tensor, stored
from tests.kernels.made import begin_alone, make_batch, relative_error

TOLERANCE = 1e-5
READY_TOLERANCE = 2.5e-4
"""Of what is left as fp16: 1.7e-4 of numbers that are as often just above a power of two as just below."""


class DeltaBench:
    """Random small weights of one layer. sharp: decays from almost 1 to almost 0 side by side, and rows that repeat; leaves: z is
    bounded, so that rows of heads of 128 are left ready for the next stage."""

    def __init__(self, device, config: ModelConfig, sharp: bool = False, max_rows: int = 320, leaves: bool = False) -> None:
        random, self.config = np.random.default_rng(3), config
        self.backend, self._sharp = CudaBackend(device), sharp
        heads, dim = config.delta_value_heads, config.delta_head_dim
        self.channels = (2 * config.delta_key_heads + heads) * dim
        values = {"conv": random.standard_normal((self.channels, 4)) / 2, "a": -np.exp(random.standard_normal(heads) + (2 if sharp else -2)),
                  "dt_bias": random.standard_normal(heads), "out_norm": 1 + random.standard_normal(dim) / 5}
        self.values = {name: array.astype(np.float32) for name, array in values.items()}
        held = {name: self.backend.load([Tensor(name, F32, array.shape, array.view(np.uint8).reshape(len(array) if array.ndim == 2 else 1, -1))])
                for name, array in self.values.items()}
        held["norm"] = self.backend.load([stored("norm", np.full(128, 1 if leaves else 1e30, np.float32), F32)])
        held["project"] = self.backend.load([made_tensor(random, name, rows, 128, F16) for name, rows in (("u", self.channels), ("z", heads * dim), ("b", heads))])
        self.layer = SimpleNamespace(**held, output=SimpleNamespace(address=0, nbytes=0), delta_index=0)
        self.width = self.channels + heads * dim + 2 * heads
        self.y = self.backend.empty((max_rows, self.width), "float32", "y")
        self.out = self.backend.empty((max_rows, heads * dim), "float32", "out")

    def rows(self, count: int, seed: int = 5) -> np.ndarray:
        y = np.random.default_rng(seed).standard_normal((count, self.width)).astype(np.float32)
        if self._sharp:
            y[:, -2 * self.config.delta_value_heads:] *= 6
            y[count // 2:count // 2 + 20] = y[count // 2]
        return y

    def prefill(self, y: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
        """Rows y from position 0 on, in passes of `counts` rows."""
        state = self.backend.allocate_state(self.config, 1, 1, "fp16", 1, 8, 16)
        found, at = [], 0
        for count in counts:
            self.backend.device.upload(self.y.address, y[at:at + count])
            begin_alone(self.backend, make_batch("prefill", [[0] * count], [at], [0], [list(range(8))]), state)
            self.backend.delta(self.y.rows(count), self.layer, self.out.rows(count))
            found.append(self.backend.download(self.out.rows(count)))
            at += count
        return np.concatenate(found)

    def step(self, y: np.ndarray, count: int) -> np.ndarray:
        """Rows y from position 0 on, `count` rows a decode pass."""
        state = self.backend.allocate_state(self.config, 1, 1, "fp16", 1, 8, 16)
        found = []
        for at in range(0, len(y), count):
            rows = y[at:at + count]
            self.backend.device.upload(self.y.address, rows)
            begin_alone(self.backend, make_batch("decode", [[0] * len(rows)], [at], [0], [list(range(8))]), state)
            out = self.out.rows(len(rows))
            self.backend.delta(self.y.rows(len(rows)), self.layer, out)
            found.append(self.taken(out))
        return np.concatenate(found)

    def beside(self, y: np.ndarray, counts: tuple[int, ...], deferred: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
        """As many sequences, each rows y from its own first row on, counts[i] rows a pass of sequence i, all in the same passes.
        deferred: the rows wait for a commit, which takes all of them. Returns rows and slot of each."""
        state, passes = self.backend.allocate_state(self.config, 1, 1, "fp16", len(counts), 8, 16), len(y) // max(counts)
        found = [[] for _ in counts]
        for step in range(passes):
            starts = [step * count for count in counts]
            rows = np.concatenate([y[at:at + count] for at, count in zip(starts, counts, strict=True)])
            self.backend.device.upload(self.y.address, rows)
            seqs = range(len(counts))
            phase, tables = "verify" if deferred else "decode", [list(range(8)) for _ in seqs]
            begin_alone(self.backend, make_batch(phase, [[0] * count for count in counts], starts, list(seqs), tables, None, deferred), state)
            out = self.out.rows(len(rows))
            self.backend.delta(self.y.rows(len(rows)), self.layer, out)
            for own, part in zip(found, np.split(self.taken(out), np.cumsum(counts)[:-1]), strict=True):
                own.append(part)
            if deferred:
                self.backend.commit(np.array(counts, np.int32))
        return [(np.concatenate(own), state.export_slot(seq)) for seq, own in enumerate(found)]

    def slot_after(self, y: np.ndarray, drafted: int, accepted: int) -> np.ndarray:
        """The slot after rows y: decoded one by one, or, with drafted rows, after `accepted` of the last `drafted` in a deferred pass."""
        state, backend, ahead = self.backend.allocate_state(self.config, 1, 1, "fp16", 1, 8, 16), self.backend, len(y) - drafted
        for at, count in [*((at, 1) for at in range(ahead)), *([(ahead, drafted)] if drafted else [])]:
            backend.device.upload(self.y.address, y[at:at + count])
            deferred = at == ahead
            begin_alone(backend, make_batch("verify" if deferred else "decode", [[0] * count], [at], [0], [list(range(8))], deferred=deferred), state)
            backend.delta(self.y.rows(count), self.layer, self.out.rows(count))
            self.taken(self.out.rows(count))
        if drafted:
            backend.commit(np.array([accepted], np.int32))
        return state.export_slot(0)

    def taken(self, out: CudaBuffer) -> np.ndarray:
        """The rows of the pass, with their norm; notes whether they were left as the next stage reads them."""
        backend = self.backend
        self.was_left = backend.ready.of(out) is not None
        if backend.scratch.head_words:
            words = backend.device.download(backend.scratch.head_words, 4 * min(self.out.shape[0], HEAD_ROWS) * out.shape[1])
            assert not words.any(), "a word that blocks give each other was not taken"
        return backend.download(out)

    def expected(self, y: np.ndarray) -> np.ndarray:
        heads, dim = self.config.delta_value_heads, self.config.delta_head_dim
        window, state = np.zeros((3, self.channels), np.float32), np.zeros((heads, dim, dim), np.float32)
        out, _ = reference.delta(y, window, state, *(self.values[name] for name in ("conv", "a", "dt_bias", "out_norm")), self.config)
        return out.reshape(len(y), -1)


def check_delta(bench: DeltaBench, count: int) -> float:
    """`count` rows cold, resumed at multiples of 64, and in passes that meet no block: near the reference, the same bits where
    they must be. Returns the largest relative error."""
    y = bench.rows(count)
    expected, cold = bench.expected(y), bench.prefill(y, (count,))
    if not np.array_equal(cold, bench.prefill(y, (64, count - 64))):
        raise AssertionError("a prefill resumed at 64 has other bits")
    return max(relative_error(cold, expected), relative_error(bench.prefill(y, (5, 50, count - 55)), expected))


def check_steps(bench: DeltaBench, count: int, sizes: tuple[int, ...]) -> float:
    """`count` decode rows in passes of every size: near the reference, the same bits. Returns the relative error."""
    y = bench.rows(count)
    found = [bench.step(y, size) for size in sizes]
    for size, other in zip(sizes, found, strict=True):
        if not np.array_equal(other, found[0]):
            raise AssertionError(f"bits changed in passes of {size} rows")
    return relative_error(found[0], bench.expected(y))


def check_company(bench: DeltaBench, passes: int, companies: tuple[tuple[int, ...], ...]) -> None:
    """Sequences that take so many rows a pass beside each other: rows and slots have the bits of a sequence alone, row by row."""
    for counts in companies:
        y = bench.rows(passes * max(counts))
        by_itself = {count: bench.beside(y[:passes * count], (1,))[0] for count in set(counts)}
        for deferred in (False, True) if sum(counts) <= 16 else (False,):
            for seq, (rows, slot) in enumerate(bench.beside(y, counts, deferred)):
                alone, alone_slot = by_itself[counts[seq]]
                if not np.array_equal(rows, alone):
                    raise AssertionError(f"sequence {seq} among {counts} rows has other bits than alone{', deferred' if deferred else ''}")
                if not np.array_equal(slot, alone_slot):
                    raise AssertionError(f"sequence {seq} among {counts} rows left another state than alone{', deferred' if deferred else ''}")


def check_fold(bench: DeltaBench, before: int, drafted: int) -> None:
    """What a commit leaves of `drafted` rows behind `before` others has the bits of rows that were decoded one by one."""
    y = bench.rows(before + drafted)
    for accepted in sorted({1, min(2, drafted), max(1, drafted // 2), drafted}):
        if not np.array_equal(bench.slot_after(y, drafted, accepted), bench.slot_after(y[:before + accepted], 0, 0)):
            raise AssertionError(f"{accepted} of {drafted} rows left another state")
