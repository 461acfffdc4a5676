"""Decode passes that are started before the one in front of them is known: who gets one, and that nothing else changes."""

from __future__ import annotations

import pytest

from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.kernels.batch import Batch
from tests.engine.conversations import settle_all
from tests.engine.toy import VOCAB, Desk, ScriptedDrafter, TableGuide, expected_text, mix


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
    options = {"guide": {"guide": TableGuide()}, "penalty": {"presence_penalty": 0.5}, "logprobs": {"logprobs": 2}}.get(what, {})
    desk.ask(prompt_of(5), 20, **options)
    other = desk.ask(prompt_of(6, 3), 20)
    desk.run()
    assert not any(found[:-1]) and other.tokens == expected_text(prompt_of(6, 3), 20)


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
