"""The attend stage on a card, by KV format: `python -m tests.gpu.attention [codes] [errors[=FORMAT]] [behind] [deep[=FORMAT]] [speed] [prompts[=FORMAT]] [forced]`.

codes: heads written by the device have the bytes of the NumPy codec; 25,000 rows are 200,000 heads, codes=131072 a million. errors: the 27B's heads against NumPy over the
same cache, and a row's bits in groups of every size. behind: one row of each sequence right behind eight of one. speed: microseconds a layer, from graphs over 16 layers; the cache is
filled through the codec's writer. prompts: the same of a prompt's rows, by their number and depth. forced: errors, speed and prompts as on a card of compute capability 8.6.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from q27app.kernels.kv_formats import kv_format
from tests.gpu.big import timed
from tests.gpu.checks import attempt, finish, limited, line, open_device
from tests.kernels.attend_checks import AttendBench, check_attend, check_codes, fill
from tests.kernels.made import begin_alone, make_batch, relative_error
from tests.model.geometry import config_27b

CONFIG = replace(config_27b(), intermediate_size=256, vocab_size=2048)
FORMATS = ("fp16", "fp8", "turbo5k", "turbo3")
TOLERANCE = 5e-4


def formats(device) -> list[str]:
    return [name for name in FORMATS if device.card.capability >= kv_format(name).min_compute_capability]


def codes(device, rows: int = 25_000) -> None:
    for name in formats(device):
        def check(name=name):
            bench = AttendBench(device, CONFIG, name, -(-rows // 64), 1, 2048)
            heads = sum(check_codes(bench, rows if name.startswith("turbo") else 4096, seed) for seed in (1,))
            return f"{heads} heads, the same bytes"
        attempt(f"codes {name}", check)


def errors(device, only: str = "") -> None:
    for name in [only] if only else formats(device):
        def check(name=name):
            bench = AttendBench(device, CONFIG, name, 640, 1, 1024)
            fill(bench, 40_000)
            found = [check_attend(bench, at, counts) for at, counts in ((0, (16, 1, 3, 5, 8)), (60, (16, 1, 4)), (2040, (16, 1, 4, 8)), (5000, (16, 1, 2, 8)),
                                                                       (32_760, (16, 1, 8)))]
            found += [check_attend(bench, at, counts, "prefill", 12) for at, counts in ((0, (200,)), (4000, (300, 64, 9)), (32_700, (140, 64)))]
            return limited(max(found), TOLERANCE) + " (" + " ".join(f"{error:.1e}" for error in found) + ")"
        attempt(f"errors {name}", check)


def deep(device, only: str = "fp8") -> None:
    """At the end of the native window, 262,144 positions: the bits of 16 rows, the last two against NumPy, which takes a second a row."""
    def check():
        bench = AttendBench(device, CONFIG, only, 4096, 1, 1024)
        fill(bench, 262_128)
        return limited(check_attend(bench, 262_128, (16, 1, 8), compared=2), TOLERANCE)
    attempt(f"262,144 positions, {only}", check)


def behind(device) -> None:
    """A row of one sequence and of each of four, where there are more items than blocks: each item is taken once, whatever the pass before took."""
    for name in formats(device):
        def check(name=name):
            bench, random = AttendBench(device, CONFIG, name, 1024, 1, 1024), np.random.default_rng(7)
            fill(bench, 60_000)
            y, others = random.standard_normal((2, 8, bench.width)).astype(np.float32)
            tables = [[*range(78), 1000 + seq] for seq in range(4)]

            def run(rows, tables):
                count = len(rows)
                return bench.run_batch(make_batch("verify", [[0]] * count, [78 * 64] * count, [0] * count, tables), rows)

            alone = bench.run("verify", y[:1], 60_000)
            found = limited(relative_error(alone, bench.expected("verify", y[:1], 60_000)), TOLERANCE)
            each = np.concatenate([run(y[seq:seq + 1], tables[seq:seq + 1]) for seq in range(4)])
            for before in (8, 8, 1, 16):
                bench.run("verify", np.concatenate([others, others])[:before], 60_000)
                if not np.array_equal(bench.run("verify", y[:1], 60_000), alone):
                    raise AssertionError(f"one row at 60,000 is another one behind {before} rows")
                bench.run("verify", np.concatenate([others, others])[:before], 60_000)
                if not np.array_equal(run(y[:4], tables), each):
                    raise AssertionError(f"four sequences' rows at {78 * 64} are others behind {before} rows")
            return found + ", the same bits behind 1, 8 and 16 rows"
        attempt(f"behind {name}", check)


DEPTHS = (10, 2000, 32_000, 131_072, 240_000, 262_128)


def speed(device, layers: int = 16, depths=DEPTHS) -> None:
    for name in formats(device):
        start = time.perf_counter()
        bench = AttendBench(device, CONFIG, name, 4096, layers, 1024)
        fill(bench, 262_144)
        backend, random = bench.backend, np.random.default_rng(1)
        bench.put(random.standard_normal((1024, bench.width)).astype(np.float32))
        form = kv_format(name)
        row_bytes = form.key_row_bytes(4, 256) + form.value_row_bytes(4, 256)
        line(f"filled {name}", f"{time.perf_counter() - start:.1f} s, free {device.free_bytes() / 1e9:.1f} GB")
        for rows in (1, 4, 8, 16):
            texts = []
            for position in depths:
                begin_alone(backend, bench.batch("decode", position, rows), bench.state)
                y, out = bench.y.rows(rows), bench.out.rows(rows)
                run = lambda: [backend.attend(y, layer, out) for layer in bench.layer]  # noqa: E731
                run()
                each = timed(backend, backend.record(run), 12) * 1000 / layers
                texts.append(f"{position}: {each:.1f} ({position * row_bytes / each / 1e6:.2f})")
            line(f"  {name}, {rows} rows: us (TB/s)", "  ".join(texts))
        for base in (7168, 130_048):
            begin_alone(backend, bench.batch("prefill", base, 1024), bench.state)
            run = lambda: [backend.attend(bench.y, layer, bench.out) for layer in bench.layer[:4]]  # noqa: E731
            each = timed(backend, run, 4) * 1000 / 4
            line(f"  {name}, prefill of 1,024 at {base}", f"{each:.0f} us a layer, {24 * 4 * 256 * 1024 * (base + 512) / each / 1e6:.0f} TFLOP/s")
        bench.state.release()


def prompts(device, only: str = "") -> None:
    """Microseconds a layer of a prompt's rows behind `depth` positions."""
    for name in [only] if only else formats(device):
        bench = AttendBench(device, CONFIG, name, 2100, 2, 2048)
        fill(bench, 132_000)
        backend = bench.backend
        bench.put(np.random.default_rng(1).standard_normal((2048, bench.width)).astype(np.float32))
        for rows in (10, 40, 100, 256, 512, 1024, 2048):
            texts = []
            for depth in (0, 8192, 32_768, 131_072 - rows):
                begin_alone(backend, bench.batch("prefill", depth, rows), bench.state)
                y, out = bench.y.rows(rows), bench.out.rows(rows)
                run = lambda: [backend.attend(y, layer, out) for layer in bench.layer]  # noqa: E731
                run()
                texts.append(f"{depth}: {timed(backend, backend.record(run), 8) * 1000 / len(bench.layer):.0f}")
            line(f"  {name}, prompt of {rows}: us", "  ".join(texts))
        bench.state.release()


def forced(device) -> None:
    device.close()
    played = open_device(force_arch="86")
    line("played card", f"{played.card.target}, {played.card.shared_bytes} bytes of shared memory")
    errors(played)
    speed(played, 4, (10, 32_000, 240_000))
    prompts(played)
    played.close()


def main(names: list[str]) -> int:
    device = open_device()
    parts = {"codes": codes, "errors": errors, "behind": behind, "deep": deep, "speed": speed, "prompts": prompts, "forced": forced}
    for name in names or [name for name in parts if name != "deep"]:
        part, _, value = name.partition("=")
        attempt(name, lambda part=part, value=value: parts[part](device, *([int(value) if value.isdigit() else value] if value else [])) or "done")
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
