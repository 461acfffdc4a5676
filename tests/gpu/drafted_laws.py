"""What drafts must leave as it is beside the text, on a card: `python -m tests.gpu.drafted_laws PART ...`, parts in `PARTS`.

    laws        sampled continuations against the exact law, and a wrong rule that must be rejected
    state       a slot after rejected drafts against one that never had any, bit for bit
    acceptance  right drafts of the bundled model by depth, for prose, tool calls and copying

GPU_BACKEND=numpy runs them without a card; GPU_DRAWS: continuations for each sampler; GPU_PROCESSES: that draw them, for
GPU_SECONDS at most; GPU_CASES: examples of each task.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from q27app.bench.demo_eval import load_cases
from q27app.bench.demo_probe import KINDS
from q27app.chat.guide import Decision
from q27app.chat.template import open_template
from q27app.chat.tokenizer import Tokenizer
from q27app.engine.draft_mtp import MtpDrafter
from q27app.engine.request import Request, SamplingParams
from q27app.engine.sequence import Sequence
from q27app.paths import demo_model
from q27app.weights.container import open_container
from q27app.weights.synthetic import synthesize
from tests.engine.laws import REJECTED, SAMPLERS, Only, chi_square, joint_law, law_of, texts
from tests.gpu.checks import attempt, finish
from tests.gpu.drafting import BACKEND, Table, Told

DRAWS = int(os.environ.get("GPU_DRAWS", "20000"))
PROCESSES = int(os.environ.get("GPU_PROCESSES", "10"))
SECONDS = float(os.environ.get("GPU_SECONDS", "85"))
CASES = int(os.environ.get("GPU_CASES", "10"))
ALLOWED, PROMPT = (5, 6, 9, 700), (3, 1, 4, 1, 5)
ALONE = SamplingParams(logprobs=1)
"""Nothing is started behind the passes of a text whose probabilities are asked for."""
TOGETHER, GROUP = 48, 6
"""Texts at a time, and of a pass."""
WRONG = ("plain", "top_p")
"""Samplers that are also drawn with a wrong rule, a tenth as often."""


class Near:
    """A wrong rule in the place of the right one: a first draft is accepted whatever was drawn."""

    def __init__(self, backend) -> None:
        self._backend, self._result, self._begin, self._batch = backend, backend.result, backend.begin, None
        backend.result, backend.begin = self.result, self.begin

    def begin(self, batch, state) -> None:
        self._batch = batch
        self._begin(batch, state)

    def result(self):
        sampled, batch = self._result(), self._batch
        if batch.phase == "verify":
            for index, (first, end) in enumerate(zip(batch.row_starts, batch.row_starts[1:])):
                if sampled.accepted[index] == 1 and end - first > 1:
                    sampled.tokens[first], sampled.accepted[index] = batch.tokens[first + 1], 2
        return sampled

    def undo(self) -> None:
        self._backend.result, self._backend.begin = self._result, self._begin


class Everywhere(MtpDrafter):
    """For guides that allow the same ids everywhere: nobody has to look between two steps of a chain."""

    def _most_at_once(self, chains) -> int:
        return self._steps_at_once


class InGroups:
    """A pass takes so few of a scheduler's running sequences that each may have one or two drafts, however many wait: their prompts
    are prefilled in one pass, which on a card is dearer than three of few rows."""

    def __init__(self, scheduler) -> None:
        self._scheduler, self._decode_work = scheduler, scheduler._decode_work
        scheduler._decode_work = self.decode_work

    def decode_work(self):
        turn = self._scheduler._round
        later = [turn.pop() for _ in range(len(turn) - GROUP)]
        work = self._decode_work()
        turn.extend(reversed(later))
        return work


def open_dense(path: str) -> Table:
    """Chains are as long as there is room, whatever their margins."""
    table = Table(Path(path), kv_format="exact" if BACKEND == "numpy" else "fp16", context=256, slots=TOGETHER, cache=False)
    table.drafter._mtp.__class__, table.drafter._mtp._min_margin = Everywhere, 0.0
    return table


def exact_laws(table: Table) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each sampler: the law of the first token and of three, from the logits that the model gives after every prefix."""
    known: dict = {}

    def logits_of(prefix) -> np.ndarray:
        if prefix not in known:
            found: list = []
            request = Request("law", PROMPT + tuple(ALLOWED[t] for t in prefix), SamplingParams(max_tokens=0), prompt_logits=True)
            table.stepper.add(Sequence(request, found.append, 0))
            table.run()
            known[prefix] = next(event.prompt_logits for event in found if event.prompt_logits is not None)[-1, list(ALLOWED)]
        return known[prefix]

    return {name: (law_of(logits_of(()), params), joint_law(lambda prefix, params=params: law_of(logits_of(prefix), params), len(ALLOWED)))
            for name, params in SAMPLERS.items()}


def draw(path: str, out: str, first: str, count: str) -> None:
    """Texts for seeds from `first` on, of each sampler by the right rule and of some by the wrong one, into a file of places; turn about,
    so that where time ends all have about as many."""
    table, ends = open_dense(path), time.monotonic() + SECONDS
    guide, drafters = Only(ALLOWED, table.loaded.vocab_size, Decision), {}
    found: dict[str, list] = {}

    def ask(request: Request) -> Told:
        told = Told()
        table.stepper.add(Sequence(request, told, request.params.max_tokens))
        return told

    def some(name: str, is_right: bool, begin: int, many: int) -> None:
        key = f"{name}/{int(is_right)}"
        drafter = drafters.setdefault(key, table.fixed(3))
        table.start(drafter)
        InGroups(table.stepper._scheduler)
        near = None if is_right else Near(table.loaded.model.backend)
        for at in range(begin, begin + many, TOGETHER):
            if at > int(first) and time.monotonic() > ends:
                break
            drawn = texts(ask, table.run, PROMPT, SAMPLERS[name], guide, min(TOGETHER, begin + many - at), 3, at, 1)
            found.setdefault(key, []).append(np.searchsorted(ALLOWED, drawn))
        if near is not None:
            near.undo()

    for begin in range(int(first), int(first) + int(count), 4 * TOGETHER):
        many = min(4 * TOGETHER, int(first) + int(count) - begin)
        for name in SAMPLERS:
            if begin == int(first) or time.monotonic() < ends:
                some(name, True, begin, many)
            if name in WRONG and begin == int(first):
                some(name, False, begin, -(-int(count) // 10))
    counts = {key: drafter.to_dict()["sources"]["mtp"] for key, drafter in drafters.items()}
    np.savez(out, **{key: np.concatenate(drawn) for key, drawn in found.items()},
             **{f"{key}/drafts": np.array([sum(one["accepted"]), sum(one["drafted"])]) for key, one in counts.items()})
    table.close()


def laws() -> None:
    """DRAWS continuations of each of five samplers, three drafts a pass, under a mask that leaves four ids."""
    with tempfile.TemporaryDirectory() as temporary:
        path, each = str(Path(temporary) / "dense.q27"), -(-DRAWS // PROCESSES)
        table = open_dense(str(synthesize(Path(path), "nano", "dense", "q4s")))
        exact = exact_laws(table)
        table.close()
        drawers = [(f"{temporary}/{index}.npz", subprocess.Popen([sys.executable, "-m", "tests.gpu.drafted_laws", "draw", path,
                    f"{temporary}/{index}.npz", str(index * each), str(each)])) for index in range(PROCESSES)]
        codes = [process.wait() for _, process in drawers]
        assert not any(codes), f"exit codes {codes}"
        parts = [dict(np.load(out)) for out, _ in drawers]
    for name in SAMPLERS:
        for is_right in (True, False) if name in WRONG else (True,):
            key = f"{name}/{int(is_right)}"
            attempt(f"{'law' if is_right else 'a wrong rule'}, {name}", lambda name=name, key=key, is_right=is_right: judged(
                np.concatenate([part[key] for part in parts]), sum(part[key + "/drafts"] for part in parts), *exact[name], is_right))


def judged(places: np.ndarray, drafts: np.ndarray, first_law: np.ndarray, joint: np.ndarray, is_right: bool) -> str:
    """places: int [texts, 3], of ALLOWED. Raises where the right rule is rejected or the wrong one is not."""
    first = chi_square(np.bincount(places[:, 0], minlength=len(ALLOWED)), first_law)
    triples = chi_square(np.bincount(places @ np.array([16, 4, 1]), minlength=64), joint)
    text = f"{len(places)} continuations: p {first:.3g} of the first token, {triples:.3g} of triples; accepted {drafts[0]} of {drafts[1]}"
    if is_right != (min(first, triples) >= REJECTED):
        raise AssertionError(f"{'rejected' if is_right else 'not noticed'}: {text}")
    return text


class Wrong:
    """Five drafts a pass, none of them right but by chance."""

    needs_mtp, runs_ahead = False, False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, sequences, limits):
        return [[(7 * sequence.num_computed + place) % self._vocab_size for place in range(min(limit, 5))]
                for sequence, limit in zip(sequences, limits, strict=True)]

    def prompts_end(self, sequences) -> None: ...

    def go_ahead(self, sequences, drafted) -> None: ...

    def rests(self, sequences) -> bool:
        return False

    def observe(self, sequence, num_drafted, num_accepted) -> None: ...

    def passed(self, rows, ms) -> None: ...


def state() -> None:
    """Slots and blocks after every pass of 40, with five wrong drafts each and with none."""
    def run(table: Table, drafter) -> tuple[list[bytes], bytes, str]:
        table.start(drafter)
        table.stepper._runner.warm_mtp = True
        told = table.ask([5 + place * place % 90 for place in range(100)], 40, ALONE, cache=False)
        sequence, seen, blocks = table.stepper._scheduler.waiting[0], [], b""
        while told.last is None or told.last.finish is None:
            table.stepper.step()
            if sequence.slot >= 0:
                seen.append(table.loaded.state.export_slot(sequence.slot).tobytes())
                last = sequence.num_computed // 64
                blocks = b"".join(data.tobytes() for data in table.loaded.state.export_blocks(sequence.blocks[:last].tolist()))
        return seen, blocks, f"{told.last.stats.num_accepted} of {told.last.stats.num_drafted} drafts right"

    for model in ("dense", "demo"):
        for kv in ("fp16", "fp8"):
            with tempfile.TemporaryDirectory() as temporary:
                path = demo_model() if model == "demo" else synthesize(Path(temporary) / "dense.q27", "nano", "dense", "q4s")
                table = Table(path, kv_format=kv, context=512, slots=1, cache=False)

            def check(table=table) -> str:
                (plain, blocks, _), (drafted, others, told) = run(table, None), run(table, Wrong(table.loaded.vocab_size))
                if plain != drafted:
                    raise AssertionError(f"{len(plain)} and {len(drafted)} states, the first difference at "
                                         f"{next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), min(len(plain), len(drafted)))}")
                assert blocks == others, "other keys or values"
                return f"{len(plain)} states of {len(plain[0])} bytes and {len(blocks)} bytes of full blocks equal, {len(set(plain))} unlike each other; {told}"
            attempt(f"state after wrong drafts, {model} {kv}", check)
            table.close()


def acceptance() -> None:
    """Greedy answers with eight drafts of the draft layer a pass: of those whose predecessors were right, how many were."""
    path = demo_model()
    table = Table(path, kv_format="exact" if BACKEND == "numpy" else "fp8", context=4096, slots=1, cache=False)
    with open_container(path) as container:
        tokenizer = Tokenizer.from_metadata(container.metadata)
        template = open_template(container.metadata, tokenizer)
    for kind, tasks in KINDS.items():
        def run(tasks=tasks) -> str:
            drafter, tokens, steps = table.fixed(8), 0, 0
            table.start(drafter)
            for case in load_cases(CASES, tasks):
                told = table.ask(template.render(case.request, case.thinking).tokens, 64, eos_ids=tokenizer.eos_ids, ends=True, cache=False)
                table.run()
                tokens, steps = tokens + len(told.tokens), steps + told.last.stats.num_steps
            counts = drafter.to_dict()["sources"]["mtp"]
            before = [counts["drafted"][0], *counts["accepted"]]
            shares = [right / min(tried, drafted) for right, tried, drafted in zip(counts["accepted"], before, counts["drafted"])]
            return f"{' '.join(f'{share:.3f}' for share in shares)}; {tokens / steps:.2f} tokens a step, {tokens} tokens"
        attempt(f"right by depth, {kind}", run)
    table.close()


PARTS = {"laws": laws, "state": state, "acceptance": acceptance}


def main(names: list[str]) -> int:
    if names[:1] == ["draw"]:
        draw(*names[1:])
        return 0
    for name in names or list(PARTS):
        attempt(name, lambda name=name: PARTS[name]() or "done")
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
