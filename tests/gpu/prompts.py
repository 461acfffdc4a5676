"""A whole prompt on a card, from its passes to HTTP: `python -m tests.gpu.prompts PART,PART... FILE`, parts in `PARTS`; FILE: a .q27.

    passes   the network's passes alone, launched one by one, tokens all alike and varied
    engine   prompts through the engine, without drafts and with
    http     the same over HTTP, as ids and as text

Beside each figure stand the card's clock and power while it was taken. GPU_KV: fp16 if not set; GPU_CHUNK: rows of a pass;
GPU_FREE_MIB: wait for so much free memory before each model, and tell who holds the rest; GPU_BACKEND, GPU_SMALL as in `streams`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from q27app.bench.endpoint import Endpoint, open_endpoint
from q27app.bench.exchange import COMPLETIONS, ask
from q27app.engine.loading import EngineConfig, Loaded, open_model
from q27app.engine.request import Request, SamplingParams
from q27app.kernels.batch import Batch
from tests.gpu import checks, whole
from tests.gpu.checks import attempt, line
from tests.gpu.streams import SMALL, Run, Sizes, answer_of

COUNTS = {False: (64, 2048, 8192, 8208, 32768), True: (64, 300, 700)}
"""Prompts, by whether they shall be small."""
CARD = Sizes(context=36864, slots=1)


class Watch:
    """Clock and power of the card, every 40 ms, as far as its driver's program is there."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", "-i", card, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "40"]
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for row in process.stdout or ():
            try:
                clock, power = (float(value) for value in row.split(","))
            except ValueError:
                continue
            self._samples.append((time.perf_counter(), clock, power))

    def between(self, begin: float, end: float) -> str:
        """Means of what was seen from begin to end, by time.perf_counter."""
        mine = [sample for sample in self._samples if begin + 0.05 <= sample[0] <= end + 0.03]
        return f"{statistics.mean(s[1] for s in mine):.0f} MHz, {statistics.mean(s[2] for s in mine):.0f} W" if mine else "clock not seen"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def prompt_of(count: int, salt: int) -> list[int]:
    return [200 + (k * 7 + salt * 13 + k * k % 97) % 600 for k in range(count)]


def passes(run: Run, watch: Watch, counts: tuple[int, ...]) -> None:
    """In the engine's chunks and memory, before it begins; each prompt twice, the second one counts."""
    def opened(config: EngineConfig, progress: Callable) -> Loaded:
        loaded = open_model(config, progress)
        for count in counts[1:]:
            for kind, tokens in (("alike", [5] * count), ("varied", prompt_of(count, 77))):
                _prefill(loaded, tokens)
                begin = time.perf_counter()
                _prefill(loaded, tokens)
                end = time.perf_counter()
                line(f"passes, {count} {kind}", f"{1e3 * (end - begin):.1f} ms in {loaded.prefill_chunk} rows, {count / (end - begin):.0f} tok/s; {watch.between(begin, end)}")
        loaded.state.clear_slot(0)
        return loaded

    run.engine(opened, **_options(run)).close()


def _prefill(loaded: Loaded, tokens: list[int]) -> None:
    loaded.state.clear_slot(0)
    table = np.arange(-(-len(tokens) // 64), dtype=np.int32)[None, :]
    for at in range(0, len(tokens), loaded.prefill_chunk):
        part = np.array(tokens[at:at + loaded.prefill_chunk], np.int32)
        count = len(part)
        loaded.model.forward(Batch("prefill", part, np.arange(at, at + count, dtype=np.int32), np.array([0, count], np.int32), np.zeros(1, np.int32),
                                   table, np.array([count - 1], np.int32)), loaded.state, False)
    loaded.model.backend.device.synchronize()


def _options(run: Run) -> dict[str, Any]:
    chunk = os.environ.get("GPU_CHUNK")
    return {"context": run.sizes.context, "slots": 1, **({"prefill_chunk": int(chunk)} if chunk else {})}


def through_the_engine(run: Run, watch: Watch, counts: tuple[int, ...]) -> None:
    """One after the other, each not seen before."""
    for draft in ("off", "auto"):
        _room()
        engine = run.engine(draft=draft, **_options(run))
        try:
            time.sleep(run.sizes.settles_s)
            for number, count in enumerate(counts):
                begin = time.perf_counter()
                _, first, stats = answer_of(engine, Request(f"{count}", tuple(prompt_of(count, number)), SamplingParams(max_tokens=2, ignore_eos=True)))
                line(f"engine, drafts {draft}, {count}", f"first token after {1e3 * first:.0f} ms, prefill {stats.prefill_ms:.0f} ms "
                     f"({1e3 * count / max(stats.prefill_ms, 1e-3):.0f} tok/s); {watch.between(begin, begin + first)}")
        finally:
            engine.close()


def over_http(run: Run, watch: Watch, counts: tuple[int, ...]) -> None:
    def text_of(count: int, salt: int) -> str:
        return "".join(chr(97 + (k * 7 + salt + k * k % 23) % 26) for k in range(count))

    async def prompts(endpoint: Endpoint) -> None:
        for number, count in enumerate(counts):
            for kind, prompt in (("ids", prompt_of(count, number + 20)), ("text", text_of(count, number))):
                body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
                said = await ask(endpoint.client, body, COMPLETIONS)
                first = said.arrivals[0]
                line(f"http, {said.num_prompt} of {kind}", f"first text after {1e3 * first:.0f} ms ({(said.num_prompt or 0) / first:.0f} tok/s); "
                     f"{watch.between(said.started, said.started + first)}")

    async def all_of_it(url: str) -> None:
        async with open_endpoint(url) as endpoint:
            await asyncio.wait_for(prompts(endpoint), 120)

    with run.daemon("daemon with drafts") as daemon:
        time.sleep(run.sizes.settles_s)
        asyncio.run(all_of_it(daemon.url))


def _room() -> None:
    """A model that ended gives its memory back a moment later, and others may hold some."""
    if "GPU_FREE_MIB" in os.environ:
        line("free memory", whole.wait_for_memory(int(os.environ["GPU_FREE_MIB"]), 60))


PARTS = {"passes": passes, "engine": through_the_engine, "http": over_http}


def main(names: list[str], path: Path, sizes: Sizes, backend: str, kv: str) -> int:
    """Exit code: 1 if anything failed."""
    run, watch = Run(path, sizes, backend, 600), Watch()
    run.kv = kv

    def check(part: Callable) -> str:
        _room()
        part(run, watch, COUNTS[sizes is SMALL])
        return "done"

    try:
        for name in names:
            attempt(name, lambda name=name: check(PARTS[name]))
    finally:
        watch.close()
    return checks.finish()


if __name__ == "__main__":
    if len(sys.argv) != 3 or set(sys.argv[1].split(",")) - set(PARTS):
        sys.exit(f"usage: python -m tests.gpu.prompts PART,PART... FILE; parts: {' '.join(PARTS)}")
    sys.exit(main(sys.argv[1].split(","), Path(sys.argv[2]), SMALL if "GPU_SMALL" in os.environ else CARD,
                  os.environ.get("GPU_BACKEND", "cuda"), os.environ.get("GPU_KV", "fp16")))
