"""Long checks against NumPy and against itself: full width, all layers of the 27B, prompts resumed anywhere.

Parts of `checks.py`; see `whole.py` for what the environment says.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from q27app.kernels.cuda_backend import CudaBackend
from q27app.model.config import ModelConfig
from q27app.model.forward import load_model
from q27app.model.layers import Scratch, run_layer
from q27app.model.weights import _Binder
from q27app.weights.container import open_container
from q27app.weights.synthetic import synthesize
from tests.gpu.whole import CACHE, models
from tests.kernels.made import make_batch, relative_error

FULL_WIDTH = "5120x4,ffn=17408,vocab=4096,kv_heads=4,key_heads=16"
RESUMED_TOKENS, NUM_RESUMED = 30_000, 40


class Layers:
    """Layer after layer of a checkpoint on a backend, each loaded when it is needed: x [rows, hidden] after every one."""

    def __init__(self, backend, path, kv_format: str, max_rows: int) -> None:
        self.backend, self.container = backend, open_container(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.container.tensors.items()}
        self.config = ModelConfig.from_metadata(self.container.metadata, shapes)
        self.binder = _Binder(backend, self.config, self.container, None)
        self.embed = self.binder.load("token_embd.weight")
        self.scratch = Scratch.allocate(backend, self.config, max_rows)
        self.x = backend.empty((max_rows, self.config.hidden_size), "float32", "x")
        self.kv_format = kv_format

    def run(self, passes: list[tuple[str, list[int]]]) -> list[np.ndarray]:
        """[layers + 1, rows of all passes, hidden], embedding first. Passes of one sequence: (phase, tokens)."""
        backend, config = self.backend, self.config
        if backend.name == "numpy":
            state = self._state()
        layers = [self.binder.layer(index) for index in range(config.num_layers)] if backend.name == "cuda" else None
        if backend.name == "cuda":
            state = self._state()
        streams, batches, position = [], [], 0
        for phase, tokens in passes:
            batches.append(make_batch(phase, [tokens], [position], [0], [list(range(8))], []))
            position += len(tokens)
            backend.begin(batches[-1], state)
            x = self.x.rows(len(tokens))
            backend.embed(self.embed, x)
            streams.append(backend.download(x).copy())
        out = [np.concatenate(streams)]
        for index in range(config.num_layers):
            layer = layers[index] if layers else self.binder.layer(index)
            for number, batch in enumerate(batches):
                backend.begin(batch, state)
                x = backend.upload(streams[number])
                run_layer(backend, layer, x, self.scratch)
                streams[number] = backend.download(x).copy()
            if not layers:
                backend._loaded.clear()
            out.append(np.concatenate(streams))
        return out

    def _state(self):
        config = self.config
        return self.backend.allocate_state(config, config.num_delta_layers, config.num_kv_layers, self.kv_format, 2, 8, 16)


def worst_layer(found: list[np.ndarray], expected: list[np.ndarray]) -> str:
    """Error of what each layer adds to the stream, which is all that a layer computes."""
    errors = [relative_error(found[i + 1] - found[i], expected[i + 1] - expected[i]) for i in range(len(found) - 1)]
    total = relative_error(found[-1] - found[0], expected[-1] - expected[0])
    if not max(errors) < 5e-3 or not total < 3e-3:
        raise AssertionError(f"layers {[f'{e:.1e}' for e in errors]}, sum {total:.1e}")
    return f"worst layer {max(errors):.1e} (number {int(np.argmax(errors))}), sum of all {total:.1e}"


def dense_passes() -> list[tuple[str, list[int]]]:
    """64 rows of a prompt and 16 steps."""
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, 4096, 80)]
    return [("prefill", tokens[:64]), *(("decode", [token]) for token in tokens[64:])]


def dense_model(folder: str) -> Path:
    return synthesize(Path(folder) / "dense.q27", FULL_WIDTH, "dense", "q4s")


def dense_logits(backend, path: Path) -> np.ndarray:
    """Of the last row of every pass, [17, vocabulary]; closes the backend."""
    with open_container(path) as container:
        model = load_model(backend, container, 64)
    state = model.allocate_state("fp16", 2, 8, 16)
    position, out = 0, []
    for phase, part in dense_passes():
        batch = make_batch(phase, [part], [position], [0], [list(range(8))], [len(part) - 1])
        out.append(backend.download(model.forward(batch, state)).copy())
        position += len(part)
    backend.close()
    return np.concatenate(out)


def reference_of_dense(target: Path) -> None:
    """What NumPy says for `dense`, in 10 MB: made once, on any machine."""
    from q27app.kernels.numpy_backend import NumpyBackend

    with tempfile.TemporaryDirectory() as folder:
        path = dense_model(folder)
        streams = Layers(NumpyBackend(), path, "fp16", 64).run(dense_passes())
        save_streams(target, streams, logits=dense_logits(NumpyBackend(), path))


def save_streams(target: Path, streams: list[np.ndarray], **more: np.ndarray) -> None:
    """What each layer adds to the stream, rows of size 1 as float16 and their sizes."""
    added = np.stack([after - before for before, after in zip(streams, streams[1:])])
    sizes = np.sqrt((added**2).mean(-1, keepdims=True))
    np.savez_compressed(target, first=streams[0].astype(np.float32), added=(added / sizes).astype(np.float16), sizes=sizes, **more)


def kept_streams(file) -> list[np.ndarray]:
    """The streams of `save_streams`."""
    added = file["added"].astype(np.float64) * file["sizes"]
    return list(np.cumsum(np.concatenate([file["first"][None], added]), axis=0))


def dense(line, attempt) -> None:
    """Four dense layers at the 27B's width, 64 rows of prompt and 16 steps, after every layer; then logits. Against the file that GPU_DENSE
    names, which is made if it is absent (half an hour of processor time)."""
    reference = Path(os.environ.get("GPU_DENSE", Path(tempfile.gettempdir()) / "dense-reference.npz"))
    if not reference.exists():
        reference_of_dense(reference)
    with tempfile.TemporaryDirectory() as folder, np.load(reference) as expected:
        path = dense_model(folder)

        def layers() -> str:
            backend = CudaBackend.open(CACHE)
            try:
                found = Layers(backend, path, "fp16", 64).run(dense_passes())
                return worst_layer([x.astype(np.float64) for x in found], kept_streams(expected))
            finally:
                backend.close()

        def logits() -> str:
            found = dense_logits(CudaBackend.open(CACHE), path)
            error = relative_error(found, expected["logits"])
            if not error < 3e-3:
                raise AssertionError(f"logits {error:.1e}")
            return f"logits {error:.1e}, {(found.argmax(1) == expected['logits'].argmax(1)).sum()} of 17 argmaxes equal"

        attempt("dense, full width, layers", layers)
        attempt("dense, full width, logits", logits)


def reference_of_27b(path: Path, target: Path) -> None:
    """What NumPy says of 16 tokens through all layers of a checkpoint, in 10 MB: made once, on any machine, for `all_layers`."""
    from q27app.kernels.numpy_backend import NumpyBackend

    save_streams(target, Layers(NumpyBackend(), path, "fp16", 16).run([("prefill", list(range(1000, 1016)))]))


def all_layers(line, attempt) -> None:
    """All 64 layers of the 27B for 16 tokens, against the file that GPU_REFERENCE names."""
    def check() -> str:
        expected = kept_streams(np.load(os.environ["GPU_REFERENCE"]))
        backend = CudaBackend.open(CACHE)
        try:
            found = Layers(backend, models() / "q4s.q27", "fp16", 16).run([("prefill", list(range(1000, 1016)))])
        finally:
            backend.close()
        return worst_layer([x.astype(np.float64) for x in found], expected)

    attempt("27B q4s, 64 layers, 16 tokens", check)


def resume(line, attempt) -> None:
    """A long prompt cold, and resumed at multiples of 64 with tails of 1 to 63 rows: the same bits in the logits."""
    def check(size: str, kv_format: str) -> str:
        random = np.random.default_rng(11)
        tokens = [int(token) for token in random.integers(0, 2560, RESUMED_TOKENS)]
        places = sorted(int(place) * 64 for place in random.choice(np.arange(1, RESUMED_TOKENS // 64 - 1), NUM_RESUMED, replace=False))
        ends = {place: place + 1 + 62 * index // (NUM_RESUMED - 1) for index, place in enumerate(places)}
        with tempfile.TemporaryDirectory() as folder:
            container = open_container(synthesize(Path(folder) / "dense.q27", size, "dense", "q4s"))
            backend = CudaBackend.open(CACHE)
            try:
                model = load_model(backend, container, 1024)
                table = [list(range(-(-RESUMED_TOKENS // 64)))]
                state = model.allocate_state(kv_format, 2, len(table[0]), 16)

                def feed(slot: int, start: int, end: int, wanted: list[int]) -> np.ndarray:
                    batch = make_batch("prefill", [tokens[start:end]], [start], [slot], table, [row - start for row in wanted])
                    return backend.download(model.forward(batch, state)).copy()

                cold: dict[int, np.ndarray] = {}
                for start in range(0, RESUMED_TOKENS, 1024):
                    end = min(start + 1024, RESUMED_TOKENS)
                    rows = [row - 1 for row in ends.values() if start < row <= end]
                    cold.update(zip(rows, feed(0, start, end, rows)))
                state.clear_slot(0)
                at = 0
                for place, end in ends.items():
                    while at < place:
                        step = min(at + 1024, place)
                        feed(0, at, step, [])
                        at = step
                    state.import_slot(1, state.export_slot(0))
                    if not np.array_equal(feed(1, place, end, [end - 1])[0], cold[end - 1]):
                        raise AssertionError(f"other bits: resumed at {place}, tail of {end - place} rows")
                return f"{NUM_RESUMED} places of {RESUMED_TOKENS} tokens, tails 1 to 63: equal bits"
            finally:
                backend.close()

    for size, kv_format in (("nano", "fp16"), ("nano", "fp8"), (FULL_WIDTH, "fp8")):
        attempt(f"resumed prefill, {size.partition(',')[0]}, {kv_format}", lambda size=size, kv_format=kv_format: check(size, kv_format))


PARTS = {"dense": dense, "layers": all_layers, "resume": resume}
