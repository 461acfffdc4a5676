"""Whether drafts change a text, on a card: `python -m tests.gpu.drafted_text PART ...`, parts in `PARTS`.

    equal MODEL KV     TOKENS tokens and log probabilities with drafts against those without, every cap; MODEL: dense or demo
    long MODEL KV      the same over ten times as many, caps 7 and 15
    chains             constructed chains whose drafts are right 0, 50, 85 and 100 times of 100

GPU_BACKEND=numpy runs them without a card; GPU_TOKENS: length of the shorter texts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from q27app.chat.guide import Decision
from q27app.engine.drafts import Drafts
from q27app.engine.request import SamplingParams
from q27app.kernels.batch import MAX_DECODE_ROWS
from q27app.paths import demo_model
from q27app.weights.synthetic import synthesize
from tests.engine.guides import Interrupts
from tests.engine.laws import Only
from tests.gpu.checks import attempt, finish, line
from tests.gpu.drafting import Table, successors

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


class Texts:
    """A model, its texts without drafts, and the comparison with them. common_ids: see `EngineConfig`."""

    def __init__(self, model: str, kv: str, common_ids: int | None = None) -> None:
        self.name, self._plain = f"{model} {kv}", {}
        with tempfile.TemporaryDirectory() as temporary:
            path = demo_model() if model == "demo" else synthesize(Path(temporary) / "dense.q27", "nano", "dense", "q4s")
            self.table = Table(path, kv_format=kv, context=4096, slots=3, cache=False, common_ids=common_ids)

    def compare(self, count: int, caps, names, guide=None) -> str:
        """Texts with each cap against the one without. Raises at the first difference."""
        key = (count, names, guide)
        if key not in self._plain:
            self._plain[key] = tell(self.table, None, count, names, guide)
        accepted = []
        for cap in caps:
            drafter = self.table.fixed(cap, uses_suffix=True)
            found, expected = tell(self.table, drafter, count, names, guide), self._plain[key]
            for name, one, other in zip(names, found, expected, strict=True):
                if one != other:
                    place = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
                    raise AssertionError(f"depth {cap}, {name}: token {place} of {len(other)} differs")
            counts = drafter.to_dict()["sources"].values()
            accepted.append(f"{cap}:{sum(sum(c['accepted']) for c in counts)}/{sum(sum(c['drafted']) for c in counts)}")
        return "equal; accepted " + " ".join(accepted)

    def attempt(self, what: str, *given) -> None:
        attempt(f"{self.name} {what}", lambda: self.compare(*given))


def equal(model: str, kv: str) -> None:
    """Alone and three together, every cap over TOKENS tokens."""
    texts = Texts(model, kv)
    every = range(1, MAX_DECODE_ROWS)

    def three_ids() -> Only:
        return Only((5, 6, 7), texts.table.loaded.vocab_size, Decision)

    texts.attempt(f"greedy {TOKENS}", TOKENS, every, ("greedy",))
    texts.attempt(f"three {TOKENS}", TOKENS, every, tuple(KINDS))
    for name, guide in (("three ids allowed", three_ids), ("a guide that speaks", Interrupts)):
        texts.attempt(f"three, {name}", TOKENS, (1, 7, 15), tuple(KINDS), guide)
    texts.attempt("greedy, a guide that speaks", TOKENS, (1, 7, 15), ("greedy",), Interrupts)
    texts.attempt(f"seeded {TOKENS}", TOKENS, (1, 4, 8, 15), ("seeded",))
    texts.table.close()


def long(model: str, kv: str) -> None:
    """Alone and three together, caps 7 and 15 over ten times TOKENS, narrow drafts among them."""
    texts = Texts(model, kv, common_ids=1024)
    line(f"{texts.name} rare ids", str(texts.table.loaded.model.rare_ids))
    for names in (("greedy",), tuple(KINDS)):
        texts.attempt(f"{', '.join(names)} {10 * TOKENS}", 10 * TOKENS, (7, 15), names)
    texts.table.close()


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


PARTS = {"equal": equal, "long": long, "chains": chains}


def main(names: list[str]) -> int:
    for name in names or ["equal dense fp16", "equal dense fp8", "equal demo fp16", "equal demo fp8", "long dense fp16", "long dense fp8", "long demo fp16", "long demo fp8", "chains"]:
        part, *options = name.split()
        attempt(name, lambda part=part, options=options: PARTS[part](*options) or "done")
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
