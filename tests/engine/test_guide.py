"""What a guide decides, and end-of-text: the same text and the same state however tokens come in runs."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine.cut import cut_run
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.engine.sequence import Sequence
from tests.engine.toy import VOCAB, Desk, Say, ScriptedDrafter, TableGuide, expected_text, mix

PROMPT = tuple(mix(11, index) % VOCAB for index in range(50))
TEXT = expected_text(PROMPT, 60)


def run_both(make_guide, *, max_tokens=60, eos=(), then=None):
    """(answer without drafts, answer with). Both must tell the same; then: what follows forced tokens, for the drafter."""
    plain = Desk()
    first = plain.ask(PROMPT, max_tokens, "a", make_guide(), eos)
    plain.run()
    told = [(event.tokens, event.forced) for event in first.events if event.tokens]
    flat = [pair for tokens, forced in told for pair in zip(tokens, forced)]
    answers = [first]
    for width in (1, 4, 15):
        script = {"a": first.tokens + (then or TEXT[len(first.tokens):])}
        desk = Desk(drafter=ScriptedDrafter(script, width=lambda name, index: width))
        again = desk.ask(PROMPT, max_tokens, "a", make_guide(), eos)
        desk.run()
        assert again.tokens == first.tokens and again.finish is first.finish
        assert list(zip(again.tokens, again.forced)) == flat
        answers.append(again)
    return answers


@pytest.mark.parametrize("index", [0, 1, 7, 30])
def test_a_stop_in_the_middle_of_an_accepted_run_cuts_exactly(index):
    answers = run_both(lambda: TableGuide({index: (True, (), "stop")}))
    assert answers[0].tokens == TEXT[:index + 1] and answers[0].finish is FinishReason.STOP


@pytest.mark.parametrize("index", [0, 5, 20])
def test_a_dropped_token_was_never_there(index):
    answers = run_both(lambda: TableGuide({index: (False, (), "length")}))
    assert answers[0].tokens == TEXT[:index] and answers[0].finish is FinishReason.LENGTH


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("index", [0, 3, 10])
@pytest.mark.parametrize("force", [(1,), (2, 3, 4), tuple(range(1, 36))])
def test_forced_tokens_follow_and_the_text_goes_on_from_them(keeps, index, force):
    before = TEXT[:index + keeps] + list(force)
    rest = expected_text(PROMPT + tuple(before), 60 - len(before))
    answers = run_both(lambda: TableGuide({index: (keeps, force, None)}))
    assert answers[0].tokens == before + rest
    assert answers[0].forced == [False] * (index + keeps) + [True] * len(force) + [False] * len(rest)
    assert answers[1].last.stats.num_accepted > 0


def test_a_guide_may_force_again_and_again():
    answers = run_both(lambda: TableGuide({0: (False, (7,), None), 1: (False, (8, 9), None), 4: (True, (10,), "stop")}))
    rest = expected_text(PROMPT + (7, 8, 9), 3)
    assert answers[0].tokens == [7, 8, 9, *rest, 10]


def test_forced_tokens_end_at_max_tokens():
    answers = run_both(lambda: TableGuide({2: (True, (1, 2, 3, 4), None)}), max_tokens=5)
    assert answers[0].tokens == TEXT[:3] + [1, 2] and answers[0].finish is FinishReason.LENGTH


def test_forced_tokens_beside_drafting_sequences_take_their_turn():
    texts = {f"r{seed}": expected_text((seed, 1, 2), 50) for seed in range(3)}
    desk = Desk(slots=4, drafter=ScriptedDrafter(texts))
    force = tuple(range(20))
    answer = desk.ask(PROMPT, 60, "forced", TableGuide({4: (False, force, None)}))
    others = [desk.ask((seed, 1, 2), 50, f"r{seed}") for seed in range(3)]
    desk.run()
    before = TEXT[:4] + list(force)
    assert answer.tokens == before + expected_text(PROMPT + tuple(before), 60 - len(before))
    assert [other.tokens for other in others] == [texts[f"r{seed}"] for seed in range(3)]
    assert any(batch.phase == "verify" and np.diff(batch.row_starts).max() > 5 for batch in desk.model.passes)


def first_at(text, index):
    """A token id whose first occurrence in text is at or after index, and that place."""
    return next((token, place) for place, token in enumerate(text) if place >= index and token not in text[:place])


@pytest.mark.parametrize("index", [0, 1, 9])
def test_end_of_text_ends_the_request_and_is_no_part_of_it(index):
    eos, place = first_at(TEXT, index)
    answers = run_both(lambda: None, eos=(eos,))
    assert answers[0].tokens == TEXT[:place] and answers[0].finish is FinishReason.STOP


def test_end_of_text_inside_an_accepted_run_is_cut_even_if_the_drafter_ran_past_it():
    eos, place = first_at(TEXT, 6)
    alone = Sequence(Request("a", PROMPT, SamplingParams(max_tokens=60), eos_ids=(eos,)), lambda event: None, 60)
    cut = cut_run(alone, TEXT[:place + 4], VOCAB)
    assert (cut.keep, cut.finish, cut.num_rows) == (place, FinishReason.STOP, place + 1)


def test_ignored_end_of_text_is_text():
    eos, _ = first_at(TEXT, 3)
    desk = Desk()
    answer = desk.ask(PROMPT, 60, eos=(eos,), ignore_eos=True)
    desk.run()
    assert answer.tokens == TEXT


def test_a_guide_that_keeps_end_of_text_does_not_make_it_text():
    eos, place = first_at(TEXT, 5)
    answers = run_both(lambda: TableGuide(), eos=(eos,))
    assert answers[0].tokens == TEXT[:place] and answers[0].finish is FinishReason.STOP


def test_a_guide_may_go_on_after_end_of_text():
    eos, place = first_at(TEXT, 5)
    before = TEXT[:place] + [1, 2]
    answers = run_both(lambda: TableGuide({place: (False, (1, 2), None)}), eos=(eos,), max_tokens=place + 5)
    rest = expected_text(PROMPT + tuple(before), 3)
    cut = next((index for index, token in enumerate(rest) if token == eos), 3)
    assert answers[0].tokens == before + rest[:cut]


def test_masks_hold_at_every_row_and_drafts_that_they_forbid_are_not_run():
    def mask_at(index):
        return None if index % 3 == 0 else set(range(index % 7, VOCAB, 2))

    plain = Desk()
    first = plain.ask(PROMPT, 50, "a", TableGuide(mask_at=mask_at))
    plain.run()
    assert first.tokens != TEXT[:50] and all(
        mask_at(index) is None or token in mask_at(index) for index, token in enumerate(first.tokens))
    wrong = [(token + 1) % VOCAB if index % 4 == 3 else token for index, token in enumerate(first.tokens)]
    for script in (first.tokens, wrong):
        desk = Desk(drafter=ScriptedDrafter({"a": script}))
        again = desk.ask(PROMPT, 50, "a", TableGuide(mask_at=mask_at))
        desk.run()
        assert again.tokens == first.tokens and again.last.stats.num_accepted > 10


def test_a_masked_sequence_leaves_its_companions_free():
    desk = Desk(slots=2)
    masked = desk.ask(PROMPT, 30, guide=TableGuide(mask_at=lambda index: {3, 4}))
    free = desk.ask(PROMPT, 30)
    desk.run()
    assert set(masked.tokens) <= {3, 4} and free.tokens == TEXT[:30]


class Broken(TableGuide):
    """Fails at a token: in advance or in mask, or says what no guide may say."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.is_open = fault, False

    def advance(self, tokens):
        decision = super().advance(tokens)
        if self.seen <= 4:
            return decision
        if self.fault == "raise":
            raise ValueError("bad tool")
        return {"drop": Say(len(tokens) - 1), "many": Say(99), "ids": Say(len(tokens), (VOCAB,)),
                "finish": Say(len(tokens), (), "cancelled")}.get(self.fault, decision)

    def mask(self, prefix):
        if self.fault == "mask" and self.seen > 4:
            raise ValueError("bad mask")
        if self.fault == "none" and self.seen > 4:
            return np.zeros(-(-VOCAB // 32), np.uint32)
        if self.fault == "padding" and self.seen > 4:
            return np.array([0, 1 << 31], np.uint32)
        return np.full(1, 1, np.uint32) if self.fault == "shape" and self.seen > 4 else None


@pytest.mark.parametrize("fault", ["raise", "drop", "many", "ids", "finish", "mask", "none", "padding", "shape"])
@pytest.mark.parametrize("width", [0, 3])
def test_a_guide_that_fails_ends_its_own_request_only(fault, width):
    drafter = ScriptedDrafter({"a": TEXT, "b": TEXT}, width=lambda name, index: width) if width else None
    desk = Desk(slots=2, drafter=drafter)
    bad, good = desk.ask(PROMPT, 40, "a", Broken(fault)), desk.ask(PROMPT, 40, "b")
    desk.run()
    assert bad.finish is FinishReason.ERROR and bad.last.error is not None
    assert bad.tokens == TEXT[:len(bad.tokens)] and len(bad.tokens) < 20
    assert good.tokens == TEXT[:40]


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("keeps", [True, False])
def test_after_a_cut_the_state_holds_the_kept_tokens_and_nothing_else(keeps, index):
    """Looked at when the sequence ends: the slot's hash is that of the computed tokens, all of them kept ones."""
    for drafter in (None, ScriptedDrafter({"a": TEXT})):
        desk = Desk(drafter=drafter)
        desk.model.backend.is_ahead = False   # a pass behind the last one leaves a row in vain, which nobody reads
        held = {}
        finish = desk.stepper._scheduler.finish

        def look(sequence, reason, error=None):
            held["slot"], held["computed"] = desk.state.get_slot(sequence.slot), sequence.num_computed
            held["tokens"] = list(sequence.tokens)
            finish(sequence, reason, error)

        desk.stepper._scheduler.finish = look
        desk.ask(PROMPT, 60, "a", TableGuide({index: (keeps, (), "stop")}))
        desk.run()
        expected = 0
        for token in held["tokens"][:held["computed"]]:
            expected = mix(expected, token)
        assert held["slot"] == (expected, held["computed"])
        assert held["computed"] <= len(PROMPT) + index + keeps
