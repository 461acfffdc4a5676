"""KV formats over long contexts on a card: `python -m tests.gpu.long_context [dense] [depths] [window=LENGTH]`.

dense: four layers of the 27B's full width, logits by format against NumPy, near position 0 and at 32,000. depths: the whole 27B
from random codes, decode at depth and prefill, by format; the cache is filled through the codec's writer. window: the
constructed 27B through the engine, with what $Q27APP_FORCE_ARCH and $Q27APP_MEMORY_CAP leave of the card: planned window, a long
prompt, the chain with drafts, a resumed turn, memory.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import numpy as np

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.numpy_backend import NumpyBackend
from q27app.model.budget import block_bytes
from q27app.model.weights import AttentionLayer, expected_shapes
from tests.gpu import big, whole
from tests.gpu.checks import attempt, failures, line, open_device
from tests.kernels.cuda_checks import bound_model
from tests.kernels.made import Lines, make_batch, relative_error
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
        backend.begin(make_batch("prefill", [[0] * different], [0], [0], [table]), state)
        backend._attention.store(y, layer)
    for block in range(different // 64, -(-positions // 64)):
        state.copy_block(table[block % (different // 64)], table[block])


def attention_layers(model) -> list:
    layers = [layer for layer in model.weights.layers if isinstance(layer, AttentionLayer)]
    return layers + ([model.weights.mtp.layer] if model.weights.mtp else [])


def dense(device) -> None:
    config = replace(config_27b(), num_layers=4, layer_kinds=config_27b().layer_kinds[:4], vocab_size=8192, num_mtp_layers=0)
    random = np.random.default_rng(1)
    tensors = {name: big.random_tensor(random, name, shape) for name, shape in expected_shapes(config).items()}
    start = time.perf_counter()
    exact = bound_model(NumpyBackend(), config, tensors, 256)
    line("dense NumPy model", f"{time.perf_counter() - start:.1f} s")
    for name in FORMATS:
        def check(name=name):
            lines = [Lines(exact, 1, 512, name, 16), Lines(bound_model(CudaBackend(device), config, tensors, 1024), 1, 512, name, 16)]
            tokens = [int(token) for token in random.integers(0, 8192, 96)]
            found = {}

            def step(what, tokens, phase="decode", logit_rows=None):
                expected, got = (each.feed(0, tokens, phase, logit_rows) for each in lines)
                found[what] = relative_error(got, expected)

            def share_cache():
                table = lines[1].tables[0]
                lines[0].state.import_blocks(lines[0].tables[0], lines[1].state.export_blocks(table))

            step("prefill, own codes", tokens[:64], "prefill", list(range(56, 64)))
            share_cache()
            step("decode at 64, same codes", tokens[64:65])
            step("8 rows at 65", tokens[65:73])
            for each in lines:
                each.reserve(0, 32_100)
                each.lengths[0] = 32_000
            fill(lines[1].model.backend, lines[1].state, attention_layers(lines[1].model), 32_000, lines[1].tables[0])
            share_cache()
            step("1 row at 32,000", tokens[73:74])
            step("8 rows at 32,001", tokens[74:82])
            text = ", ".join(f"{what} {error:.1e}" for what, error in found.items())
            if max(error for what, error in found.items() if "own" not in what) > 5e-4:
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
    device = open_device() if not any(name.startswith("window") for name in names) else None
    for name in names or ["dense", "depths"]:
        attempt(name, lambda name=name: (window(int(name.partition("=")[2] or 120_000)) if name.startswith("window")
                                         else {"dense": dense, "depths": depths}[name](device)) or "done")
    line("failed", ", ".join(failures) or "nothing")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
