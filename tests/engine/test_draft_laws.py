"""Sampled text with drafts has exactly the law of sampled text without, and a wrong rule of acceptance would be noticed."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.chat.guide import Decision
from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import Request, SamplingParams
from q27app.kernels.batch import Batch
from q27app.kernels.reference_sample import LARGEST_UNIFORM, count_accepted, defined, distribution, philox
from q27app.weights.synthetic import synthesize
from tests.engine.laws import REJECTED, SAMPLERS, Only, chi_square, joint_law, law_of, texts
from tests.engine.toy import Desk

VOCAB, DEPTH, LENGTH = 8, 3, 3
ALLOWED = (5, 6, 9, 700)


def noise(seeds: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float32 [n, VOCAB]: `gumbel_noise` of many seeds below 2^32 at once."""
    words = np.empty((len(seeds), VOCAB), np.uint32)
    for group in range(VOCAB // 4):
        counters = np.zeros((len(seeds), 4), np.uint32)
        counters[:, 0], counters[:, 1] = group, position
        words[:, 4 * group:4 * group + 4] = philox_of(counters, seeds)
    uniform = ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    return -np.log(-np.log1p(-np.minimum(uniform, LARGEST_UNIFORM)))


def philox_of(counters: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    return philox(counters, (seeds.astype(np.uint64), 0))


def scaled(table: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[VOCAB, VOCAB]: scaled logits after each token, -inf where they are cut off."""
    out = np.full(table.shape, -np.inf, np.float32)
    for row, logits in enumerate(table):
        ids, values = distribution(defined(logits), np.arange(VOCAB), params.temperature, params.top_k, params.top_p, params.min_p)
        out[row, ids] = values
    return out


def coupled(batch: Batch, drawn: np.ndarray, target: np.ndarray) -> np.ndarray:
    return count_accepted(batch, drawn)


def close_enough(batch: Batch, drawn: np.ndarray, target: np.ndarray) -> np.ndarray:
    """A wrong rule: a draft is also accepted where the target gives it at least a tenth of its best token's probability."""
    drafts = np.roll(batch.tokens, -1)
    is_near = target[np.arange(len(drafts)), drafts] > target.max(axis=1) - np.log(10.0)
    return count_accepted(batch, np.where(is_near, drafts, drawn))


def tell(target: np.ndarray, guess: np.ndarray, seeds: np.ndarray, rule) -> np.ndarray:
    """int [n, LENGTH]: texts after token 0, each pass with DEPTH drafts that are drawn with the noise of their places."""
    count, place = len(seeds), np.zeros(len(seeds), np.int64)
    text = np.zeros((count, LENGTH + DEPTH + 2), np.int64)
    while (place < LENGTH).any():
        rows = np.zeros((count, DEPTH + 1), np.int64)
        rows[:, 0] = text[np.arange(count), place]
        noises = [noise(seeds, place + depth + 1) for depth in range(DEPTH + 1)]
        for depth in range(DEPTH):
            rows[:, depth + 1] = (guess[rows[:, depth]] + noises[depth]).argmax(axis=1)
        drawn = np.stack([(target[rows[:, depth]] + noises[depth]).argmax(axis=1) for depth in range(DEPTH + 1)], axis=1)
        starts = np.arange(count + 1, dtype=np.int32) * (DEPTH + 1)
        batch = Batch("verify", rows.reshape(-1).astype(np.int32), np.zeros(rows.size, np.int32), starts,
                      np.arange(count, dtype=np.int32), np.zeros((count, 1), np.int32), np.arange(rows.size, dtype=np.int32), True)
        taken = rule(batch, drawn.reshape(-1), target[rows.reshape(-1)])
        said = np.where(np.arange(1, DEPTH + 1) < taken[:, None], rows[:, 1:], 0)
        for depth in range(DEPTH + 1):
            goes_on = (depth < taken) & (place < LENGTH)
            last = depth == taken - 1
            token = drawn[:, depth] if depth == DEPTH else np.where(last, drawn[:, depth], said[:, depth])
            text[goes_on, place[goes_on] + 1] = token[goes_on]
            place = place + goes_on
    return text[:, 1:LENGTH + 1]


def chances(name: str, count: int, rule) -> tuple[float, float]:
    """p of the first token and of the triples."""
    random, params = np.random.default_rng(3), SAMPLERS[name]
    table = (1.2 * random.standard_normal((VOCAB, VOCAB))).astype(np.float32)
    guess = scaled(table + random.standard_normal((VOCAB, VOCAB)).astype(np.float32), params)
    found = np.concatenate([tell(scaled(table, params), guess, np.arange(start, min(start + 100_000, count)), rule)
                            for start in range(0, count, 100_000)])
    joint = joint_law(lambda prefix: law_of(table[prefix[-1] if prefix else 0], params), VOCAB, LENGTH)
    triples = np.bincount(found @ np.array([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
    return chi_square(np.bincount(found[:, 0], minlength=VOCAB), law_of(table[0], params)), chi_square(triples, joint)


@pytest.mark.parametrize("name", SAMPLERS)
def test_accepted_drafts_leave_the_law_as_it_is(name):
    assert min(chances(name, 30_000, coupled)) > REJECTED


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wrong_rule_of_acceptance_is_noticed(name):
    assert min(chances(name, 30_000, close_enough)) < REJECTED


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLERS)
def test_two_million_draws_have_the_law(name, long_scale):
    assert min(chances(name, max(30_000, int(400_000 * long_scale)), coupled)) > REJECTED


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLERS)
def test_continuations_of_the_engine_have_the_law(name, long_scale, tmp_path):
    """Under a mask, so that the law of three tokens can be written down; drafts obey the mask too."""
    path = synthesize(tmp_path / "dense.q27", wiring="dense")
    desk = Desk(open_model(EngineConfig(path, "numpy", context=256, slots=8, max_draft=3, fixed_draft=True), lambda share: None))
    prompt = (3, 1, 4, 1, 5)
    laws: dict = {}

    def step(prefix) -> np.ndarray:
        if prefix not in laws:
            tail = prompt + tuple(ALLOWED[token] for token in prefix)
            answer = desk.submit(Request(f"law{prefix}", tail, SamplingParams(max_tokens=0), prompt_logits=True))
            desk.run()
            laws[prefix] = next(event.prompt_logits for event in answer.events if event.prompt_logits is not None)[-1, list(ALLOWED)]
        return law_of(laws[prefix], SAMPLERS[name])

    joint = joint_law(step, len(ALLOWED))
    guide = Only(ALLOWED, desk.loaded.vocab_size, Decision)
    found = texts(desk.submit, desk.run, prompt, SAMPLERS[name], guide, max(60, int(400 * long_scale)))
    places = np.searchsorted(ALLOWED, found)
    assert chi_square(np.bincount(places[:, 0], minlength=len(ALLOWED)), step(())) > REJECTED
    assert chi_square(np.bincount(places @ np.array([16, 4, 1]), minlength=64), joint) > REJECTED
    counts = desk.loaded.drafter.to_dict()["sources"]["mtp"]
    assert sum(counts["accepted"]) > 0.2 * sum(counts["drafted"])
