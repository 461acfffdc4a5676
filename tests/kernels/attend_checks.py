"""The attend stage of the CUDA backend alone, on any device: codes, results and bits against the NumPy backend.

A device's exported blocks and NumPy's have the same bytes, so NumPy reads the very cache that the kernels wrote.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from q27app.kernels import reference
from q27app.kernels.batch import BLOCK_POSITIONS, Batch
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.kv_formats import kv_format
from q27app.kernels.numpy_attention import attend_pass
from q27app.kernels.numpy_pass import begin_pass
from q27app.kernels.numpy_state import NumpyState
from q27app.model.config import ModelConfig
from q27app.weights.container import Tensor
from q27app.weights.dtypes import F32
from tests.kernels.made import begin_alone, make_batch, relative_error


COLS, LARGEST_VALUE = 64, 8.0


class AttendBench:
    """One geometry and format on a device: a state, norms, and layers that share them. is_ready: what is attended is left as the next
    stage reads it, as the project's rows for values would be of alike sizes, all below LARGEST_VALUE."""

    def __init__(self, device, config: ModelConfig, name: str, blocks: int, layers: int = 1, max_rows: int = 256, is_ready: bool = True) -> None:
        random = np.random.default_rng(2)
        self.config, self.name, self.layers = config, name, layers
        self.backend = CudaBackend(device)
        self.norms = [(1 + 0.2 * random.standard_normal(config.head_dim)).astype(np.float32) for _ in range(2)]
        held = [self.backend.load([Tensor("norm", F32, (config.head_dim,), norm.view(np.uint8).reshape(1, -1))]) for norm in self.norms]
        self.width = 2 * config.attention_width + 2 * config.num_kv_heads * config.head_dim
        rows, one = np.full((self.width, COLS), LARGEST_VALUE / COLS, np.float32), np.ones(COLS, np.float32)
        rows[-1] *= 1.0 if is_ready else 1e4
        made = {"project": self.backend.load([Tensor("project", F32, rows.shape, rows.view(np.uint8))]),
                "norm": self.backend.load([Tensor("norm", F32, (COLS,), one.view(np.uint8).reshape(1, -1))])}
        self.y = self.backend.empty((max_rows, self.width), "float32", "y")
        self.out = self.backend.empty((max_rows, config.attention_width), "float32", "out")
        self.state = self.backend.allocate_state(config, 1, layers, name, 1, blocks, 16)
        self.layer = [SimpleNamespace(q_norm=held[0], k_norm=held[1], kv_index=index, first_position=0, **made) for index in range(layers)]
        self.table = list(range(blocks))

    def put(self, rows: np.ndarray) -> None:
        self.backend.device.upload(self.y.address, rows)

    def batch(self, phase: str, position: int, rows: int):
        return make_batch(phase, [[0] * rows], [position], [0], [self.table])

    def store(self, k: np.ndarray, v: np.ndarray, position: int, layer: int = 0) -> None:
        """Keys and values [rows, G D] as they are at consecutive positions."""
        step = self.y.shape[0]
        for start in range(0, len(k), step):
            part = slice(start, min(start + step, len(k)))
            rows = np.zeros((part.stop - part.start, self.width), np.float32)
            rows[:, 2 * self.config.attention_width:] = np.concatenate([k[part], v[part]], axis=1)
            self.put(rows)
            begin_alone(self.backend, self.batch("prefill", position + start, len(rows)), self.state)
            self.backend._attention.store(self.y.rows(len(rows)), self.layer[layer])

    def run(self, phase: str, y: np.ndarray, position: int, layer: int = 0) -> np.ndarray:
        """What was attended by rows y [rows, width] at position and after it."""
        return self.run_batch(self.batch(phase, position, len(y)), y, layer)

    def run_batch(self, batch: Batch, y: np.ndarray, layer: int = 0) -> np.ndarray:
        """The same by the rows of any batch."""
        self.put(y)
        begin_alone(self.backend, batch, self.state)
        out = self.out.rows(len(y))
        self.backend.attend(self.y.rows(len(y)), self.layer[layer], out)
        return self.backend.download(out)

    def expected(self, phase: str, y: np.ndarray, position: int) -> np.ndarray:
        """NumPy's result over the device's own blocks of layer 0."""
        config, blocks = self.config, -(-(position + len(y)) // BLOCK_POSITIONS)
        state = NumpyState(config, 1, self.layers, self.name, 1, blocks, 16)
        state.import_blocks(range(blocks), self.state.export_blocks(range(blocks)))
        work = begin_pass(make_batch(phase, [[0] * len(y)], [position], [0], [list(range(blocks))]), state)
        cos, sin = work.rope()
        q, gate, _, _ = reference.attention_inputs(y, *self.norms, cos, sin, config)
        attended = np.empty(q.shape, np.float32)
        attend_pass(work, q, 0, 0, attended)
        return reference.apply_gate(attended, gate).reshape(len(y), -1)


def check_codes(bench: AttendBench, rows: int, seed: int) -> int:
    """Keys and values of every kind of row, coded on the device and by NumPy: the same bytes. Returns the heads compared."""
    random, config, form = np.random.default_rng(seed), bench.config, kv_format(bench.name)
    width = config.num_kv_heads * config.head_dim
    k, v = (random.standard_normal((rows, width)) * np.exp(2 * random.standard_normal((rows, 1))) for _ in range(2))
    v[::3] = random.standard_t(2, v[::3].shape)
    k, v = k.astype(np.float32), v.astype(np.float32)
    heads = v.reshape(rows * config.num_kv_heads, config.head_dim)
    heads[0], heads[1], heads[2, :128], heads[3, 5], heads[4, 200] = 0, -0.0, 1e-12, np.inf, np.nan
    heads[5], heads[6], heads[7] = 1e30, 1e-9, np.eye(config.head_dim, dtype=np.float32)[3]
    heads[8, :2], heads[8, 2:] = 1, 0
    k[:2] = v[:2]
    bench.store(k, v, 0)
    blocks = -(-rows // BLOCK_POSITIONS)
    found = NumpyState(config, 1, bench.layers, bench.name, 1, blocks, 16)
    found.import_blocks(range(blocks), bench.state.export_blocks(range(blocks)))
    for name, array, values, codec in (("keys", found.keys[0], k, form.key), ("values", found.values[0], v, form.value)):
        expected = codec.encode(values.reshape(rows, config.num_kv_heads, config.head_dim)).transpose(1, 0, 2)
        same = array[:, :rows].view(np.uint8) == np.ascontiguousarray(expected).view(np.uint8)
        if codec.storage == np.float16:   # a NaN may have any payload
            same |= np.isnan(expected).repeat(2, axis=-1)
        if bench.name == "fp8":
            same |= (array[:, :rows] & 0x7F == 0x7F) & (expected & 0x7F == 0x7F)
        if not same.all():
            head, row, byte = (int(index) for index in np.argwhere(~same)[0])
            raise AssertionError(f"{bench.name} {name}: {int((~same).any(-1).sum())} heads differ, first head {head} of row {row}, byte {byte}")
    return 2 * rows * config.num_kv_heads


def fill(bench: AttendBench, positions: int, seed: int = 5) -> None:
    """Natural keys and values below `positions`, by the codec's writer: up to 1,024 different ones, then copies of their
    blocks."""
    random, width = np.random.default_rng(seed), bench.config.num_kv_heads * bench.config.head_dim
    different = min(positions, 1024)
    for layer in range(bench.layers):
        bench.store(*random.standard_normal((2, different, width)).astype(np.float32), 0, layer)
    for block in range(different // BLOCK_POSITIONS, -(-positions // BLOCK_POSITIONS)):
        bench.state.copy_block(block % (different // BLOCK_POSITIONS), block)


def check_attend(bench: AttendBench, position: int, counts: tuple[int, ...], phase: str = "decode", compared: int | None = None) -> float:
    """Rows after `position` stored ones, in groups of every size: near NumPy (the last `compared` of them, else all), and each row's bits the
    same in all groups."""
    random = np.random.default_rng(position)
    y = random.standard_normal((max(counts), bench.width)).astype(np.float32)
    y[:, :2 * bench.config.attention_width] *= 2
    bits, worst = None, 0.0
    for count in counts:
        found = np.concatenate([bench.run(phase, y[start:start + count], position + start) for start in range(0, len(y), count)])
        if bits is None:
            bits = found
            first = len(y) - (compared or len(y))
            worst = relative_error(found[first:], bench.expected(phase, y[first:], position + first))
        if not np.array_equal(found, bits):
            raise AssertionError(f"{bench.name} at {position}: bits changed in groups of {count} rows")
    return worst
