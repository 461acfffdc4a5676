"""Any requests together: passes behind passes give the texts, reasons and log probabilities of passes that wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from q27app.engine.depth import PassPrices
from q27app.engine.drafts import Drafts
from q27app.engine.host_cache import HostCache
from q27app.engine.request import Request, SamplingParams
from q27app.engine.snapshot_cache import SnapshotCache
from tests.engine.test_ahead import prompt_of
from tests.engine.toy import VOCAB, Desk, TableGuide, load_toy

DECISIONS = ((True, (3,), None), (False, (4, 5), None), (True, tuple(range(18)), None), (True, (), "stop"), (False, (), "length"))


class AnyGuide(TableGuide):
    """Constrains from its token `closer` on, and may divert where it had said that it would not."""

    def __init__(self, rng: random.Random) -> None:
        closer, allowed = rng.choice([None, None, rng.randint(0, 25)]), set(rng.sample(range(VOCAB), rng.choice([1, 5, 30])))
        at = {rng.randint(0, 25): rng.choice(DECISIONS) for _ in range(rng.choice([0, 0, 1, 3]))}
        self._closer, self._lies = closer, rng.random() < 0.5
        super().__init__(at, lambda index: None if closer is None or index <= closer else allowed)

    @property
    def is_open(self) -> bool:
        return self._closer is None or self.seen <= self._closer

    @is_open.setter
    def is_open(self, value: bool) -> None: ...

    @property
    def may_divert(self) -> bool:
        return not self._lies and super().may_divert


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([0, 1, 2, 5, 20, 40]), temperature=rng.choice([0, 0, 0.9]), seed=rng.randint(0, 5), top_k=rng.choice([0, 5]),
        presence_penalty=rng.choice([0.0] * 6 + [0.7]), logprobs=rng.choice([None] * 6 + [2]), ignore_eos=rng.random() < 0.1)


def play(seed: int, is_ahead: bool) -> list[tuple[bool, Any]]:
    """Of each answer, whether it was cancelled, and what it is."""
    rng = random.Random(seed)
    slots = rng.choice([1, 2, 4])
    loaded = load_toy(slots=slots, num_blocks=8 * slots, drafter=Drafts(None, True, 5, PassPrices()) if rng.random() < 0.4 else None)
    if rng.random() < 0.5:
        loaded.prefix_cache = SnapshotCache(loaded.state, loaded.blocks, (), 320, None, 128, HostCache(1 << 14, min_tokens=64, piece=2))
    desk = Desk(loaded)
    desk.model.backend.is_ahead = is_ahead
    found = []
    for index in range(rng.randint(1, 6)):
        for _ in range(rng.choice([0, 0, 0, 1, 4, 9, 30])):
            desk.stepper.step()
        prompt = prompt_of(rng.choice([1, 3, 63, 64, 65, 130, 200]), rng.randint(0, 2))
        guide = AnyGuide(rng) if rng.random() < 0.7 else None
        ends = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 2])))
        answer, is_cancelled = desk.submit(Request(f"r{index}", prompt, params_of(rng), guide, ends)), rng.random() < 0.1
        for _ in range(rng.choice([0, 3, 12]) if is_cancelled else 0):
            desk.stepper.step()
        if is_cancelled:
            desk.cancel(f"r{index}")
        found.append((is_cancelled, answer))
    desk.run()
    return found


def check(seeds: range) -> None:
    for seed in seeds:
        for (is_cancelled, waits), (_, ahead) in zip(play(seed, False), play(seed, True), strict=True):
            if is_cancelled:
                size = min(len(waits.tokens), len(ahead.tokens))
                assert waits.tokens[:size] == ahead.tokens[:size], seed
            else:
                assert (waits.tokens, waits.finish, waits.forced) == (ahead.tokens, ahead.finish, ahead.forced), seed
                values = [[entry for event in answer.events for entry in event.logprobs] for answer in (waits, ahead)]
                assert values[0] == values[1], seed


def test_any_requests_get_the_answers_of_passes_that_wait():
    check(range(60))


@pytest.mark.long
def test_many_requests_get_the_answers_of_passes_that_wait(long_scale):
    check(range(1000, 1000 + int(2000 * long_scale)))
