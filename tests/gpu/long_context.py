"""KV formats over long contexts on a card: `python -m tests.gpu.long_context [dense] [depths] [window=LENGTH] | make_dense FILE`.

dense: four layers of the 27B's full width, logits by format against NumPy, near position 0 and at 32,000. depths: the whole 27B
from random codes, decode at depth and prefill, by format; the cache is filled through the codec's writer. window: the
constructed 27B through the engine, with what $Q27APP_FORCE_ARCH and $Q27APP_MEMORY_CAP leave of the card: planned window, a long
prompt, the chain with drafts, a resumed turn, memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from dataclasses import replace

import numpy as np

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.numpy_backend import NumpyBackend
from q27app.kernels.numpy_state import NumpyState
from q27app.model.budget import block_bytes
from q27app.model.config import ModelConfig
from q27app.model.weights import AttentionLayer, expected_shapes
from q27app.weights.container import Tensor
from tests.gpu import big, whole
from tests.gpu.checks import attempt, finish, line, open_device
from tests.kernels.cuda_checks import bound_model
from tests.kernels.made import Lines, begin_alone, make_batch, relative_error
from tests.model.geometry import config_27b

FORMATS = ("fp16", "fp8", "turbo5k", "turbo3")
DEPTHS = (10, 32_000, 131_072, 240_000)


def natural_rows(config, rows: int, seed: int) -> np.ndarray:
    """Projected rows whose keys are normed as the network's and whose values are of natural size."""
    random = np.random.default_rng(seed)
    width = 2 * config.attention_width + 2 * config.num_kv_heads * config.head_dim
    out = np.zeros((rows, width), np.float32)
    out[:, 2 * config.attention_width:] = random.standard_normal((rows, 2 * config.num_kv_heads * config.head_dim))
    return out


def fill(backend: CudaBackend, state, layers, positions: int, table: list[int], different: int = 1024) -> None:
    """Every layer's keys and values below `positions`, by the codec's writer: `different` of them, then copies of their blocks."""
    config = state.geometry
    y = backend.upload(natural_rows(config, different, 7))
    for index, layer in enumerate(layers):
        backend.device.upload(y.address, natural_rows(config, different, index))
        begin_alone(backend, make_batch("prefill", [[0] * different], [0], [0], [table]), state)
        backend._attention.store(y, layer)
    for block in range(different // 64, -(-positions // 64)):
        state.copy_block(table[block % (different // 64)], table[block])


def attention_layers(model) -> list:
    layers = [layer for layer in model.weights.layers if isinstance(layer, AttentionLayer)]
    return layers + ([model.weights.mtp.layer] if model.weights.mtp else [])


def dense_tensors() -> tuple[ModelConfig, dict[str, Tensor]]:
    config = replace(config_27b(), num_layers=4, layer_kinds=config_27b().layer_kinds[:4], vocab_size=2048, num_mtp_layers=0)
    random = np.random.default_rng(1)
    return config, {name: big.random_tensor(random, name, shape) for name, shape in expected_shapes(config).items()}


def dense_life(lines: Lines, name: str, codes: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Logits near position 0 and at 32,000, over keys and values that the NumPy codec coded, the prompt's too: `codes`, or its own."""
    tokens = [int(token) for token in np.random.default_rng(5).integers(0, 2048, 96)]
    found = {"prompt": lines.feed(0, tokens[:64], "prefill", list(range(56, 64))).copy()}
    table, state = lines.tables[0], lines.state
    found["codes"] = state.export_blocks(table)
    state.import_blocks(table, found["codes"] if codes is None else codes)
    found["1 row at 64"] = lines.feed(0, tokens[64:65], "decode").copy()
    found["8 rows at 65"] = lines.feed(0, tokens[65:73], "decode").copy()
    lines.reserve(0, 32_100)
    lines.lengths[0] = 32_001   # as many beyond a multiple of 4 as before: where the convolution's rows lie goes by position
    config, coded = lines.model.config, NumpyState(lines.model.config, 0, 1, name, 1, 16, 16)
    rows = natural_rows(config, 1024, 0)[:, 2 * config.attention_width:].reshape(1024, 2, config.num_kv_heads, config.head_dim)
    coded.write_rows(0, np.arange(1024), rows[:, 0], rows[:, 1])
    state.import_blocks(table[:16], coded.export_blocks(range(16)))
    for block in range(16, 501):
        state.copy_block(table[block % 16], table[block])
    found["1 row at 32,001"] = lines.feed(0, tokens[73:74], "decode").copy()
    found["8 rows at 32,002"] = lines.feed(0, tokens[74:82], "decode").copy()
    return found


def expected_dense(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What NumPy says, by "format|what", and a checksum of the weights."""
    config, tensors = dense_tensors()
    exact, found = bound_model(NumpyBackend(), config, tensors, 256), {"weights": weights_checksum(tensors)}
    for name in names:
        found |= {f"{name}|{what}": part for what, part in dense_life(Lines(exact, 1, 512, name, 16), name).items()}
    return found


def weights_checksum(tensors: dict[str, Tensor]) -> np.ndarray:
    return np.array([zlib.crc32(np.ascontiguousarray(tensor.data)) for tensor in tensors.values()], np.uint32)


def dense(device) -> None:
    """Against the file that GPU_DENSE names (made by `make_dense FILE`), else against NumPy on this machine."""
    config, tensors = dense_tensors()
    start = time.perf_counter()
    expected = dict(np.load(os.environ["GPU_DENSE"])) if "GPU_DENSE" in os.environ else expected_dense(FORMATS)
    line("dense, expected", f"{time.perf_counter() - start:.1f} s")
    assert np.array_equal(expected["weights"], weights_checksum(tensors)), "this machine makes other weights; the file is of no use here"
    for name in FORMATS:
        def check(name=name):
            lines = Lines(bound_model(CudaBackend(device), config, tensors, 1024), 1, 512, name, 16)
            life = dense_life(lines, name, expected[f"{name}|codes"])
            errors = {what: relative_error(part, expected[f"{name}|{what}"]) for what, part in life.items() if what != "codes"}
            text = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
            if max(error for what, error in errors.items() if what != "prompt") > 5e-4:   # the prompt read its own codes
                raise AssertionError(text)
            return text
        attempt(f"dense {name}", check)


def depths(device) -> None:
    start = time.perf_counter()
    model = big.build(device, 2048)
    backend, blocks = model.backend, 240_064 // 64 + 8
    line("27B built", f"{time.perf_counter() - start:.1f} s")
    table = list(range(blocks))
    decoded: dict[str, list[float]] = {}
    for name in FORMATS:
        state = model.allocate_state(name, 1, blocks, 16)
        fill(backend, state, attention_layers(model), 240_064, table)
        token_bytes = block_bytes(model.config, name) // 64 * 16 // 17
        for rows in (1, 8):
            texts = []
            for depth in DEPTHS:
                batch = make_batch("verify" if rows > 1 else "decode", [[5] * rows], [depth], [0], [table], None, rows > 1)
                run = lambda batch=batch: model.forward(batch, state, warm_mtp=False)  # noqa: E731
                run()
                each = big.timed(backend, run, 12)
                decoded.setdefault(f"{rows} {name}", []).append(each)
                total = model.weights.nbytes - model.weights.embed.nbytes + depth * token_bytes
                texts.append(f"{depth}: {each:.2f} ({total / each / 1e9:.2f} TB/s)")
            line(f"  {name}, {rows} rows: ms", "  ".join(texts))
        for base, chunks in ((0, 4), (129_024, 1)):
            def prefill():
                for chunk in range(chunks):
                    batch = make_batch("prefill", [[5] * 2048], [base + 2048 * chunk], [0], [table], [2047])
                    model.forward(batch, state, warm_mtp=False)
            prefill()
            backend.device.synchronize()
            start = time.perf_counter()
            prefill()
            backend.device.synchronize()
            took = time.perf_counter() - start
            line(f"  {name}, prefill of {2048 * chunks} from {base}", f"{took * 1000:.0f} ms, {2048 * chunks / took:.0f} tok/s")
        state.release()
    for rows in (1, 8):
        ratios = [small / plain for small, plain in zip(decoded[f"{rows} turbo5k"], decoded[f"{rows} fp8"])]
        line(f"turbo5k / fp8, {rows} rows", " ".join(f"{ratio:.3f}" for ratio in ratios) + (" TOO SLOW" if max(ratios) > 1.2 else ""))


class Peak:
    """Watches what is free of the card's memory beside the withheld part, several times a second."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime, self._least, self._stop = runtime, 1 << 62, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            code, free, _ = self._runtime.cudaMemGetInfo()
            if int(code) == 0:
                self._least = min(self._least, free)

    def end(self) -> int:
        """The fewest bytes that were free."""
        self._stop.set()
        self._thread.join()
        return self._least


def window_of(length: int, expected: int, **options) -> str:
    """The engine in the played card's memory: its plan, a prompt of `length`, 256 tokens of the chain, a second turn."""
    engine, seconds = whole.open_engine(whole.models() / "q4s.q27", draft="auto", **options)
    try:
        plan = engine.status().plan
        peak = Peak()
        text = (f"{plan['kv_format']}, {plan['num_slots']} x {plan['max_context']} tokens, ready {seconds:.1f} s, used {plan['used'] / 1e9:.2f} of "
                f"{plan['free'] / 1e9:.2f} GB free; card {whole.used_mib()} MiB")
        if plan["max_context"] < expected:
            raise AssertionError(f"{text}; expected a window of {expected}")
        prompt = [1000 + place % 1000 for place in range(length)]
        tokens, event = whole.answer(engine, prompt, 256)
        wanted = [prompt[-1] + 1 + place for place in range(256)]
        stats = event.stats
        text += (f"; prefill of {length} {stats.prefill_ms / 1000:.1f} s ({length / stats.prefill_ms * 1000:.0f} tok/s), 256 tokens in {stats.num_steps} "
                 f"steps, {255000 / max(stats.decode_ms, 1e-9):.0f} tok/s; card {whole.used_mib()} MiB")
        if tokens != wanted:
            raise AssertionError(f"{text}; tokens {tokens[:8]}, expected {wanted[:8]}")
        again, second = whole.answer(engine, prompt + tokens + [1500, 1501], 16, "second")
        text += (f"; second turn {second.stats.num_cached} of {length + 258} reused in {second.stats.prefill_ms:.0f} ms, card {whole.used_mib()} MiB, "
                 f"least free of what the cap leaves {peak.end() / 1e9:.2f} GB")
        if again != [1502 + place for place in range(16)] or second.stats.num_cached < length * 9 // 10:
            raise AssertionError(text)
        return text
    finally:
        engine.close()


def window(length: int) -> None:
    from q27app.config import played_card

    arch, cap = played_card()
    line("plays", f"{arch}, {(cap or 0) / 2**30:.1f} GiB")
    if arch:
        attempt("auto format", lambda: window_of(length, 262_144, slots=1))
        if length < 100_000:
            attempt("turbo3, two slots", lambda: window_of(4_000, 196_608, kv_format="turbo3", slots=2))
    else:
        for place in ("device", "host") if length < 100_000 else ("device",):
            attempt(f"fp8, embedding on {place}", lambda place=place: window_of(length, 262_144, kv_format="fp8", slots=1, embed=place))


def main(names: list[str]) -> int:
    if names[:1] == ["make_dense"]:
        np.savez_compressed(names[1], **expected_dense(FORMATS))
        return 0
    device = open_device() if not any(name.startswith("window") for name in names) else None
    for name in names or ["dense", "depths"]:
        attempt(name, lambda name=name: (window(int(name.partition("=")[2] or 120_000)) if name.startswith("window")
                                         else {"dense": dense, "depths": depths}[name](device)) or "done")
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
