"""Several answers at once on a card: `python -m tests.gpu.streams PART,PART... FILE`, parts in `PARTS`; FILE: a .q27.

    off, on   1 to 16 answers at once over HTTP, without and with drafts: tokens a second, first tokens, gaps
    gap       gaps of an answer while a long prompt is read beside it
    turn      first token of a turn whose beginning is known, some time after the turn before and at once
    disk      the turn after two restarts: first token and text from the folder of states, against a daemon that knows nothing; with
              `on` or `turn` other states were written after this one, and only the second restart reads it before it is asked for
    host      conversations that left the card for host memory and come back, without HTTP
    solo      what the engine adds to bare passes, without HTTP

GPU_BACKEND=numpy runs them without a card (not solo); GPU_SMALL takes short prompts and a short window; GPU_SECONDS: for all of it;
GPU_FREE_MIB: wait for so much free memory first. Every daemon ends with its part, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from q27app.bench.endpoint import Endpoint, open_endpoint
from q27app.bench.exchange import COMPLETIONS, Exchange, ask
from q27app.bench.prompts import GREEDY, filler, filler_message
from q27app.bench.report import quantile
from q27app.child_daemon import ChildDaemon
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig, Loaded, open_model
from q27app.engine.request import Request, SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.kernels.batch import Batch
from tests.gpu import checks, whole
from tests.gpu.checks import attempt, line


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers, and seconds of rest. settles_s: until what was asked is settled and shapes are recorded."""

    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 2
    context: int = 40960
    slots: int = 16
    prompt: int = 512
    answer: int = 128
    gap_prompt: int = 30000
    gap_answer: int = 700
    turn: int = 25000
    turn_more: int = 1300
    disk: int = 19900
    host: int = 24000
    solo_answer: int = 90
    settles_s: float = 6.0
    pauses_s: tuple[float, ...] = (1.5, 0.0)


CARD = Sizes()
SMALL = Sizes((1, 3), 1, 6144, 4, 120, 12, 400, 30, 400, 100, 700, 700, 30, 0.5, (0.5, 0.0))
"""A window that holds the two prompts by which a tokenizer is measured, where a token is a character."""
SOLO_STEPS = 40
LIMITS_S = {"off": 50.0, "on": 50.0, "gap": 22.0, "turn": 20.0, "disk": 15.0}


class Run:
    """One run of some parts. backend: numpy or cuda."""

    def __init__(self, path: Path, sizes: Sizes, backend: str, seconds: float) -> None:
        self.path, self.sizes, self.backend = path, sizes, backend
        self._until = time.monotonic() + seconds
        self.kv = "fp8" if backend == "cuda" else "fp16"

    @contextmanager
    def daemon(self, name: str, **settings: str | int) -> Iterator[ChildDaemon]:
        """A daemon and the seconds until it is ready; its last words where a part of it fails."""
        common: dict[str, Any] = {"model.path": str(self.path), "model.backend": self.backend, "model.context": self.sizes.context,
                                  "model.slots": self.sizes.slots, "model.kv": self.kv}
        began, failed = time.monotonic(), len(checks.failures)
        with ChildDaemon({**common, **settings}, 150) as daemon:
            seconds = time.monotonic() - began
            with urllib.request.urlopen(f"{daemon.url}/status", timeout=10) as reply:
                line(name, f"ready after {seconds:.1f} s, the engine after {json.load(reply)['engine']['model']['start']}")
            yield daemon
            if len(checks.failures) > failed:
                line(f"{name}, its last words", daemon.last_words())

    def part(self, daemon: ChildDaemon, name: str, body: Callable[[Endpoint], Any]) -> Any:
        """body's result; None if it failed or its time was over, which is reported and hinders nothing else."""
        found: list[Any] = [None]
        limit = min(LIMITS_S[name.split()[0].rstrip(",")], self._until - time.monotonic())

        async def run() -> None:
            async with open_endpoint(daemon.url) as endpoint:
                found[0] = await body(endpoint)

        def check() -> str:
            if limit <= 1:
                raise TimeoutError("no time is left")
            asyncio.run(asyncio.wait_for(run(), limit))
            return "done"

        attempt(name, check)
        return found[0]

    def engine(self, opened: Callable = open_model, draft: str = "off", **options: Any) -> Engine:
        """A ready engine without HTTP."""
        engine = Engine(EngineConfig(model=self.path, backend=self.backend, draft=draft, kv_format=self.kv, **options), opened)
        engine.start()
        while engine.status().state not in ("ready", "failed"):
            time.sleep(0.02)
        if (error := engine.status().error) is not None:
            engine.close()
            raise error
        return engine


def figures(found: list[Exchange], seconds: float) -> str:
    """`steady`: while all of them generate, tokens by their share of the pieces."""
    gaps = [gap for item in found for gap in item.gaps]
    begin, end = max(item.started + item.arrivals[0] for item in found), min(item.started + item.arrivals[-1] for item in found)
    inside = sum(sum(begin < item.started + at <= end for at in item.arrivals) / len(item.arrivals) * item.num_tokens for item in found)
    steady = f"{inside / (end - begin):.1f}" if end > begin else "never"
    firsts = [1e3 * item.arrivals[0] for item in found]
    return (f"all {sum(item.num_tokens for item in found) / seconds:.1f} tok/s, steady {steady}; first p50 {quantile(firsts, 0.5):.0f}, max {max(firsts):.0f} ms; "
            f"gaps {_of(gaps)}")


def _of(gaps: list[float]) -> str:
    """p50, p99 and the longest, in ms."""
    if not gaps:
        return "none"
    return f"p50 {1e3 * (quantile(gaps, 0.5) or 0):.1f}, p99 {1e3 * (quantile(gaps, 0.99) or 0):.1f}, max {1e3 * max(gaps):.1f} ms"


async def streams(endpoint: Endpoint, sizes: Sizes, name: str) -> None:
    """1 to many answers at once, prompts that no cache holds. Plain completions: a constructed model begins a chat's answer with blanks,
    which are not told before something follows, and the first token would seem to come with the fourth."""
    size = await endpoint.num_chars(sizes.prompt)
    await asyncio.sleep(sizes.settles_s)
    for count in sizes.counts:
        for turn in range(sizes.rounds):
            bodies = [{"model": endpoint.model, "prompt": filler(f"{name} {turn} {count} {k}", size), "max_tokens": sizes.answer * (1 + (count >= 8)), "ignore_eos": True,
                       "seed": k, **GREEDY} for k in range(count)]
            began = time.perf_counter()
            found = await asyncio.gather(*(ask(endpoint.client, body, COMPLETIONS) for body in bodies))
            line(f"{name}, {count} at once", figures(found, time.perf_counter() - began))


async def gap(endpoint: Endpoint, sizes: Sizes) -> None:
    """One answer goes on while a long prompt is read."""
    size = await endpoint.num_chars(sizes.gap_prompt)
    small = endpoint.body(filler_message("gap small", 200, "Go on."), sizes.gap_answer, **GREEDY)
    large = endpoint.body(filler_message("gap large", size, "Go on."), 2, **GREEDY)
    running = asyncio.create_task(ask(endpoint.client, small))
    await asyncio.sleep(sizes.settles_s / 10)
    began = time.perf_counter()
    read = await ask(endpoint.client, large)
    ended = time.perf_counter()
    found = await running
    at = [found.started + value for value in found.arrivals]
    gaps = [later - earlier for earlier, later in zip(at, at[1:], strict=False) if later > began and earlier < ended]
    line("gap", f"{read.num_prompt} tokens read in {ended - began:.2f} s beside an answer: its {len(gaps)} gaps {_of(gaps)}"
         + ("; it ended before the prompt was read" if at[-1] < ended else ""))


def _first(said: Exchange) -> str:
    return f"prompt {said.num_prompt}, known {said.num_cached}, first token after {1e3 * said.arrivals[0]:.0f} ms"


async def turns(endpoint: Endpoint, sizes: Sizes) -> None:
    """A second turn some time after the first one, and one that comes at once."""
    size, more = await endpoint.num_chars(sizes.turn), await endpoint.num_chars(sizes.turn_more)
    messages = filler_message("turn", size, "Go on.")
    for pause in sizes.pauses_s:
        said = await ask(endpoint.client, endpoint.body(messages, 64, **GREEDY))
        line("turn, before", _first(said))
        await asyncio.sleep(pause)
        messages = [*messages, {"role": "assistant", "content": said.text}, *filler_message(f"turn {pause}", more, "Go on.")]
        following = await ask(endpoint.client, endpoint.body(messages, 16, **GREEDY))
        line(f"turn, {pause} s after it", _first(following))
        messages = [*messages, {"role": "assistant", "content": following.text}, *filler_message(f"turn next {pause}", 100, "Go on.")]


def over_http(run: Run, parts: list[str]) -> None:
    """A daemon with drafts and one without, for all parts that need one; another one on the folder of the first."""
    sizes = run.sizes
    with tempfile.TemporaryDirectory() as folder:
        keeps: dict[str, str | int] = {"cache.directory": folder} if "disk" in parts else {}
        talk: list[dict] = []
        cold = None

        async def first(endpoint: Endpoint) -> None:
            messages = filler_message("disk", await endpoint.num_chars(sizes.disk), "Go on.")
            said = await ask(endpoint.client, endpoint.body(messages, 16, **GREEDY))
            talk.extend([*messages, {"role": "assistant", "content": said.text}, *filler_message("disk next", 60, "Go on.")])

        async def following(endpoint: Endpoint) -> Exchange:
            said = await ask(endpoint.client, endpoint.body(talk, 16, **GREEDY))
            line("disk", _first(said))
            return said

        if {"on", "turn", "disk"} & set(parts):
            with run.daemon("daemon with drafts", **keeps) as daemon:
                if "disk" in parts:
                    run.part(daemon, "disk written", first)
                if "on" in parts:
                    run.part(daemon, "on", lambda endpoint: streams(endpoint, sizes, "on"))
                if "turn" in parts:
                    run.part(daemon, "turn", lambda endpoint: turns(endpoint, sizes))
        if {"off", "gap"} & set(parts) or talk:
            with run.daemon("daemon without drafts", **{"model.draft": "off"}) as daemon:
                if "off" in parts:
                    run.part(daemon, "off", lambda endpoint: streams(endpoint, sizes, "off"))
                if talk:
                    cold = run.part(daemon, "disk, nothing known", following)
                if "gap" in parts:
                    run.part(daemon, "gap", lambda endpoint: gap(endpoint, sizes))
        for name in ("again", "once more") if talk else ():
            with run.daemon(f"daemon started {name}", **keeps) as daemon:
                warm = run.part(daemon, f"disk, started {name}", following)
                for said in daemon.last_words(200).splitlines():
                    if "from disk" in said:
                        line("disk", said)
            if warm is not None and cold is not None:
                attempt("disk", lambda warm=warm: _compare(cold, warm))


def _compare(cold: Exchange, warm: Exchange) -> str:
    assert warm.text == cold.text, f"{warm.text[:100]!r}, expected {cold.text[:100]!r}"
    assert warm.num_cached, "nothing was known after the restart"
    return f"texts equal, first token {cold.arrivals[0] / warm.arrivals[0]:.1f} times sooner"


def prompt_of(seed: int, size: int) -> list[int]:
    return [200 + (k * 7 + seed * 131 + k * k % 97) % 600 for k in range(size)]


def host(run: Run) -> None:
    """Three conversations and room for about one on the device: each turn finds its state in host memory."""
    size = run.sizes.host
    engine = run.engine(context=-(-size * 5 // 4 // 64) * 64, slots=1)

    def turn(name: str, prompt: list[int], caches: bool = True) -> tuple[list[int], float, int]:
        tokens, seconds, stats = answer_of(engine, Request(name, tuple(prompt), SamplingParams(max_tokens=16, ignore_eos=True), cache=caches, stable_len=len(prompt)))
        line(f"host, {name}", f"prompt {stats.num_prompt}, known {stats.num_cached} {stats.reuse.kind if stats.reuse else ''}, first token after {1e3 * seconds:.0f} ms; "
             f"{engine.status().cache.get('host')}")
        return tokens, seconds, stats.num_cached

    try:
        talks = [prompt_of(seed, size) for seed in range(3)]
        for k, talk in enumerate(talks):
            talk += [*turn(f"{k} first", talk)[0], *prompt_of(k + 7, 100)]
        time.sleep(run.sizes.settles_s / 10)
        for k, talk in enumerate(talks):
            tokens, warm, known = turn(f"{k} again", talk)
            expected, cold, _ = turn(f"{k} without", talk, False)
            assert tokens == expected, (tokens, expected)
            assert engine.status().cache.get("host") is None or known, "nothing came back from host memory"
            line(f"host, {k}", f"texts equal, first token {cold / warm:.1f} times sooner")
    finally:
        engine.close()


def answer_of(engine: Engine, request: Request) -> tuple[list[int], float, Any]:
    """(tokens, seconds to the first one, stats)."""
    done, tokens, first, last = threading.Event(), [], [], []

    def deliver(event: Any) -> None:
        if event.tokens and not first:
            first.append(time.perf_counter())
        tokens.extend(event.tokens)
        if event.finish is not None:
            last.append(event)
            done.set()

    began = time.perf_counter()
    engine.submit(request, deliver)
    assert done.wait(120), f"{request.id} got no answer in 120 s"
    if last[0].error is not None:
        raise last[0].error
    return tokens, first[0] - began, last[0].stats


def solo(run: Run) -> None:
    """Milliseconds a pass: recorded and launched back to back; with its arrays; with its draws; waited for; as the engine's step."""
    found: dict[int, tuple[float, ...]] = {}

    def opened(config: EngineConfig, progress: Callable) -> Loaded:
        loaded = open_model(config, progress)
        loaded.model.replays.clear()   # each pass shall be recorded here
        found.update({count: _bare(loaded, count) for count in run.sizes.counts})
        return loaded

    engine = run.engine(opened, context=min(8192, run.sizes.context), slots=run.sizes.slots)
    try:
        time.sleep(run.sizes.settles_s / 3)
        for count, (graph, arrays, drawn, waited) in found.items():
            step = min(_engine_step(engine, count, run.sizes.solo_answer, turn) for turn in range(2))
            line(f"solo, {count} at once", f"pass {graph:.3f} ms, with arrays {arrays:.3f}, with draws {drawn:.3f}, waited for {waited:.3f}; engine {step:.3f}: "
                 f"{100 * (step / drawn - 1):+.2f}% of the drawn pass; {1e3 * count / step:.0f} tok/s")
    finally:
        engine.close()


def _bare(loaded: Loaded, count: int) -> tuple[float, ...]:
    model, state, backend = loaded.model, loaded.state, loaded.model.backend
    for slot in range(count):
        state.clear_slot(slot)
    recorded, record = [], backend.record
    backend.record = lambda part: recorded.append(record(part)) or recorded[-1]

    def forward(step: int) -> Any:
        ones = np.arange(count, dtype=np.int32)
        return model.forward(Batch("decode", np.full(count, 7, np.int32), np.full(count, 1 + step % 60, np.int32), np.arange(count + 1, dtype=np.int32),
                                   ones, ones[:, None], ones), state, False)

    def draw(step: int) -> None:
        backend.sample(forward(step), sampling_rows([LogitRow(SamplingParams(), 2)] * count, loaded.vocab_size))

    def queued(one: Callable[[int], Any]) -> float:
        backend.device.synchronize()
        began = time.perf_counter()
        for step in range(SOLO_STEPS):
            one(step)
        backend.device.synchronize()
        return (time.perf_counter() - began) * 1e3 / SOLO_STEPS

    waited = []
    for step in range(SOLO_STEPS):
        began = time.perf_counter()
        draw(step)
        backend.result()
        waited.append((time.perf_counter() - began) * 1e3)
    backend.record = record
    assert recorded, "nothing was recorded"
    drawn, arrays = queued(draw), queued(forward)
    return queued(lambda step: [part() for part in recorded]), arrays, drawn, statistics.median(waited[5:])


def _engine_step(engine: Engine, count: int, tokens: int, turn: int) -> float:
    """Mean milliseconds between tokens of one of so many answers."""
    done, times = threading.Semaphore(0), []

    def deliver(event: Any) -> None:
        if event.tokens and event.request_id.endswith("-0"):
            times.append(time.perf_counter())
        if event.finish is not None:
            done.release()

    for k in range(count):
        engine.submit(Request(f"{count}-{turn}-{k}", (*range(100, 150), k), SamplingParams(max_tokens=tokens, ignore_eos=True)), deliver)
    for _ in range(count):
        assert done.acquire(timeout=120), "no answer in 120 s"
    return 1e3 * (times[-2] - times[10]) / (len(times) - 12)


PARTS = ("off", "on", "gap", "turn", "disk", "host", "solo")


def main(names: list[str], path: Path, sizes: Sizes, backend: str, seconds: float = 600.0) -> int:
    """Exit code: 1 if anything failed."""
    run = Run(path, sizes, backend, seconds)
    if set(LIMITS_S) & set(names):
        attempt("over HTTP", lambda: over_http(run, names) or "done")
    for name, part in (("host", host), ("solo", solo)):
        if name in names:
            attempt(name, lambda part=part: part(run) or "done")
    return checks.finish()


if __name__ == "__main__":
    if len(sys.argv) != 3 or set(sys.argv[1].split(",")) - set(PARTS):
        sys.exit(f"usage: python -m tests.gpu.streams PART,PART... FILE; parts: {' '.join(PARTS)}")
    BACKEND = os.environ.get("GPU_BACKEND", "cuda")
    if BACKEND == "cuda":
        line("free memory", whole.wait_for_memory(int(os.environ.get("GPU_FREE_MIB", "0")), 60))
    sys.exit(main(sys.argv[1].split(","), Path(sys.argv[2]), SMALL if "GPU_SMALL" in os.environ else CARD, BACKEND, float(os.environ.get("GPU_SECONDS", "600"))))
