"""Drafts, many streams and reused prefixes on a card: `python -m tests.gpu.drafting PART ...`, parts in `PARTS`.

The 27B is the constructed one at GPU_MODELS/q4s.q27 (accept 0.85), fp8 KV; the engine's stepper is driven without threads,
so that a figure is the engine's and not the clock's of another thread.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from q27app.chat.guide import Decision
from q27app.engine.drafts import Drafts
from q27app.engine.loading import EngineConfig, Loaded, open_model
from q27app.engine.request import Request, SamplingParams, TokenEvent
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.sequence import Sequence
from q27app.engine.status import Meter
from q27app.engine.stepper import Stepper
from tests.gpu.checks import attempt, finish, line
from tests.gpu.whole import models
from tests.kernels.made import make_batch

BACKEND = os.environ.get("GPU_BACKEND", "cuda")
CONTEXT = 32768
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=5)


@dataclass
class Told:
    """One request's tokens and when they came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    asked: float = field(default_factory=time.perf_counter)
    last: TokenEvent | None = None

    def __call__(self, event: TokenEvent) -> None:
        if event.tokens:
            self.tokens += event.tokens
            self.times.append(time.perf_counter())
        self.last = event

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.times[0] - self.asked)

    @property
    def speed(self) -> float:
        """Tokens a second after the first event."""
        return (len(self.tokens) - 1) / (self.times[-1] - self.times[0])


class Table:
    """A loaded model, and a fresh stepper for every set of requests."""

    def __init__(self, path: Path, **options) -> None:
        started = time.perf_counter()
        self.loaded: Loaded = open_model(EngineConfig(path, BACKEND, **options), lambda share: None)
        self.drafter = self.loaded.drafter
        self.seconds = time.perf_counter() - started
        self._count = 0
        self.start()

    def warm(self) -> str:
        """Record every usual shape."""
        started, work = time.perf_counter(), self.loaded.warm_up
        while work is not None and work.has_work:
            work.step()
        return f"{time.perf_counter() - started:.1f} s"

    def start(self, drafter: Drafts | None = None) -> None:
        """drafter: None = no drafts."""
        self.loaded.drafter = drafter
        self.stepper = Stepper(self.loaded, Meter(), lambda sequence: None, checks_pools=False)

    def fixed(self, cap: int, uses_suffix: bool = False, uses_mtp: bool = True) -> Drafts:
        """Always as many drafts as `cap`."""
        mtp = self.drafter._mtp if uses_mtp else None
        return Drafts(mtp, uses_suffix, cap, self.drafter._prices, fixed=True, runs_ahead=self.drafter.runs_ahead)

    def ask(self, prompt, count: int, params: SamplingParams = GREEDY, ends: bool = False, **options) -> Told:
        """ends: at an end-of-text token too."""
        self._count += 1
        told = Told()
        params = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
                                presence_penalty=params.presence_penalty, seed=params.seed, logprobs=params.logprobs,
                                max_tokens=count, ignore_eos=not ends)
        self.stepper.add(Sequence(Request(f"r{self._count}", tuple(prompt), params, **options), told, count))
        return told

    def run(self) -> None:
        while self.stepper.has_work:
            self.stepper.step()

    def spare(self) -> None:
        while self.stepper.has_spare_work or self.stepper.has_work:
            self.stepper.step()

    def close(self) -> None:
        self.loaded.close()
        gc.collect()


class Watches:
    """A guide as most answers have one: it constrains nothing and keeps everything."""

    is_open = True

    def advance(self, tokens) -> Decision:
        return Decision(len(tokens))

    def mask(self, prefix) -> None:
        return None


def successors(start: int, count: int, vocab: int) -> list[int]:
    return [(start + index) % vocab for index in range(count)]


def timed(run, times: int = 16) -> float:
    """Milliseconds, the median after four runs."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return 1e3 * float(np.median(taken[4:]))


def widths(table: Table) -> None:
    """A verify pass with draw, acceptance and commit by its rows; a chain of drafts by its depth."""
    loaded, model, backend = table.loaded, table.loaded.model, table.loaded.model.backend
    blocks = [list(range(16))]

    def verify(rows: int, params: SamplingParams) -> float:
        phase = "verify" if rows > 1 else "decode"
        draws = sampling_rows([LogitRow(params, 301 + row) for row in range(rows)], loaded.vocab_size)

        def run() -> None:
            batch = make_batch(phase, [[5] * rows], [300], [0], blocks, None, rows > 1)
            logits = model.forward(batch, loaded.state)
            backend.sample(logits, draws)
            if rows > 1:
                backend.accept()
                backend.commit()
            backend.result()
        return timed(run)

    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        line(f"ms a step by rows, {name}", " ".join(f"{rows}:{verify(rows, params):.2f}" for rows in range(1, 17)))
        chains(table, name, params)


def chains(table: Table, name: str, params: SamplingParams) -> None:
    """A chain of drafts by its depth, narrow where there are such and whole: waited for step by step, and as it runs ahead."""
    loaded, model, backend = table.loaded, table.loaded.model, table.loaded.model.backend
    draws = sampling_rows([LogitRow(params, 302)], loaded.vocab_size)

    def waited(depth: int, is_narrow: bool) -> None:
        batch = make_batch("draft", [[5]], [301], [0], [list(range(16))], [0])
        model.draft_chain(batch, loaded.state, True, depth, draws, np.array([depth], np.int32), is_narrow)

    def ahead(depth: int, is_narrow: bool) -> float:
        """Of the chain alone, behind a pass that has ended."""
        backend.sample(model.forward(make_batch("decode", [[5]], [300], [0], [list(range(16))]), loaded.state), draws)
        backend.result()
        started = time.perf_counter()
        model.draft_ahead(loaded.state, depth, draws, is_narrow)
        backend.device.synchronize()
        return time.perf_counter() - started

    for is_narrow in (True, False) if model.rare_ids[1] else (False,):
        kind = f"{name}, {'narrow' if is_narrow else 'whole'}"
        line(f"ms a chain by depth, {kind}", " ".join(f"{depth}:{timed(lambda depth=depth: waited(depth, is_narrow)):.2f}" for depth in (1, 4, 7)))
        if backend.is_ahead:
            depths = (1, 2, 3, 4, 5, 7, 9, 11, 15)
            taken = {depth: 1e3 * float(np.median([ahead(depth, is_narrow) for _ in range(12)][4:])) for depth in depths}
            line(f"ms ahead, {kind}", " ".join(f"{depth}:{ms:.2f}" for depth, ms in taken.items())
                 + f"; a step more {(taken[15] - taken[3]) / 12:.3f}")


def speeds(table: Table, depths: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 9, 11, 15)) -> None:
    """One stream on the chain: without drafts, at fixed depths, at measured depth; greedy, sampled, copied."""
    vocab = table.loaded.vocab_size
    prompt = successors(1000, 64, vocab)

    def tell(drafter: Drafts | None, count: int, params: SamplingParams = GREEDY, given=prompt, guide=None) -> str:
        table.start(drafter)
        told = table.ask(given, count, params, guide=guide)
        table.run()
        expected = successors(given[-1] + 1, count, vocab)
        assert told.tokens == expected, f"token {next(i for i, t in enumerate(told.tokens) if t != expected[i])} differs"
        stats = told.last.stats
        return (f"{told.speed:.1f} tok/s, {len(told.tokens) / max(1, stats.num_steps):.2f} a step, "
                f"{1e3 * (told.times[-1] - told.times[0]) / max(1, stats.num_steps - 1):.2f} ms a step")

    attempt("no drafts, greedy", lambda: tell(None, 160))
    attempt("no drafts, sampled", lambda: tell(None, 160, SAMPLED))
    for cap in depths:
        attempt(f"depth {cap}, greedy", lambda cap=cap: tell(table.fixed(cap), 512))
        if cap in (5, 7, 9):
            attempt(f"depth {cap}, sampled", lambda cap=cap: tell(table.fixed(cap), 512, SAMPLED))
    attempt("depth 7, a guide beside it", lambda: tell(table.fixed(7), 512, GREEDY, prompt, Watches()))
    attempt("measured depth, greedy", lambda: tell(table.drafter, 1024))
    attempt("measured depth, sampled", lambda: tell(table.drafter, 1024, SAMPLED))
    line("what it measured", str(table.drafter.to_dict()))
    table.loaded.model.mtp.rare, rare = (0, 0), table.loaded.model.rare_ids
    attempt("depth 7, drafts among all ids", lambda: tell(table.fixed(7), 512))
    table.loaded.model.mtp.rare = rare
    copied = successors(5000, 1200, vocab) + successors(5000, 16, vocab)
    attempt("copy, suffix drafter", lambda: tell(table.fixed(15, True, False), 1024, GREEDY, copied))
    attempt("copy, measured depth", lambda: tell(table.drafter, 1024, GREEDY, copied))


def hosts(table: Table) -> None:
    """Microseconds of a step on the host by call, those inside others counted in both; what waits for the card is its time."""
    vocab, backend, model = table.loaded.vocab_size, table.loaded.model.backend, table.loaded.model
    spent: dict[str, float] = {}

    def watch(owner, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args, **options):
            started = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
        setattr(owner, name, timed)

    def run(drafter: Drafts, prompt) -> str:
        table.start(drafter)
        told = table.ask(prompt, 512, cache=False)
        while len(told.tokens) < 128:
            table.stepper.step()
        for owner, names in ((drafter, ("propose",)), (model, ("forward", "draft_chain")), (table.stepper, ("_run", "_deliver")),
                             (backend, ("begin", "sample", "accept", "commit", "result", "drafted", "begin_drafts")),
                             (table.stepper._scheduler, ("next_work", "apply"))):
            for name in names:
                if hasattr(owner, name):
                    watch(owner, name)
        spent.clear()
        steps, started = 0, time.perf_counter()
        while table.stepper.has_work:
            table.stepper.step()
            steps += 1
        whole = time.perf_counter() - started
        for owner in (drafter, model, backend):
            for name in [name for name, value in vars(owner).items() if getattr(value, "__name__", "") == "timed"]:
                delattr(owner, name)
        return f"{1e6 * whole / steps:.0f} us a step: " + ", ".join(f"{name} {1e6 * s / steps:.0f}" for name, s in spent.items())

    attempt("host, depth 7", lambda: run(table.fixed(7), successors(1000, 64, vocab)))
    copied = successors(5000, 1200, vocab) + successors(5000, 16, vocab)
    attempt("host, copying", lambda: run(table.fixed(15, True, False), copied))


def streams(table: Table) -> None:
    """Aggregate speed of several streams, with and without drafts."""
    vocab = table.loaded.vocab_size
    for name, drafter in (("no drafts", None), ("drafts", table.drafter)):
        for count in (1, 2, 4, 8, 16):
            def run(count=count, drafter=drafter) -> str:
                speed = 0.0
                for tokens in (32, 128):
                    table.start(drafter)
                    told = [table.ask(successors(1000 + 5000 * i, 64, vocab), tokens, cache=False) for i in range(count)]
                    table.run()
                    for i, one in enumerate(told):
                        assert one.tokens == successors(1064 + 5000 * i, tokens, vocab), f"stream {i} says something else"
                    begin, end = max(one.times[0] for one in told), min(one.times[-1] for one in told)
                    inside = sum(sum(begin < at <= end for at in one.times) / len(one.times) * len(one.tokens) for one in told)
                    speed = inside / (end - begin)
                return f"{speed:.0f} tok/s together"
            attempt(f"{count} streams, {name}", run)


def gaps(table: Table) -> None:
    """A running stream while a prompt of 30,000 tokens is prefilled."""
    vocab = table.loaded.vocab_size

    def run(drafter, streams: int) -> str:
        table.start(drafter)
        told = [table.ask(successors(1000 + 5000 * i, 64, vocab), 30_000, cache=False) for i in range(streams)]
        while not all(one.times for one in told):
            table.stepper.step()
        long = table.ask([7 + i * 31 % 9973 for i in range(30_000)], 1, cache=False)
        marks = [len(one.times) for one in told]
        while long.last is None or long.last.finish is None:
            table.stepper.step()
        between = np.concatenate([np.diff(one.times[mark - 1:]) for one, mark in zip(told, marks)]) * 1e3
        seconds = long.times[0] - long.asked
        for sequence in list(table.stepper._scheduler.running):
            table.stepper.cancel(sequence)
        table.run()
        return (f"{len(between)} gaps: p50 {np.percentile(between, 50):.1f}, p99 {np.percentile(between, 99):.1f}, most {between.max():.1f} ms; "
                f"prefill of 30,000 in {seconds:.2f} s, {30_000 / seconds:.0f} tok/s")

    attempt("gap of 1 stream, no drafts", lambda: run(None, 1))
    attempt("gap of 4 streams, drafts", lambda: run(table.drafter, 4))


def turns(table: Table) -> None:
    """A warm turn: 25,000 tokens that were computed before, 1,300 new ones."""
    vocab = table.loaded.vocab_size
    base = [11 + i * 37 % 20011 for i in range(25_000)]

    def run() -> str:
        table.start(table.drafter)
        cold = table.ask(base, 8)
        table.run()
        table.spare()
        warm = table.ask(base + successors(3000, 1_300, vocab), 8)
        table.run()
        again = table.ask(base + successors(3000, 1_300, vocab), 8)
        table.run()
        stats = warm.last.stats
        return (f"first token cold {cold.first_ms:.0f} ms, warm {warm.first_ms:.0f} ms ({stats.num_cached} of {stats.num_prompt} reused), "
                f"the same again {again.first_ms:.0f} ms")
    attempt("warm turn", run)


def big() -> None:
    table = Table(models() / "q4s.q27", kv_format="fp8", context=CONTEXT, slots=16, cache_device_slots=8)
    line("27B opened", f"{table.seconds:.1f} s; {table.loaded.plan.to_dict()['reasons']}")
    for part in (widths, speeds, streams, gaps, turns):
        attempt(part.__name__, lambda part=part: part(table) or "done")
    table.close()


def disk() -> None:
    """The first token of a prompt of 20,000 tokens: cold, and by a new engine on the same folder."""
    path, folder = models() / "q4s.q27", Path(tempfile.gettempdir()) / "q27app-gpu-cache"
    shutil.rmtree(folder, ignore_errors=True)
    prompt = [11 + i * 37 % 20011 for i in range(20_000)]

    def run() -> str:
        said, first = [], []
        for turn in range(2):
            table = Table(path, kv_format="fp8", context=CONTEXT, slots=1, cache_dir=folder)
            if turn == 0:
                table.ask([5] * 200, 2)
                table.run()
            told = table.ask(prompt, 16, system_len=19_968)
            table.run()
            said.append(told.tokens)
            first.append(told.first_ms)
            table.spare()
            table.close()
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert said[0] == said[1], f"other text: {said}"
        if not first[1] * 5 <= first[0]:
            raise AssertionError(f"first token cold {first[0]:.0f} ms, after a restart {first[1]:.0f} ms, expected a fifth")
        return f"first token cold {first[0]:.0f} ms, after a restart {first[1]:.0f} ms, {first[0] / first[1]:.1f} times sooner; {size / 1e9:.2f} GB on disk"
    attempt("restart with the disk cache", run)
    shutil.rmtree(folder, ignore_errors=True)


def alone() -> None:
    """What one stream gets: prices of rows and draft steps, then speeds, then where a step's time goes."""
    table = Table(models() / "q4s.q27", kv_format="fp8", context=CONTEXT, slots=1, cache=False)
    line("27B opened", f"{table.seconds:.1f} s")
    attempt("warmed up", table.warm)
    for part in (widths, speeds, hosts):
        attempt(part.__name__, lambda part=part: part(table) or "done")
    table.close()


def heavy() -> None:
    """The same model with its draft layer at Q8, as the file has it: what its steps cost, and how many drafts are right."""
    table = Table(models() / "q4s.q27", kv_format="fp8", context=CONTEXT, slots=1, cache=False, light_drafts=False)
    line("27B opened, draft layer at Q8", f"{table.seconds:.1f} s")
    chains(table, "greedy", GREEDY)
    attempt("speeds", lambda: speeds(table, (7,)) or "done")
    table.close()


PARTS = {"big": big, "disk": disk, "alone": alone, "heavy": heavy}


def main(names: list[str]) -> int:
    for name in names or list(PARTS):
        attempt(name, lambda name=name: PARTS[name]() or "done")
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
