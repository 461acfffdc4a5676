"""Checks and figures on a real card: `python -m tests.gpu.checks SECTION ...` (tests/gpu/run.sh runs them all).

Every line is one result; a failed check prints its error and the run goes on, ending with exit code 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.launch import CudaDevice
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128
from tests.gpu import big, parity, whole
from tests.kernels import cuda_checks, delta_checks, follow_checks, lacking_checks
from tests.kernels.made import make_batch
from tests.model.geometry import config_27b

CACHE = Path(tempfile.gettempdir()) / "q27app-kernels"
ROWS, PREFILL = (1, 2, 3, 5, 8, 9, 12, 16), (1, 5, 17, 63, 64, 500)
BIG_STAGES = {
    "delta in": ([(10240, Q4_G64), (6144, Q4_G64), (48, F16), (48, F16)], 5120),
    "attention in": ([(12288, Q4_G64), (1024, Q8_G128), (1024, Q8_G128)], 5120),
    "out": ([(5120, Q4_G64)], 6144), "out q8": ([(5120, Q8_G128)], 6144),
    "gate up": ([(17408, Q4_G64)] * 2, 5120), "down": ([(5120, Q4_G64)], 17408),
}
"""The 27B's matrices at q4s, and one at Q8; their prefill has 2,048 rows too."""

failures: list[str] = []


def line(name: str, text: str) -> None:
    print(f"{name:<34} {text}", flush=True)


def attempt(name: str, check) -> None:
    """Run one check; print what it returns or why it failed."""
    start = time.perf_counter()
    try:
        text = check()
    except Exception as error:  # the table must go on
        failures.append(name)
        text = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc(limit=-4)
    line(name, f"{text}   [{time.perf_counter() - start:.1f} s]")


def limited(error: float, limit: float) -> str:
    if not error < limit:
        raise AssertionError(f"relative rms {error:.2e}, expected below {limit:.0e}")
    return f"relative rms {error:.2e}"


def open_device(**options) -> CudaDevice:
    return CudaDevice(CACHE, **options)


def stage_state(backend: CudaBackend, cols: int):
    config = cuda_checks.NANO
    values = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"hidden_size": cols}
    return backend.allocate_state(SimpleNamespace(**values), 1, 1, "fp16", 2, 8, 16)


def stages(device: CudaDevice) -> None:
    """Matrix stages at a small size and at the 27B's; GPU_STAGES: some alone, by name ("small" and the 27B's), with commas between."""
    wanted = os.environ.get("GPU_STAGES", ",".join(["small", *BIG_STAGES])).split(",")
    for mix, spec in cuda_checks.MIXES.items() if "small" in wanted else ():
        def small(spec=spec):
            backend = CudaBackend(device)
            backend.empty((512, 640), "float32", "x")
            stage = cuda_checks.Stage(backend, spec, 640, 1)
            state = stage_state(backend, 640)
            rows = cuda_checks.check_linear(backend, state, stage, "decode", ROWS)
            tiles = cuda_checks.check_linear(backend, state, stage, "prefill", PREFILL)
            return limited(max(rows, tiles), 5e-4)
        attempt(f"stage {mix}, 640 columns", small)
    for name, kinds in {"q4": (Q4_G64, Q4_G64), "f16 and q8": (F16, Q8_G128), "f32": (F32, F32)}.items():
        def both(kinds=kinds):
            backend = CudaBackend(device)
            backend.empty((512, 640), "float32", "x")
            stage = cuda_checks.Both(backend, 640, 1920, *kinds, down=320)
            error = cuda_checks.check_both(stage, cuda_checks.open_state(backend, 640), (*ROWS, 33))
            assert stage.is_ready, "the products were not left ready"
            return limited(error, 7e-4)
        attempt(f"gate up, then down: {name}", both)
    for name, (spec, cols) in BIG_STAGES.items():
        if name not in wanted:
            continue

        def large(spec=spec, cols=cols):
            backend = CudaBackend(device)
            backend.empty((2048, cols), "float32", "x")
            stage = cuda_checks.Stage(backend, spec, cols, 2)
            state = stage_state(backend, cols)
            rows = cuda_checks.check_linear(backend, state, stage, "decode", ROWS)
            tiles = cuda_checks.check_linear(backend, state, stage, "prefill", (*PREFILL, 2048))
            same = repeat(backend, state, stage)
            backend.weights_arena.release()
            return limited(max(rows, tiles), 5e-4) + f", {same}"
        attempt(f"stage {name} of the 27B", large)


def repeat(backend: CudaBackend, state, stage: cuda_checks.Stage, times: int = 200) -> str:
    """The same launch many times: the same bits."""
    x = backend.upload(np.random.default_rng(5).standard_normal((8, stage.cols)).astype(np.float32))
    width = len(stage.values) // (2 if stage.is_pair else 1)
    backend.begin(make_batch("decode", [[0] * 8], [0], [0], [[0]]), state)
    out = backend.empty((8, width), "float32", "out")
    first = None
    for _ in range(times):
        (backend.gate_up if stage.is_pair else backend.project)(stage.norm, stage.weight, x, out)
        bits = backend.download(out)
        first = bits if first is None else first
        if not np.array_equal(first, bits):
            raise AssertionError("the same launch gave other bits")
    return f"{times} times the same bits"


FOLLOWED = {
    "q4": (640, {}), "q8": (640, {}), "f16": (640, {}), "f32": (640, {}), "mix": (640, {}), "q4, 6144": (6144, {}), "q4, 128": (128, {}),
    "q4, 27B": (5120, {"width": 6144, "projected": 16384, "products": 17408}),
}
"""Number types, columns, and other sizes of stages that leave each other rows (follow_checks.Chain)."""


def follow(device: CudaDevice) -> None:
    """Rows that an addition leaves for the norm behind it: any number of them, those that their scale does not suit, and 200 passes of both. GPU_STAGES:
    the 27B's size ("27B") or the others ("small") alone."""
    wanted = os.environ.get("GPU_STAGES", "small,27B").split(",")
    for name, (cols, sizes) in FOLLOWED.items():
        if ("27B" if "27B" in name else "small") not in wanted:
            continue

        def check(name=name, cols=cols, sizes=sizes):
            backend = CudaBackend(device)
            chain = follow_checks.Chain(backend, cols, follow_checks.KINDS[name.split(",")[0]], **sizes)
            state = cuda_checks.open_state(backend, cols)
            error = follow_checks.check_usual(chain, state)
            odd = follow_checks.check_odd(chain, state, follow_checks.ORDERS)
            for count in (1, 2, 8, 16, 35):
                follow_checks.check_repeats(chain, state, *follow_checks.usual_rows(chain, count), 200)
                follow_checks.check_repeats(chain, state, *follow_checks.odd_rows(chain, state, (follow_checks.ODD * 4)[:count]), 200)
            backend.weights_arena.release()
            limited(max(odd.values()), follow_checks.PEAK_TOLERANCE)
            return limited(error, 5e-4) + " (odd rows " + " ".join(f"{kind} {value:.1e}" for kind, value in odd.items()) + "), 200 times the same bits"
        attempt(f"rows left for a norm: {name}", check)


def models(device: CudaDevice) -> None:
    """Whole small models through prefill, decode, verify, commit and drafts."""
    nano = replace(cuda_checks.NANO, hidden_size=512, intermediate_size=1024, vocab_size=2000)
    for kv_format, dtype, limit in (("fp16", F16, 2e-3), ("fp8", F16, 3e-2), ("fp16", Q4_G64, 2e-3)):
        def run(kv_format=kv_format, dtype=dtype, limit=limit):
            expected, found = cuda_checks.pair_of_lines(device, nano, dtype, kv_format, max_rows=512, blocks=32)
            errors = cuda_checks.check_model(expected, found, prompt=500)
            worst = max(errors, key=errors.get)
            return limited(errors[worst], limit) + f" ({worst}); " + " ".join(f"{e:.1e}" for e in errors.values())
        attempt(f"model {dtype.name} {kv_format}", run)
    attempt("graph equals eager", lambda: graph_equals_eager(device, nano))


def graph_equals_eager(device: CudaDevice, config) -> str:
    """A recorded step replayed at later positions gives the eager step's bits."""
    _, lines = cuda_checks.pair_of_lines(device, config, Q4_G64, "fp16", max_rows=512)
    _, eager = cuda_checks.pair_of_lines(device, config, Q4_G64, "fp16", max_rows=512)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, config.vocab_size, 90)]
    for each in (lines, eager):
        each.feed(0, tokens[:60], logit_rows=[59])
        each.feed(0, tokens[60:61], "decode")
        each.reserve(0, 100)
    model, backend = lines.model, lines.model.backend

    def batch(step: int):
        return make_batch("decode", [[tokens[step]]], [step], [0], [lines.tables[0]])

    lines.state.copy_slot(0, 1)
    replay = backend.record(lambda: model.forward(batch(61), lines.state))
    lines.state.copy_slot(1, 0)
    for step in range(61, 90):
        backend.begin(batch(step), lines.state)
        replay()
        found = backend.download(model.logit_rows.rows(1))
        if not np.array_equal(found, eager.feed(0, tokens[step:step + 1], "decode")):
            raise AssertionError(f"other bits at position {step}")
    return f"29 steps, {replay.num_nodes} nodes"


def forced(device: CudaDevice) -> None:
    """The card as one of compute capability 8.6 with a memory cap: the same checks, and the 27B's decode."""
    device.close()
    played = open_device(force_arch="86", memory_cap=int(23.1 * 2**30))
    line("played card", f"{played.card.target}, {played.card.shared_bytes} bytes of shared memory, free {played.free_bytes() / 1e9:.1f} GB")
    nano = replace(cuda_checks.NANO, hidden_size=512, intermediate_size=1024, vocab_size=2000)

    def run():
        expected, found = cuda_checks.pair_of_lines(played, nano, Q4_G64, "fp16", max_rows=512, blocks=32)
        errors = cuda_checks.check_model(expected, found, prompt=500)
        return limited(max(errors.values()), 2e-3)

    attempt("model Q4_G64 fp16, played", run)
    attempt("27B decode, played", lambda: big.decode_speed(played, line, "fp16", ((1, 10), (8, 10))))
    played.close()


def delta(device: CudaDevice) -> None:
    """The delta rule at the 27B's heads: float32 sums, so close; the same bits however the rows are cut."""
    for name, sharp, leaves in (("", False, False), (", sharp", True, False), (", left ready", False, True)):
        def check(sharp=sharp, leaves=leaves):
            bench = delta_checks.DeltaBench(device, config_27b(), sharp, leaves=leaves)
            errors = delta_checks.check_delta(bench, 300), delta_checks.check_steps(bench, 48, (1, 2, 3, 5, 8, 12, 16))
            assert bench.was_left == leaves
            delta_checks.check_company(bench, 3, ((1,) * 2, (1,) * 3, (1,) * 16, (1, 4, 2, 16, 3, 1)))
            if device.card.has_warpgroups:
                for count in (4, 16):
                    assert lacking_checks.check_lacking(bench, count, 14, 3) == {0, 1, 2, 3}
                lacking_checks.check_life(bench, 1, 60)
            limited(errors[0], delta_checks.TOLERANCE)
            limit = delta_checks.READY_TOLERANCE if leaves else delta_checks.TOLERANCE
            return limited(errors[1], limit) + f" (prefill {errors[0]:.1e}, steps {errors[1]:.1e})"
        attempt(f"delta rule{name}", check)


def few_multiprocessors(device: CudaDevice) -> None:
    """As on a card with so many multiprocessors as GPU_SMS says: a tool's time goes by blocks, and each does more."""
    if "GPU_SMS" in os.environ:
        device.card = replace(device.card, num_sms=int(os.environ["GPU_SMS"]))


def row_counts(otherwise: str) -> tuple[int, ...]:
    """GPU_ROWS, or these."""
    return tuple(int(count) for count in os.environ.get("GPU_ROWS", otherwise).split())


def sanitized_nano(device: CudaDevice) -> None:
    """Every kernel at small shapes and all row counts, for compute-sanitizer; GPU_KV: formats; GPU_ROWS: counts; GPU_PHASES: passes."""
    few_multiprocessors(device)
    nano = replace(cuda_checks.NANO, hidden_size=256, intermediate_size=512, vocab_size=640)
    counts = row_counts("1 2 3 5 8 12 16 17")
    for kv_format in os.environ.get("GPU_KV", "fp16 fp8").split():
        attempt(f"nano {kv_format}", lambda kv_format=kv_format: big.touch_everything(device, nano, kv_format, counts))


def sanitized_wide(device: CudaDevice) -> None:
    """The same at the 27B's width, a layer of each kind, with 1, 8 and 17 rows; GPU_SMS, GPU_ROWS and GPU_PHASES count here too."""
    few_multiprocessors(device)
    wide = replace(config_27b(), num_layers=2, layer_kinds=("delta", "attention"), vocab_size=2048)
    attempt("27B width", lambda: big.touch_everything(device, wide, "fp16", row_counts("1 8 17")))


def sanitized(device: CudaDevice) -> None:
    """Both."""
    sanitized_nano(device)
    sanitized_wide(device)


SECTIONS = {"forced": forced, "decode": lambda device, attempt, line: big.decode_speed(device, line, "fp8", big.PASSES),
            "stages": stages, "follow": follow, "models": models, "delta": delta, "speed": big.speed, "once": big.once, "prefill": big.prefill_stages,
            "repeats": big.repeats,
            "sanitized": sanitized, "sanitized_nano": sanitized_nano, "sanitized_wide": sanitized_wide}


def finish() -> int:
    line("failed", ", ".join(failures) or "nothing")
    return 1 if failures else 0


def main(names: list[str]) -> int:
    parts = whole.PARTS | parity.PARTS
    for name in [name for name in names if name in parts]:
        parts[name](line, attempt)
    names = [name for name in names if name not in parts] if names else ["stages", "models", "speed"]
    if not names:
        return finish()
    start = time.perf_counter()
    device = open_device()
    card = device.card
    CudaBackend(device)
    line("card", f"{card.name}, {card.capability}, {card.num_sms} multiprocessors, {card.shared_bytes} bytes of shared memory")
    line("open and compile", f"{time.perf_counter() - start:.1f} s")
    for name in names:
        try:
            SECTIONS[name](device, *((attempt, line) if name in ("speed", "once", "decode", "prefill", "repeats") else ()))
        except Exception as error:
            failures.append(name)
            traceback.print_exc(limit=-6)
            line(name, f"FAILED {type(error).__name__}: {str(error)[:300]}")
    device.close()   # closing twice is harmless
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
