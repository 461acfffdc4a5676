"""Decode passes that are started before the one in front of them is known: who gets one, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine.depth import EXPLORE, PassPrices
from q27app.engine.drafter import shares_of
from q27app.engine.drafts import Drafts
from q27app.engine.request import FinishReason, Request, SamplingParams, is_open
from q27app.engine.sequence import Sequence
from q27app.engine.snapshot_cache import SnapshotCache
from q27app.errors import Q27Error
from q27app.kernels.batch import Batch
from tests.engine.conversations import settle_all
from tests.engine.toy import VOCAB, Desk, ScriptedDrafter, TableGuide, expected_text, mix


class NoSteps:
    """A draft layer that is asked for nothing."""

    rare_ids = (0, 0)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(mix(seed, place) % VOCAB for place in range(length))


def flights(desk: Desk) -> list[bool]:
    """Of each decode or verify pass, whether its tokens were in flight; filled as the desk runs."""
    found: list[bool] = []
    inner = desk.model.forward

    def forward(batch: Batch, *rest):
        if batch.phase != "prefill":
            found.append(batch.is_in_flight)
        return inner(batch, *rest)

    desk.model.forward = forward
    return found


def test_every_pass_but_the_first_is_started_before_the_one_in_front_of_it_is_known():
    desk = Desk(slots=3)
    found = flights(desk)
    answers = [desk.ask(prompt_of(5, seed), 20) for seed in range(3)]
    desk.run()
    assert [answer.tokens for answer in answers] == [expected_text(prompt_of(5, seed), 20) for seed in range(3)]
    assert found == [False] + [True] * 18


def test_nothing_is_started_ahead_on_a_device_that_makes_the_host_wait():
    desk = Desk(slots=1)
    desk.model.backend.is_ahead = False
    found = flights(desk)
    desk.ask(prompt_of(5), 20)
    desk.run()
    assert not any(found)


@pytest.mark.parametrize("what", ["guide", "penalty", "logprobs", "drafter"])
def test_a_request_whose_next_row_hangs_on_its_draw_is_not_started_ahead(what):
    text = expected_text(prompt_of(5), 20)
    desk = Desk(slots=2, drafter=ScriptedDrafter({"r0": text}) if what == "drafter" else None)
    found = flights(desk)
    options = {"guide": {"guide": TableGuide(mask_at=lambda index: None)}, "penalty": {"presence_penalty": 0.5}, "logprobs": {"logprobs": 2}}.get(what, {})
    desk.ask(prompt_of(5), 20, **options)
    other = desk.ask(prompt_of(6, 3), 20)
    desk.run()
    assert not any(found[:-1]) and other.tokens == expected_text(prompt_of(6, 3), 20)


@pytest.mark.parametrize("at, tokens", [
    ({}, 20),
    ({6: (True, (), "stop")}, 7),
    ({6: (False, (), "length")}, 6),
])
def test_a_guide_that_only_ends_an_answer_is_started_ahead(at, tokens):
    desk = Desk(slots=2)
    found = flights(desk)
    answer, other = desk.ask(prompt_of(5), 20, guide=TableGuide(at)), desk.ask(prompt_of(6, 3), 25)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(5), 20)[:tokens] and other.tokens == expected_text(prompt_of(6, 3), 25)
    assert found == [False] + [True] * (len(found) - 1)


@pytest.mark.parametrize("index", [0, 1, 4, 5])
@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_guide_may_force_is_waited_for(index, keeps):
    force, texts = (7, 8, 9), []
    for is_ahead in (False, True):
        desk = Desk(slots=2)
        desk.model.backend.is_ahead = is_ahead
        found = flights(desk)
        answer, other = desk.ask(prompt_of(5), 20, guide=TableGuide({index: (keeps, force, None)})), desk.ask(prompt_of(6, 3), 25)
        desk.run()
        texts.append((answer.tokens, other.tokens))
        assert sum(found) > 10 if is_ahead else not any(found)
    assert texts[0] == texts[1]


class Liar(TableGuide):
    """Diverts where it had said that it would not."""

    may_divert = False


@pytest.mark.parametrize("length", [5, 64, 150])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_an_answer_that_is_diverted_behind_a_pass_is_computed_again(length, keeps, cached):
    """Also twice in a row, and while another one is read; nobody else notices."""
    at = {6: (keeps, (3,), None), 7: (False, (4, 5), None), 30: (keeps, tuple(range(20)), None)}
    texts = []
    for is_ahead in (False, True):
        desk = Desk(slots=3, chunk=64)
        if cached:
            desk.loaded.prefix_cache = SnapshotCache(desk.loaded.state, desk.loaded.blocks)
            desk = Desk(desk.loaded)
        desk.model.backend.is_ahead = is_ahead
        found = flights(desk)
        liar, other = desk.ask(prompt_of(length), 60, guide=Liar(at)), desk.ask(prompt_of(6, 3), 50)
        for _ in range(9):
            desk.stepper.step()
        late = desk.ask(prompt_of(200, 5), 20)
        desk.run()
        texts.append((liar.tokens, other.tokens, late.tokens))
        assert liar.finish is FinishReason.LENGTH and any(found) is is_ahead
        assert [event.prefilled for event in liar.events if event.prefilled is not None][-1] == length
    assert texts[0] == texts[1] and len(texts[1][0]) == 60


class Closes(TableGuide):
    """Constrains nothing until its token `last` was drawn, and from then on every one, as an answer's grammar behind reasoning."""

    def __init__(self, last: int, allowed: set[int]) -> None:
        super().__init__({}, lambda index: None if index <= last else allowed)
        self._last = last

    @property
    def is_open(self) -> bool:
        return self.seen <= self._last

    @is_open.setter
    def is_open(self, value: bool) -> None: ...


@pytest.mark.parametrize("last", [0, 1, 6, 17])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_a_guide_begins_to_constrain_is_drawn_again_with_its_mask(last, temperature):
    texts = []
    for is_ahead in (False, True):
        desk = Desk(slots=3)
        desk.model.backend.is_ahead = is_ahead
        found = flights(desk)
        closes = [desk.ask(prompt_of(5, seed), 20, guide=Closes(last + 2 * seed, {1, 2, 3}), temperature=temperature, seed=4) for seed in range(2)]
        other = desk.ask(prompt_of(6, 3), 25)
        desk.run()
        texts.append([answer.tokens for answer in (*closes, other)])
        assert any(found) is is_ahead
    assert texts[0] == texts[1] and set(texts[1][0][last + 1:]) <= {1, 2, 3}


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_guide_that_allows_nothing_behind_a_pass_ends_its_request_alone(is_alone):
    desk = Desk(slots=2, drafter=ScriptedDrafter({}))
    desk.loaded.drafter.rests = lambda sequences: len(sequences) > 0 or pytest.fail("nobody is asked about")
    closes = desk.ask(prompt_of(5), 20, guide=Closes(6, set()))
    other = None if is_alone else desk.ask(prompt_of(6, 3), 25)
    desk.run()
    assert closes.finish is FinishReason.ERROR and closes.tokens == expected_text(prompt_of(5), 7)
    assert other is None or other.tokens == expected_text(prompt_of(6, 3), 25)


class Mute(TableGuide):
    """Says nothing of what it constrains: asking for `wanted` fails."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        super().__init__({})

    def __getattribute__(self, name: str):
        if name == object.__getattribute__(self, "wanted"):
            raise RuntimeError("a mistake of its own")
        return super().__getattribute__(name)


@pytest.mark.parametrize("wanted", ["is_open", "may_divert"])
def test_a_guide_that_cannot_say_what_it_constrains_is_waited_for(wanted):
    guide = Mute("none")
    guide.is_open, guide.wanted = True, wanted
    desk = Desk(slots=2)
    desk.model.backend.is_ahead = True
    mute, other = desk.ask(prompt_of(5), 20, guide=guide), desk.ask(prompt_of(6, 3), 25)
    desk.run()
    assert mute.tokens == expected_text(prompt_of(5), 20) and other.tokens == expected_text(prompt_of(6, 3), 25)


def test_a_guide_that_cannot_say_whether_it_is_open_is_asked_for_its_mask():
    guide = Mute("none")
    guide.is_open = True
    assert is_open(None) and is_open(guide)
    guide.wanted = "is_open"
    assert is_open(guide) is False


def test_a_pass_that_cannot_be_started_behind_another_leaves_no_draws_to_the_next_request():
    desk, phases = Desk(slots=1), []

    def fail(batch):
        phases.append(batch.phase)
        if phases.count("decode") == 4:
            raise Q27Error("not this one")

    desk.model.before = fail
    broken = desk.ask(prompt_of(5), 20)
    desk.run()
    desk.model.before = lambda batch: None
    answer = desk.ask(prompt_of(7, 3), 20)
    desk.run()
    assert broken.finish is FinishReason.ERROR and answer.tokens == expected_text(prompt_of(7, 3), 20)


@pytest.mark.parametrize("steps", range(7, 16))
def test_a_cancel_while_it_is_computed_again_gives_everything_back(steps):
    desk = Desk(slots=2, chunk=64)
    liar, other = desk.ask(prompt_of(150), 60, name="liar", guide=Liar({6: (True, (3,), None)})), desk.ask(prompt_of(6, 3), 50)
    for _ in range(steps):
        desk.stepper.step()
    desk.cancel("liar")
    desk.run()
    assert liar.finish is FinishReason.CANCELLED and other.tokens == expected_text(prompt_of(6, 3), 50)


def test_a_drafter_that_rests_lets_passes_go_ahead():
    desk = Desk(slots=2, drafter=ScriptedDrafter({}))
    desk.loaded.drafter.rests = lambda sequences: True
    found = flights(desk)
    answer = desk.ask(prompt_of(5), 20)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(5), 20) and found == [False] + [True] * 18


def test_an_end_of_text_leaves_a_row_in_vain_and_its_slot_to_the_next_request():
    text = expected_text(prompt_of(5), 20)
    end = next(index for index in range(3, 20) if text[index] not in text[:index])
    desk = Desk(slots=2, num_blocks=16)
    first = desk.ask(prompt_of(5), 20, eos=(text[end],))
    second = desk.ask(prompt_of(9, 7), 40)
    third = desk.ask(prompt_of(70, 8), 30)
    desk.run()
    assert first.finish is FinishReason.STOP and first.tokens == text[:end]
    assert second.tokens == expected_text(prompt_of(9, 7), 40) and third.tokens == expected_text(prompt_of(70, 8), 30)


@pytest.mark.parametrize("steps", range(2, 9))
def test_a_cancel_between_two_such_passes_ends_one_request_and_disturbs_nobody(steps):
    desk = Desk(slots=2)
    gone, stays = desk.ask(prompt_of(5), 50, name="gone"), desk.ask(prompt_of(8, 2), 30)
    for _ in range(steps):
        desk.stepper.step()
    desk.cancel("gone")
    late = desk.ask(prompt_of(66, 9), 10)
    desk.run()
    assert gone.finish is FinishReason.CANCELLED and gone.tokens == expected_text(prompt_of(5), 50)[:len(gone.tokens)]
    assert stays.tokens == expected_text(prompt_of(8, 2), 30) and late.tokens == expected_text(prompt_of(66, 9), 10)


def test_the_last_row_in_vain_is_forgotten_when_everybody_has_ended():
    text = expected_text(prompt_of(5), 20)
    desk = Desk(slots=1)
    end = next(index for index in range(3, 20) if text[index] not in text[:index])
    desk.ask(prompt_of(5), 20, eos=(text[end],))
    desk.run()
    desk.stepper.settle(prompt_of(130, 4), 0)
    settle_all(desk)
    answer = desk.submit(Request("again", prompt_of(5), SamplingParams(max_tokens=20)))
    desk.run()
    assert answer.tokens == text


def test_sixteen_streams_leave_no_row_for_drafts_and_go_ahead():
    desk = Desk(slots=16, drafter=ScriptedDrafter({}))
    found = flights(desk)
    answers = [desk.ask(prompt_of(3, seed), 12) for seed in range(16)]
    desk.run()
    assert any(found) and all(answer.tokens == expected_text(prompt_of(3, seed), 12) for seed, answer in enumerate(answers))


def sequences_of(count: int, repeats: bool = False) -> list[Sequence]:
    prompts = [prompt_of(30, seed) + (prompt_of(30, seed)[:20] if repeats else ()) for seed in range(count)]
    return [Sequence(Request(f"r{seed}", prompt, SamplingParams(max_tokens=100)), lambda event: None, 100)
            for seed, prompt in enumerate(prompts)]


def test_looking_for_repeats_rests_until_the_text_repeats():
    drafts = Drafts(None, True, 15, PassPrices())
    assert drafts.rests(sequences_of(3))
    assert not drafts.rests([*sequences_of(2), *sequences_of(1, repeats=True)])
    assert drafts.rests(sequences_of(16, repeats=True))


def test_chains_rest_where_they_do_not_pay_and_are_tried_now_and_then():
    prices = PassPrices()
    for rows in (1, 4, 8, 16):
        prices.record_pass(rows, 4.0 + rows)
    prices.record_step(0.3)
    drafts, sequences = Drafts(NoSteps(), True, 15, prices), sequences_of(4)
    assert not drafts.rests(sequences)
    for sequence in sequences:
        for _ in range(50):
            drafts._state(sequence).mtp.observe(1, 0)
    rested = [drafts.rests(sequences) for _ in range(2 * EXPLORE)]
    assert rested.count(False) > 0 and rested.index(False) == EXPLORE - 1 - 50 % EXPLORE and not any(rested[rested.index(False):])


def test_chains_rest_where_the_few_rows_left_do_not_pay():
    """Rows dear from the ninth on, and a chain: at 10 streams 6 drafts pay, at 14 two do not."""
    prices = PassPrices()
    for rows, ms in ((1, 5.0), (8, 6.0), (9, 8.4), (16, 8.8)):
        prices.record_pass(rows, ms)
    prices.record_step(0.9)
    drafts = Drafts(NoSteps(), False, 15, prices)
    assert [drafts.rests(sequences_of(count)) for count in (4, 8, 10, 14, 15, 16)] == [False, False, False, True, True, True]


def test_who_gets_a_row_more_changes_from_turn_to_turn():
    assert shares_of(10, 4, 0) == [3, 3, 2, 2] and shares_of(10, 4, 1) == [2, 2, 3, 3]
    totals = np.sum([shares_of(5, 11, turn) for turn in range(11)], axis=0)
    assert totals.tolist() == [5] * 11 and shares_of(8, 8, 3) == [1] * 8
