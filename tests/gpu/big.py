"""The 27B's speed on a card: q4s matrices of random codes, one layer of each kind loaded and copied to 64 places."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from q27app.kernels.batch import SamplingRows
from q27app.bench.kernels import stages
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_weights import CudaWeight
from q27app.kernels.peaks import measure_peaks
from q27app.model.forward import Model
from q27app.model.weights import AttentionLayer, DeltaLayer, ModelWeights, bind_weights, expected_shapes
from q27app.weights.container import Tensor
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, row_bytes, scales_per_row
from tests.kernels.made import MadeContainer, make_batch
from tests.model.geometry import config_27b


def random_tensor(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensor:
    """Natural scale, number type as in q4s."""
    rows, cols = shape if len(shape) == 2 else (1, shape[0])
    if len(shape) == 1 or "conv1d" in name:
        values = 1 + 0.1 * random.standard_normal(shape)
        if "ssm_a" in name:
            values = -np.abs(values)
        return Tensor(name, F32, shape, values.astype(np.float32).view(np.uint8).reshape(rows, -1))
    if "ssm_alpha" in name or "ssm_beta" in name:
        values = random.standard_normal(shape, np.float32) / np.float32(np.sqrt(cols))
        return Tensor(name, F16, shape, values.astype(np.float16).view(np.uint8))
    wide = any(part in name for part in ("token_embd", "attn_k", "attn_v", "blk.64", "nextn"))
    dtype, spread = (Q8_G128, 73.0) if wide else (Q4_G64, 4.6)
    size = rows * row_bytes(dtype, cols)
    pool = np.frombuffer(random.bytes(min(size, 1 << 24)), np.uint8)
    data = np.resize(pool, size).reshape(rows, -1)
    scales = np.full((rows, scales_per_row(dtype, cols)), 1 / (spread * np.sqrt(cols)), np.float16)
    return Tensor(name, dtype, shape, data, scales)


def clone(backend: CudaBackend, value):
    """The same weights at another place in memory."""
    if isinstance(value, CudaWeight):
        address = backend.weights_arena.take(value.nbytes + 4096)
        backend.device.copy(address, value.address, value.nbytes)
        return replace(value, address=address)
    if hasattr(value, "__dataclass_fields__") and hasattr(value, "norm"):
        return replace(value, **{name: clone(backend, getattr(value, name)) for name in value.__dataclass_fields__})
    return value


def build(device, max_rows: int) -> Model:
    full = config_27b()
    small = replace(full, num_layers=4, layer_kinds=full.layer_kinds[:4])
    random = np.random.default_rng(1)
    backend = CudaBackend(device)
    tensors = {name: random_tensor(random, name, shape) for name, shape in expected_shapes(small).items()}
    weights = bind_weights(backend, small, MadeContainer(tensors), None)
    delta = next(layer for layer in weights.layers if isinstance(layer, DeltaLayer))
    attention = next(layer for layer in weights.layers if isinstance(layer, AttentionLayer))
    layers, counts = list(weights.layers), {"delta": 3, "attention": 1}
    for kind in full.layer_kinds[4:]:
        index = counts[kind]
        counts[kind] += 1
        layers.append(replace(clone(backend, delta), delta_index=index) if kind == "delta"
                      else replace(clone(backend, attention), kv_index=index))
    mtp = replace(weights.mtp, layer=replace(weights.mtp.layer, kv_index=16)) if weights.mtp else None
    bound = ModelWeights(weights.embed, tuple(layers), weights.final_norm, weights.head, weights.draft_head, mtp)
    return Model(backend, full, bound, max_rows, 64)


def timed(backend: CudaBackend, run, times: int = 20) -> float:
    """Median milliseconds of `run` in groups of 4, the device's work included."""
    run()
    backend.device.synchronize()
    taken = []
    for _ in range(max(1, times // 4)):
        start = time.perf_counter()
        for _ in range(4):
            run()
        backend.device.synchronize()
        taken.append((time.perf_counter() - start) / 4)
    return 1000 * float(np.median(taken))


def stage_times(model: Model, state, rows: int, line, phase: str = "verify") -> None:
    """Each stage of `bench kernels` over the layers that have it, from a graph; the pass must have begun."""
    backend, total = model.backend, 0.0
    for stage in stages(model, state.form.name, rows, 10, phase):
        replay = backend.record(lambda stage=stage: [stage.run(layer) for layer in stage.layers])
        each = timed(backend, replay, 12) * 1000 / len(stage.layers)
        total += each * (1 if stage.name == "head" else len(stage.layers))
        line(f"  {stage.name}, {rows} rows", f"{each:7.2f} us x {len(stage.layers)}   {stage.num_bytes / 1e6:6.1f} MB   "
             f"{stage.num_bytes / each / 1e6:5.2f} TB/s")
    line(f"  all stages, {rows} rows", f"{total / 1000:.3f} ms")


PASSES = ((1, 10), (2, 10), (8, 10), (16, 10), (1, 32000), (8, 32000))
"""Rows and position of the decode passes that are timed."""


def decode_speed(device, line, kv_format: str, passes) -> str:
    """Decode alone, then its stages at 1 row: short enough to compare two builds in one call."""
    line("reads its memory at", f"{measure_peaks(device).gb_per_s:.0f} GB/s")
    model = build(device, 64)
    backend = model.backend
    state = model.allocate_state(kv_format, 2, 64 if kv_format == "fp16" else 640, 16)
    table = [list(range(state.num_blocks))]
    for rows, position in passes:
        batch = make_batch("verify" if rows > 1 else "decode", [[5] * rows], [position], [0], table, None, rows > 1)
        run = lambda batch=batch: model.forward(batch, state, warm_mtp=False)  # noqa: E731
        run()
        replay = backend.record(run)
        line(f"  decode {rows} rows at {position}", f"{timed(backend, replay):.3f} ms")
    for rows in (1, 8):
        batch = make_batch("verify", [[5] * rows], [10], [0], table, None, True)
        model.forward(batch, state, warm_mtp=False)
        stage_times(model, state, rows, line)
    return "done"


def speed(device, attempt, line) -> None:
    """Decode of 1, 8, 16 rows near 0 and at 32K, stage by stage; prefill of 2,048 and 8,192."""
    start = time.perf_counter()
    model = plain(build(device, 8192))
    backend = model.backend
    state = model.allocate_state("fp8", 2, 640, 16)
    line("27B built", f"{model.weights.nbytes / 1e9:.2f} GB packed, {time.perf_counter() - start:.1f} s, free {device.free_bytes() / 1e9:.1f} GB")
    table = [list(range(640))]

    def decode(rows: int, position: int, deferred: bool = False):
        batch = make_batch("verify" if deferred else "decode", [[5] * rows], [position], [0], table, None, deferred)
        return lambda: model.forward(batch, state, warm_mtp=False)

    for rows, position in ((1, 10), (2, 10), (4, 10), (8, 10), (9, 10), (16, 10), (1, 32000), (8, 32000)):
        def check(rows=rows, position=position):
            run = decode(rows, position, rows > 1)
            run()
            eager = timed(backend, run, 4)
            replay = backend.record(run)
            each = timed(backend, replay)
            logits = backend.download(model.logit_rows.rows(rows))
            assert np.isfinite(logits).all(), "logits are not finite"
            return f"{each:.3f} ms ({1000 / each:.1f} passes/s), {replay.num_nodes} nodes, eager {eager:.1f} ms"
        attempt(f"decode {rows} rows at {position}", check)
    def independent() -> str:
        launch = device.launch
        device.launch = lambda *args: launch(*args[:-1], False)
        try:
            replay = backend.record(decode(1, 10))
        finally:
            del device.launch
        return f"{timed(backend, replay):.3f} ms"

    attempt("decode 1 row, no dependent launch", independent)
    for rows in (1, 8):
        decode(rows, 10, rows > 1)()
        attempt(f"stages {rows} rows", lambda rows=rows: stage_times(model, state, rows, line) or "done")
    for rows in (64, 2048, 8192):
        def prefill(rows=rows):
            batch = make_batch("prefill", [[5] * rows], [0], [0], table, [rows - 1])
            each = timed(backend, lambda: model.forward(batch, state, warm_mtp=False), 4)
            assert np.isfinite(backend.download(model.logit_rows.rows(1))).all()
            return f"{each:.1f} ms, {1000 * rows / each:.0f} tok/s"
        attempt(f"prefill {rows}", prefill)


def plain(model):
    """The model, whose passes are recorded by hand alone: by itself it would replay what is to be run plainly, and within a recording cannot."""
    model.replays.limit = 0
    return model


def repeats(device, attempt, line) -> None:
    """Passes of all kinds over and over at the 27B's width and depth, eager and recorded: the same bits in all of the logits and rows."""
    model = plain(build(device, 1024))
    backend = model.backend
    state = model.allocate_state("fp8", 2, 80, 16)
    table = [list(range(80))]
    random = np.random.default_rng(2)
    for start in range(0, 4096, 1024):
        model.forward(make_batch("prefill", [random.integers(0, 1000, 1024)], [start], [0], table, []), state)
    state.copy_slot(0, 1)

    def check(phase: str, rows: int, times: int) -> str:
        batch = make_batch(phase, [random.integers(0, 1000, rows)], [4096], [0], table, [rows - 1] if phase == "prefill" else None, phase == "verify")
        run = lambda: model.forward(batch, state, warm_mtp=False)  # noqa: E731
        if phase != "prefill":
            run()                                        # what a recording finds loaded and known
        kinds = [run] if phase == "prefill" else [run, backend.record(run)]
        first = None
        for number in range(times):
            state.copy_slot(1, 0)
            kinds[number % len(kinds)]()
            found = [backend.download(part) for part in (model.logit_rows.rows(len(batch.logit_rows)), model.x.rows(rows))]
            first = first or [part.copy() for part in found]
            if not all(np.array_equal(a, b) for a, b in zip(first, found)):
                raise AssertionError(f"other bits in pass {number}")
        assert np.isfinite(first[0]).all() and first[0].std() > 0
        return f"{times} times the same bits"

    for phase, rows, times in (("decode", 1, 200), ("verify", 1, 200), ("verify", 8, 200), ("verify", 16, 200), ("prefill", 1, 200),
                               ("prefill", 17, 200), ("prefill", 64, 200), ("prefill", 500, 40)):
        attempt(f"27B {phase} of {rows} rows at 4,096", lambda phase=phase, rows=rows, times=times: check(phase, rows, times))


def once(device, attempt, line) -> None:
    """Two eager decode passes, for a profiler."""
    model = build(device, 64)
    state = model.allocate_state("fp8", 2, 64, 16)
    for rows in (1, 8):
        batch = make_batch("verify", [[5] * rows], [10], [0], [list(range(64))], None, True)
        model.forward(batch, state, warm_mtp=False)
    device.synchronize()
    line("two passes", "done")


def touch_everything(device, config, kv_format: str, counts: tuple[int, ...]) -> str:
    """Prefill, decode, verify, commit, drafts and every way of sampling, at these row counts, on random codes; GPU_PHASES: some passes alone."""
    random = np.random.default_rng(1)
    backend = CudaBackend(device)
    tensors = {name: random_tensor(random, name, shape) for name, shape in expected_shapes(config).items()}
    model = plain(Model(backend, config, bind_weights(backend, config, MadeContainer(tensors), None), 128, 64))
    state = model.allocate_state(kv_format, 2, 8, 32)
    for rows in counts:
        for phase in os.environ.get("GPU_PHASES", "prefill decode verify").split():
            lengths = [rows] if rows <= 16 or phase == "prefill" else [16, rows - 16]
            batch = make_batch(phase, [[5] * n for n in lengths], [70, 0][:len(lengths)], [0, 1][:len(lengths)], [[0, 1], [2, 3]][:len(lengths)],
                               None, phase == "verify")
            logits = model.forward(batch, state)
            backend.sample(logits, sampling(rows, config.vocab_size))
            if phase == "verify":
                backend.accept()
                backend.commit()
            backend.result()
        assert np.isfinite(backend.download(logits)).all(), f"{rows} rows: not finite"
    for step in (0, 1):
        batch = make_batch("draft", [[7]], [100 + step], [0], [[0, 1]])
        assert np.isfinite(backend.download(model.draft(batch, state, step == 0))).all()
    state.lacking.steady = 0
    for step in range(6):   # two sequences, whose states come to lack rows and are written with them
        model.forward(make_batch("decode", [[5]] * 2, [100 + step] * 2, [0, 1], [[0, 1], [2, 3]]), state)
    assert np.isfinite(state.export_slot(0).view(np.float32)).all(), "a settled state: not finite"
    for arena in (backend.weights_arena, backend.buffers_arena, backend.scratch_arena):
        arena.release()
    return "done"


def sampling(rows: int, vocab: int) -> SamplingRows:
    """Rows that are drawn in every way: greedy, tempered, cut, penalised, masked, with log probabilities."""
    odd = np.arange(rows) % 2
    masks = np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    masks[:, 0] = 0xFFFFFFF0
    counts = np.full(rows, 2, np.int32)
    return SamplingRows(
        temperature=odd.astype(np.float32), top_k=np.full(rows, 40, np.int32), top_p=np.full(rows, 0.9, np.float32),
        min_p=np.full(rows, 0.05, np.float32), presence=np.full(rows, 0.5, np.float32), frequency=np.full(rows, 0.5, np.float32),
        seeds=np.arange(rows).astype(np.uint64), positions=np.arange(rows).astype(np.int64),
        penalty_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), penalty_ids=np.tile([3, 9], rows).astype(np.int32),
        penalty_counts=np.ones(2 * rows, np.int32), masks=masks, num_logprobs=(5 * odd - 1).astype(np.int32))


def prefill_stages(device, attempt, line) -> None:
    """Where the time of a prefill goes, by rows; and what a recorded step takes of the device's memory."""
    model = plain(build(device, 2048))
    backend = model.backend
    state = model.allocate_state("fp8", 2, 64, 16)
    for rows in (17, 64, 128, 256, 512, 2048):
        batch = make_batch("prefill", [[5] * rows], [0], [0], [list(range(64))], [rows - 1])
        run = lambda batch=batch: model.forward(batch, state, warm_mtp=False)  # noqa: E731
        run()
        line(f"prefill {rows}, eager", f"{timed(backend, run, 4):.2f} ms")
        line(f"prefill {rows}, recorded", f"{timed(backend, backend.record(run), 4):.2f} ms")
        run()
        stage_times(model, state, rows, line, "prefill")
    for rows in (1, 8):
        batch = make_batch("verify", [[5] * rows], [10], [0], [list(range(64))], None, True)
        run = lambda batch=batch: model.forward(batch, state, warm_mtp=False)  # noqa: E731
        run()
        stage_times(model, state, rows, line)
        run()
        free = [device.free_bytes()]
        for _ in range(4):
            backend.record(run)()
            backend.device.synchronize()
            free.append(device.free_bytes())
        line(f"graphs of {rows} rows take", f"{[(a - b) >> 10 for a, b in zip(free, free[1:])]} KiB")
