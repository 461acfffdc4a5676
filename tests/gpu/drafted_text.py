"""Whether drafts change a text, on a card: `python -m tests.gpu.drafted_text PART ...`, parts in `PARTS`.

    equal MODEL KV     tokens and log probabilities with drafts against those without; MODEL: dense or demo
    chains             constructed chains whose drafts are right 0, 50, 85 and 100 times of 100
    laws               sampled continuations against the exact law, and a wrong rule that must be rejected

GPU_BACKEND=numpy runs them without a card; GPU_DRAWS: continuations for each sampler; GPU_TOKENS: length of the shorter texts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from q27app.chat.guide import Decision
from q27app.engine.drafts import Drafts
from q27app.engine.request import Request, SamplingParams
from q27app.engine.sequence import Sequence
from q27app.kernels.batch import MAX_DECODE_ROWS
from q27app.paths import demo_model
from q27app.weights.synthetic import synthesize
from tests.engine.guides import Interrupts
from tests.engine.laws import REJECTED, SAMPLERS, Only, chi_square, joint_law, law_of, texts
from tests.gpu.checks import attempt, failures, line
from tests.gpu.drafting import Table, Told, successors

DRAWS = int(os.environ.get("GPU_DRAWS", "4000"))
TOKENS = int(os.environ.get("GPU_TOKENS", "200"))
ACCEPTS = (0.0, 0.5, 0.85, 1.0)
KINDS = {
    "greedy": SamplingParams(logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, logprobs=2),
    "penalised": SamplingParams(temperature=0.9, top_k=40, seed=8, presence_penalty=0.3, logprobs=2),
}
PROMPT = [5 + i * i % 3 for i in range(150)]
"""Few ids, so that runs repeat and the suffix drafter is sometimes right, sometimes wrong."""


def tell(table: Table, drafter: Drafts | None, count: int, names, guide=None) -> list[list]:
    """Tokens with their log probabilities of one answer a kind, all at once. guide: makes one for each, None = none."""
    table.start(drafter)
    if drafter is not None:
        drafter.min_match = 4
    entries: list[list] = [[] for _ in names]
    for name in names:
        table.ask(PROMPT, count, KINDS[name], cache=False, guide=guide and guide())
    for sequence, kept in zip(table.stepper._scheduler.waiting, entries, strict=True):
        told = sequence.deliver
        sequence.deliver = lambda event, kept=kept, told=told: (kept.extend(event.logprobs), told(event))
    table.run()
    return entries


def equal(model: str, kv: str) -> None:
    """Alone and three together, every cap over TOKENS tokens; 7 and 15 over ten times as many."""
    with tempfile.TemporaryDirectory() as temporary:
        path = demo_model() if model == "demo" else synthesize(Path(temporary) / "dense.q27", "nano", "dense", "q4s")
        table = Table(path, kv_format=kv, context=4096, slots=3, cache=False)
    plain: dict = {}

    def caps(count: int, chosen, names, guide=None) -> str:
        key = (count, names, guide)
        if key not in plain:
            plain[key] = tell(table, None, count, names, guide)
        accepted = []
        for cap in chosen:
            drafter = table.fixed(cap, uses_suffix=True)
            found, expected = tell(table, drafter, count, names, guide), plain[key]
            for name, one, other in zip(names, found, expected, strict=True):
                if one != other:
                    place = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
                    raise AssertionError(f"depth {cap}, {name}: token {place} of {len(other)} differs")
            counts = drafter.to_dict()["sources"].values()
            accepted.append(f"{cap}:{sum(sum(c['accepted']) for c in counts)}/{sum(sum(c['drafted']) for c in counts)}")
        return "equal; accepted " + " ".join(accepted)

    every, few = range(1, MAX_DECODE_ROWS), (7, 15)

    def three_ids() -> Only:
        return Only((5, 6, 7), table.loaded.vocab_size, Decision)

    attempt(f"{model} {kv} greedy {TOKENS}", lambda: caps(TOKENS, every, ("greedy",)))
    attempt(f"{model} {kv} three {TOKENS}", lambda: caps(TOKENS, every, tuple(KINDS)))
    for name, guide in (("three ids allowed", three_ids), ("a guide that speaks", Interrupts)):
        attempt(f"{model} {kv} three, {name}", lambda guide=guide: caps(TOKENS, (1, 7, 15), tuple(KINDS), guide))
    attempt(f"{model} {kv} greedy, a guide that speaks", lambda: caps(TOKENS, (1, 7, 15), ("greedy",), Interrupts))
    attempt(f"{model} {kv} seeded {TOKENS}", lambda: caps(TOKENS, (1, 4, 8, 15), ("seeded",)))
    attempt(f"{model} {kv} three {10 * TOKENS}", lambda: caps(10 * TOKENS, few, tuple(KINDS)))
    table.close()


def chains() -> None:
    """The successor chain exactly, whatever share of drafts is right; and that share."""
    for share in ACCEPTS:
        with tempfile.TemporaryDirectory() as temporary:
            table = Table(synthesize(Path(temporary) / "chain.q27", "nano", "chain", "q4s", share), kv_format="fp8", context=2048, slots=1,
                          cache=False)
        vocab = table.loaded.vocab_size

        def run(params: SamplingParams, drafter: Drafts, table=table, vocab=vocab) -> str:
            table.start(drafter)
            told = table.ask(successors(100, 64, vocab), 4 * TOKENS, params, cache=False)
            table.run()
            assert told.tokens == successors(164, 4 * TOKENS, vocab), "the chain is broken"
            stats = told.last.stats
            return f"{stats.num_accepted} of {stats.num_drafted} drafts right, {len(told.tokens) / stats.num_steps:.2f} tokens a step"

        for cap in (1, 4, 7, 15):
            attempt(f"chain at {share}, depth {cap}", lambda cap=cap: run(SamplingParams(), table.fixed(cap)))
        attempt(f"chain at {share}, sampled", lambda: run(SamplingParams(temperature=0.7, top_k=20, seed=5), table.fixed(7)))
        attempt(f"chain at {share}, measured", lambda: run(SamplingParams(), table.drafter))
        table.close()


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


def laws() -> None:
    """DRAWS continuations of each of five samplers, three drafts a pass, under a mask that leaves four ids."""
    allowed, prompt = (5, 6, 9, 700), (3, 1, 4, 1, 5)
    exact = "exact" if os.environ.get("GPU_BACKEND") == "numpy" else "fp16"
    with tempfile.TemporaryDirectory() as temporary:
        table = Table(synthesize(Path(temporary) / "dense.q27", "nano", "dense", "q4s"), kv_format=exact, context=256, slots=4, cache=False)
    guide = Only(allowed, table.loaded.vocab_size, Decision)
    known: dict = {}

    def logits_of(prefix) -> np.ndarray:
        if prefix not in known:
            found: list = []
            request = Request("law", prompt + tuple(allowed[t] for t in prefix), SamplingParams(max_tokens=0), prompt_logits=True)
            table.stepper.add(Sequence(request, found.append, 0))
            table.run()
            known[prefix] = next(event.prompt_logits for event in found if event.prompt_logits is not None)[-1, list(allowed)]
        return known[prefix]

    def ask(request: Request) -> Told:
        told = Told()
        table.stepper.add(Sequence(request, told, request.params.max_tokens))
        return told

    def compare(name: str, count: int) -> tuple[float, float, str]:
        drafter = table.fixed(3)
        table.start(drafter)
        joint = joint_law(lambda prefix: law_of(logits_of(prefix), SAMPLERS[name]), len(allowed))
        places = np.searchsorted(allowed, texts(ask, table.run, prompt, SAMPLERS[name], guide, count))
        first = chi_square(np.bincount(places[:, 0], minlength=len(allowed)), law_of(logits_of(()), SAMPLERS[name]))
        counts = drafter.to_dict()["sources"]["mtp"]
        return (first, chi_square(np.bincount(places @ np.array([16, 4, 1]), minlength=64), joint),
                f"accepted {sum(counts['accepted'])} of {sum(counts['drafted'])}")

    def right(name: str) -> str:
        first, triples, accepted = compare(name, DRAWS)
        if min(first, triples) < REJECTED:
            raise AssertionError(f"the law is rejected: p {first:.2e} of the first token, {triples:.2e} of triples")
        return f"{DRAWS} continuations: p {first:.3f} of the first token, {triples:.3f} of triples; {accepted}"

    def wrong(name: str) -> str:
        near = Near(table.loaded.model.backend)
        try:
            _, triples, accepted = compare(name, min(DRAWS, 2000))
        finally:
            near.undo()
        assert triples < REJECTED, f"a wrong rule is not noticed: p {triples:.2e}"
        return f"rejected, p {triples:.1e}; {accepted}"

    for name in SAMPLERS:
        attempt(f"law, {name}", lambda name=name: right(name))
    for name in ("plain", "top_p"):
        attempt(f"a wrong rule, {name}", lambda name=name: wrong(name))
    table.close()


PARTS = {"equal": equal, "chains": chains, "laws": laws}


def main(names: list[str]) -> int:
    for name in names or ["equal dense fp16", "equal dense fp8", "equal demo fp16", "equal demo fp8", "chains", "laws"]:
        part, *options = name.split()
        attempt(name, lambda part=part, options=options: PARTS[part](*options) or "done")
    line("failed", ", ".join(failures) or "nothing")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
