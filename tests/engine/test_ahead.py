"""Chains that are begun before the pass in front of them is known: no bit changes, whatever happens to their sequences."""

from __future__ import annotations

import pytest

from q27app.engine.depth import DepthControl, PassPrices
from q27app.engine.drafts import Drafts
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.weights.synthetic import synthesize
from tests.engine.guides import Closes, Interrupts
from tests.engine.test_drafts import desk_of

TOKENS = 40
KINDS = {
    "greedy": SamplingParams(logprobs=2, max_tokens=TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, logprobs=2, max_tokens=TOKENS, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.9, seed=8, presence_penalty=0.4, logprobs=2, max_tokens=TOKENS, ignore_eos=True),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("dense") / "dense.q27", wiring="dense")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("chain") / "chain.q27", accept=0.85)


def ahead_of(path, draft: str, cap: int, slots: int = 2, fixed: bool = True):
    """A desk whose chains are begun ahead, and a list with the depths of those that a pass took."""
    desk = desk_of(path, draft, cap, fixed, slots)
    drafter, taken = desk.loaded.drafter, []
    drafter.runs_ahead = True
    propose = drafter.propose

    def watched(sequences, limits):
        found = propose(sequences, limits)
        taken.extend(len(drafts) for drafts in found if drafts and drafts[0] < 0)
        return found

    drafter.propose = watched
    return desk, taken


def tell(desk, names) -> list[list]:
    answers = [desk.submit(Request(name, tuple(range(50, 150)), KINDS[name])) for name in names]
    desk.run()
    return [[entry for event in answer.events for entry in event.logprobs] for answer in answers]


@pytest.mark.parametrize("names", [("greedy",), ("seeded",), ("greedy", "seeded"), ("seeded", "penalised")], ids="+".join)
@pytest.mark.parametrize("draft, cap", [("mtp", 1), ("auto", 6)])
def test_no_bit_changes(dense, names, draft, cap):
    desk, taken = ahead_of(dense, draft, cap)
    assert tell(desk, names) == tell(desk_of(dense, "off"), names)
    if "penalised" in names:
        assert not taken, "penalties count drafts that nobody knows yet"
    else:
        assert len(taken) > TOKENS // 2 and max(taken) <= cap


@pytest.mark.parametrize("fixed", [True, False])
def test_chains_of_several_sequences_that_come_and_go(chain, fixed):
    """One is cancelled and one ends while their chains run; one comes in between."""
    desk, taken = ahead_of(chain, "mtp", 6, slots=3, fixed=fixed)
    desk.loaded.drafter.prices.record_step(0.01)
    first = desk.ask((1000, 1001, 1002), 40, "first")
    second = desk.ask((7, 8), 90, "second", eos=(30,))
    third = desk.ask((300, 301), 90, "third")
    while not len(third.tokens) > 6:
        desk.stepper.step()
    desk.cancel("third")
    late = desk.ask((2000, 2001), 30, "late")
    desk.run()
    assert first.tokens == list(range(1003, 1043)) and late.tokens == list(range(2002, 2032))
    assert second.tokens == list(range(9, 30)) and second.finish is FinishReason.STOP
    assert third.tokens == list(range(302, 302 + len(third.tokens)))
    assert len(taken) > 5


@pytest.mark.parametrize("guide", [Interrupts, Closes])
@pytest.mark.parametrize("wiring", ["dense", "chain"])
def test_a_guide_that_says_something_itself_changes_nothing(request, wiring, guide):
    path, texts = request.getfixturevalue(wiring), []
    for desk, taken in (ahead_of(path, "mtp", 4), (desk_of(path, "mtp", 4), None), (desk_of(path, "off"), None)):
        answers = [desk.submit(Request(name, tuple(range(50, 90)), KINDS[name], guide())) for name in ("greedy", "seeded")]
        desk.run()
        texts.append([[entry for event in answer.events for entry in event.logprobs] for answer in answers])
        assert taken is None or len(taken) > 6
    assert texts[0] == texts[2] and texts[1] == texts[2]


def test_a_text_that_repeats_is_not_drafted_ahead(chain):
    desk, taken = ahead_of(chain, "auto", 8)
    answer = desk.submit(Request("copy", tuple(range(100, 160)) + tuple(range(100, 110)), SamplingParams(max_tokens=48)))
    desk.run()
    assert answer.tokens == list(range(110, 158)) and not taken
    assert sum(desk.loaded.drafter.to_dict()["sources"]["suffix"]["accepted"]) > 30


def test_what_ran_ahead_of_a_pass_is_not_part_of_its_price(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("q27app.engine.drafts.time.monotonic", lambda: clock[0])
    prices = PassPrices()
    prices.record_step(0.5)
    drafter = Drafts(None, False, 8, prices)
    drafter.passed(1, 4.0)
    clock[0] += 0.009
    drafter._landed_steps = 6
    drafter.passed(7, 8.0)
    assert prices.pass_ms(7) == pytest.approx(6.0)
    clock[0] += 0.1   # something else ran between the two
    drafter._landed_steps = 6
    drafter.passed(7, 80.0)
    assert prices.pass_ms(7) == pytest.approx(6.0)


def test_deeper_drafts_are_first_thought_as_good_as_shallower_ones():
    control = DepthControl(15)
    for _ in range(40):
        control.observe(4, 4)
    assert control.shares[3] > 0.9 and control.shares[14] > 0.9
    for _ in range(40):
        control.observe(6, 4)
    assert control.shares[3] > 0.9 and control.shares[4] < 0.2
    prices = PassPrices()
    for rows in (1, 8, 16):
        prices.record_pass(rows, 4.0 + 0.1 * rows)
    prices.record_step(0.3)
    assert control.choose(prices, 15, True) in (4, 5)


def test_one_that_repeats_beside_one_that_does_not(chain):
    desk, taken = ahead_of(chain, "auto", 7)
    copies = desk.submit(Request("copy", tuple(range(100, 190)) + tuple(range(100, 113)), SamplingParams(max_tokens=77)))
    goes_on = desk.submit(Request("on", tuple(range(1000, 1040)), SamplingParams(max_tokens=60)))
    desk.run()
    assert copies.tokens == list(range(113, 190)) and goes_on.tokens == list(range(1040, 1100))
    assert len(taken) > 4 and sum(desk.loaded.drafter.to_dict()["sources"]["suffix"]["accepted"]) > 50
