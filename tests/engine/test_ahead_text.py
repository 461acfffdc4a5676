"""Passes behind passes with the guides that a daemon makes: the texts of passes that wait, whatever the guides decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from q27app.chat.guide import make_guide
from q27app.chat.types import ChatRequest, Message, TextPart
from q27app.config import Config
from q27app.daemon.parts import open_text
from q27app.engine.depth import DepthControl
from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import Q27Error
from q27app.paths import demo_model
from tests.engine.toy import Desk

WORDS = ("Count to twenty and", "Tell me about the sea and why", "Write a list of names:")


@pytest.fixture(scope="module")
def tokenizer():
    return open_text(Config())[0]


HOT = 100.0
"""At this temperature the seed's noise alone decides what is drawn, whatever the weights are and however their sums are rounded:
nothing repeats, and nothing of the guides' comes by chance."""


def run(tokenizer, is_ahead: bool, eos_ids: tuple[int, ...], draft: str, temperatures: tuple[float, float]) -> tuple[list, int]:
    """Tokens, reasons and what was forced of four answers at once, and how many passes were started behind others."""
    desk = Desk(open_model(EngineConfig(demo_model(), "numpy", context=512, slots=4, draft=draft), lambda share: None))
    desk.model.backend.is_ahead = is_ahead
    answers, num_behind = [], 0
    for index, options in enumerate((
            dict(channel="reasoning", budget=20), dict(channel="reasoning", budget=None), dict(stop=("the", "ing")),
            dict(channel="reasoning", budget=None, finds_loops=False))):
        params = SamplingParams(max_tokens=60, temperature=temperatures[index % 2], seed=index)
        guide = make_guide(tokenizer, eos_ids=eos_ids, **options)
        prompt = tuple(tokenizer.encode(WORDS[index % len(WORDS)]))
        answers.append(desk.submit(Request(f"r{index}", prompt, params, guide, eos_ids=eos_ids)))
    while desk.stepper.has_work:
        desk.stepper.step()
        num_behind += desk.stepper._behind is not None
    return [(answer.tokens, answer.finish, [event.forced for event in answer.events if any(event.forced)]) for answer in answers], num_behind


@pytest.mark.parametrize("draft", ["off", "suffix"])
def test_answers_have_the_texts_of_passes_that_wait(tokenizer, draft):
    """In the first two rounds the weights write, and nobody knows what: drafts, ends of text and loops come as they come, in the
    second one often, where common letters end a text. In the last one all passes but those around the budget's end go behind."""
    own, common = tuple(tokenizer.eos_ids), tuple(tokenizer.encode("e")) + tuple(tokenizer.encode("."))
    for eos_ids, temperatures in ((own, (0.0, 0.8)), (common, (0.0, 0.8)), (own, (HOT, HOT))):
        waiting, none = run(tokenizer, False, eos_ids, draft, temperatures)
        ahead, some = run(tokenizer, True, eos_ids, draft, temperatures)
        assert ahead == waiting and none == 0
    assert some > 40
    assert any(forced for _, _, forced in ahead)


class Only:
    """A grammar of these ids alone."""

    is_done = False

    def __init__(self, ids: set[int], vocab_size: int) -> None:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(ids)] = 1
        self._ids, self._mask = ids, np.packbits(bits, bitorder="little").view(np.uint32)

    def advance(self, tokens: Sequence[int]) -> None:
        if not set(tokens) <= self._ids:
            raise Q27Error(f"{tokens} left the form.")

    def mask(self, prefix: Sequence[int]) -> np.ndarray:
        return self._mask


def write_at(backend, token: int, places: Collection[tuple[int, int]]) -> None:
    """Whatever the weights say, `token` is what is drawn at these (seed, position)."""
    inner = backend.sample

    def sample(logits, rows):
        for row, place in enumerate(zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)):
            if place in places:
                logits.array[row, token] = 1e6
        inner(logits, rows)

    backend.sample = sample


def test_the_form_of_an_answer_is_kept_behind_reasoning_that_ends_by_itself(tokenizer):
    """Reasoning ends at three tokens, each of which has a pass behind it: those whose answers have begun have ended by then."""
    template, letters = open_text(Config())[1], set(tokenizer.encode("a b c d e"))
    closer, = tokenizer.encode("</think>", control=True)
    found = []
    for is_ahead in (False, True):
        loaded = open_model(EngineConfig(demo_model(), "numpy", context=512, slots=3, draft="off"), lambda share: None)
        desk, answers, places, num_behind, redrawn = Desk(loaded), [], set(), 0, []
        desk.model.backend.is_ahead = is_ahead
        for index, words in enumerate(WORDS):
            prompt = template.render(ChatRequest(messages=(Message("user", (TextPart(words),)),)), True)
            guide = make_guide(tokenizer, channel=prompt.channel, grammar=Only(letters, loaded.vocab_size))
            params = SamplingParams(max_tokens=10 * (index + 1), temperature=HOT, seed=index)
            places.add((index, len(prompt.tokens) + 10 * index + 5))
            answers.append(desk.submit(Request(f"r{index}", tuple(prompt.tokens), params, guide, eos_ids=tuple(tokenizer.eos_ids))))
        write_at(desk.model.backend, closer, places)
        constrain = desk.stepper._scheduler.constrain
        desk.stepper._scheduler.constrain = lambda work: redrawn.append(constrain(work)) or redrawn[-1]
        while desk.stepper.has_work:
            desk.stepper.step()
            num_behind += desk.stepper._behind is not None
        found.append([(answer.tokens, answer.finish, any(answer.forced)) for answer in answers])
    assert found[0] == found[1]
    for index, (tokens, finish, is_forced) in enumerate(found[1]):
        assert tokens.index(closer) == 10 * index + 5 and set(tokens[10 * index + 6:]) <= letters
        assert len(tokens) == 10 * (index + 1) and finish is FinishReason.LENGTH and not is_forced
    assert num_behind > 10 and redrawn.count(True) == 3, 'a pass behind each end of reasoning, drawn again with the form'


@pytest.mark.parametrize("streams", [3, 10, 13])
def test_chains_begun_ahead_for_some_of_many_streams_change_no_text(tokenizer, streams, monkeypatch):
    """Rows go round; answers end one after the other, so fewer and fewer share a pass. Whatever it costs, all rows are used."""
    monkeypatch.setattr(DepthControl, "choose", lambda control, prices, limit, *rest: min(limit, control.cap))
    prompts = [tuple(tokenizer.encode(WORDS[index % 3] + " again" * index)) for index in range(streams)]
    found = []
    for draft in ("off", "mtp"):
        desk = Desk(open_model(EngineConfig(demo_model(), "numpy", context=512, slots=16, draft=draft), lambda share: None))
        desk.model.backend.is_ahead = True
        if desk.loaded.drafter is not None:
            desk.loaded.drafter.runs_ahead = True
        answers = [desk.submit(Request(f"r{index}", prompt, SamplingParams(max_tokens=8 + 40 // streams + 2 * index, temperature=0.6 * (index % 2), seed=index)))
                   for index, prompt in enumerate(prompts)]
        desk.run()
        found.append([answer.tokens for answer in answers])
    assert found[0] == found[1]
    assert desk.loaded.drafter.num_landed > 0 and all(answer.last.stats.num_drafted for answer in answers)
