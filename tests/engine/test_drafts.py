"""Drafts on the real network change no bit of text or log probability; what they learn; what they cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from q27app.chat.guide import Decision
from q27app.engine.depth import EXPLORE, DepthControl, PassPrices
from q27app.engine.loading import EngineConfig, check_config, open_model
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import UsageError
from q27app.model.mtp import rare_ids
from q27app.paths import demo_model
from q27app.weights.synthetic import synthesize
from tests.engine.toy import Desk, mix

TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(logprobs=2, max_tokens=TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, presence_penalty=0.3, logprobs=2, max_tokens=TOKENS,
                             ignore_eos=True),
}
ALLOWED = (5, 6)
PROMPT = tuple(ALLOWED[mix(3, place) % 2] for place in range(100))
"""Only two ids, in prompt and answer, so that runs repeat and the suffix drafter is sometimes right, sometimes wrong."""


class NarrowGuide:
    """Allows the two ids and nothing else."""

    def advance(self, tokens):
        return Decision(len(tokens))

    def mask(self, prefix):
        words = np.zeros(2560 // 32, np.uint32)
        for token in ALLOWED:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("dense") / "dense.q27", wiring="dense")


@pytest.fixture(scope="module", params=[0.0, 0.5, 0.85, 1.0])
def chain(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "chain.q27"
    return request.param, synthesize(path, accept=request.param)


def desk_of(path, draft: str, cap: int = 15, fixed: bool = True, slots: int = 2, common_ids: int | None = None) -> Desk:
    config = EngineConfig(path, "numpy", context=512, slots=slots, draft=draft, max_draft=cap, fixed_draft=fixed, common_ids=common_ids)
    desk = Desk(open_model(config, lambda share: None))
    if desk.loaded.drafter is not None:
        desk.loaded.drafter.min_match = 4
    return desk


def tell(desk: Desk, params=PARAMS, is_narrow: bool = True) -> dict[str, list]:
    answers = {name: desk.submit(Request(name, PROMPT, one, NarrowGuide() if is_narrow else None))
               for name, one in params.items()}
    desk.run()
    assert all(answer.finish is FinishReason.LENGTH for answer in answers.values())
    return {name: [entry for event in answer.events for entry in event.logprobs] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def plain(dense) -> dict[str, list]:
    return tell(desk_of(dense, "off"))


@pytest.mark.parametrize("cap", [1, 6])
def test_the_draft_layer_changes_no_bit(dense, cap):
    desk = desk_of(dense, "mtp", cap)
    assert tell(desk, is_narrow=False) == tell(desk_of(dense, "off"), is_narrow=False)
    assert sum(desk.loaded.drafter.to_dict()["sources"]["mtp"]["drafted"]) > TOKENS


@pytest.mark.parametrize("draft, cap", [("suffix", 8), ("auto", 15)])
def test_repeats_change_no_bit(dense, plain, draft, cap):
    desk = desk_of(dense, draft, cap)
    assert tell(desk) == plain
    sources = desk.loaded.drafter.to_dict()["sources"]
    drafted = sum(sum(counts["drafted"]) for counts in sources.values())
    accepted = sum(sum(counts["accepted"]) for counts in sources.values())
    assert 0 < accepted < drafted


def test_measured_depths_change_no_bit(dense, plain):
    assert tell(desk_of(dense, "auto", fixed=False)) == plain


@pytest.mark.long
@pytest.mark.parametrize("cap", [1, 4, 8, 15])
@pytest.mark.parametrize("draft", ["mtp", "suffix", "auto"])
def test_drafts_change_no_bit_over_200_tokens(dense, draft, cap, long_scale):
    count = max(TOKENS, round(200 * long_scale))
    params = {name: SamplingParams(temperature=one.temperature, top_p=one.top_p, seed=one.seed, logprobs=2,
                                   max_tokens=count, ignore_eos=True) for name, one in PARAMS.items()}
    assert tell(desk_of(dense, draft, cap), params) == tell(desk_of(dense, "off"), params)


@pytest.mark.long
@pytest.mark.parametrize("cap", [1, 4, 8, 15])
def test_drafts_change_no_bit_of_the_bundled_model(cap, long_scale):
    count = max(12, round(200 * long_scale))
    params = {name: replace(one, max_tokens=count) for name, one in PARAMS.items()}
    demo = demo_model()
    assert tell(desk_of(demo, "auto", cap), params, False) == tell(desk_of(demo, "off"), params, False)


def test_a_chain_is_told_right_whatever_share_of_drafts_is(chain):
    share, path = chain
    desk = desk_of(path, "mtp", cap=4)
    answer = desk.submit(Request("chain", (100, 101, 102), SamplingParams(max_tokens=60)))
    desk.run()
    assert answer.tokens == list(range(103, 163))
    stats = answer.last.stats
    accepted_a_step = stats.num_accepted / stats.num_steps
    expected = sum(share**depth for depth in range(1, 5))
    assert accepted_a_step == pytest.approx(expected, abs=0.15 + 0.25 * expected)


def test_two_chains_of_drafts_share_a_pass(chain):
    share, path = chain
    desk = desk_of(path, "mtp", cap=6)
    first = desk.submit(Request("a", (1000, 1001, 1002), SamplingParams(max_tokens=40)))
    second = desk.submit(Request("b", (7, 8), SamplingParams(max_tokens=33)))
    desk.run()
    assert first.tokens == list(range(1003, 1043)) and second.tokens == list(range(9, 42))
    if share == 1.0:
        assert first.last.stats.num_steps < 10


def test_end_of_text_inside_an_accepted_run_ends_the_text(chain):
    _, path = chain
    desk = desk_of(path, "auto", cap=8)
    answer = desk.submit(Request("ends", (100, 101), SamplingParams(max_tokens=60), eos_ids=(120,)))
    desk.run()
    assert answer.tokens == list(range(102, 120)) and answer.finish is FinishReason.STOP


def test_a_text_that_repeats_needs_few_passes(chain):
    """The prompt holds what the text will say, so the suffix drafter knows it."""
    _, path = chain
    desk = desk_of(path, "suffix", cap=8)
    answer = desk.submit(Request("copy", tuple(range(100, 160)) + tuple(range(100, 110)), SamplingParams(max_tokens=48)))
    desk.run()
    assert answer.tokens == list(range(110, 158))
    assert answer.last.stats.num_steps <= 48 // 9 + 2


def test_drafts_are_narrow_while_the_text_has_few_rare_ids(chain):
    """Ids from 256 on are rare here: the text begins below them and goes on beyond."""
    share, path = chain
    desk = desk_of(path, "mtp", cap=4, common_ids=256)
    model, narrow = desk.loaded.model, []
    assert model.rare_ids == (256, 2048) and desk_of(path, "mtp").loaded.model.rare_ids == (0, 0)
    draft_chain = model.draft_chain

    def watched(batch, state, first, steps, rows, limits, is_narrow):
        drafted = draft_chain(batch, state, first, steps, rows, limits, is_narrow)
        narrow.append(is_narrow)
        assert not is_narrow or ((drafted.tokens < 256) | (drafted.tokens >= 2048)).all()
        return drafted

    model.draft_chain = watched
    answer = desk.submit(Request("far", tuple(range(3, 203)), SamplingParams(max_tokens=200)))
    desk.run()
    assert answer.tokens == list(range(203, 403))
    assert narrow[0] and not narrow[-1] and narrow == sorted(narrow, reverse=True)
    prices = desk.loaded.drafter.to_dict()["prices"]
    assert prices["step_ms"] > 0 and prices["whole_step_ms"] > 0


@pytest.mark.parametrize("cap", [3, 15])
def test_narrow_drafts_change_no_bit(dense, cap):
    desk = desk_of(dense, "auto", cap, common_ids=64)
    assert desk.loaded.model.rare_ids[1]
    assert tell(desk, is_narrow=False) == tell(desk_of(dense, "off"), is_narrow=False)
    assert sum(desk.loaded.drafter.to_dict()["sources"]["mtp"]["drafted"]) > TOKENS


def test_rare_ids_are_those_between_the_first_and_the_last():
    assert rare_ids(248_320) == (98_304, 247_808)
    assert rare_ids(151_936) == (98_304, 151_424)
    for vocab_size, common_ids in ((2_560, None), (98_816, None), (248_320, 0), (248_320, 240_000)):
        assert rare_ids(vocab_size, common_ids) == (0, 0)


def test_depth_follows_acceptance_and_price():
    prices = PassPrices()
    for rows in (1, 2, 4, 8, 16):
        prices.record_pass(rows, 4.0 + 0.05 * rows)
    prices.record_step(0.3)
    good, bad = DepthControl(15), DepthControl(15)
    for _ in range(200):
        good.observe(15, 15)
        bad.observe(15, 0)
    good._num_steps = bad._num_steps = 0
    assert good.choose(prices, 15, needs_steps=True) >= 12
    assert bad.choose(prices, 15, needs_steps=True) == 0
    assert good.choose(prices, 3, needs_steps=True) == 3


def test_dear_rows_make_shallow_drafts():
    prices = PassPrices()
    prices.record_pass(1, 4.0)
    prices.record_pass(8, 32.0)
    assert DepthControl(15).choose(prices, 15, needs_steps=False) == 0


H200 = {1: 5.14, 2: 5.52, 3: 6.10, 4: 6.25, 5: 6.26, 6: 6.36, 7: 6.42, 8: 6.52, 9: 8.30, 10: 8.35, 11: 8.38, 12: 8.43, 13: 8.51, 14: 8.54,
        15: 8.61, 16: 8.71}
"""Milliseconds of a pass of the 27B by its rows (docs/measurements.md); a step of a chain takes 0.169."""


def speed(accept, fixed: int | None = None, count: int = 6000, seed: int = 3) -> float:
    """Tokens a second of a text whose drafts are right by chance, accept(tokens so far) of them."""
    prices, control, rng, tokens, ms = PassPrices(), DepthControl(15), Random(seed), 0, 0.0
    for rows, price in H200.items():
        prices.record_pass(rows, price)
    prices.record_step(0.169)
    while tokens < count:
        depth, share, right = control.choose(prices, 15, True) if fixed is None else fixed, accept(tokens), 0
        while right < depth and rng.random() < share:
            right += 1
        tokens, ms = tokens + 1 + right, ms + H200[1 + depth] + 0.169 * depth
        if depth:
            control.observe(depth, right)
        else:
            control.rested()
    return 1e3 * tokens / ms


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85, 1.0])
def test_measured_depth_is_about_as_fast_as_the_best_fixed_one(share):
    def usual(fixed: int | None = None) -> float:
        return float(np.mean([speed(lambda tokens: share, fixed, seed=seed) for seed in range(3)]))

    assert usual() > 0.98 * max(map(usual, range(16)))


def test_measured_depth_follows_a_text_that_changes():
    def accept(tokens: int) -> float:
        return 0.95 if tokens // 300 % 2 else 0.3

    assert speed(accept) > max(speed(accept, fixed) for fixed in range(16))


def test_company_makes_rows_dearer():
    prices = PassPrices()
    for rows, ms in ((1, 4.0), (8, 4.4), (9, 9.0), (16, 9.5)):
        prices.record_pass(rows, ms)
    prices.record_step(0.2)
    assert DepthControl(15).choose(prices, 1, True, sequences=8) == 0
    assert DepthControl(15).choose(prices, 1, True, sequences=4) == 1


class WrongDrafter:
    """Drafts that nobody accepts."""

    needs_mtp = True

    def propose(self, sequences, limits):
        return [[(7 * sequence.num_computed + place) % 2560 for place in range(min(limit, 5))]
                for sequence, limit in zip(sequences, limits, strict=True)]

    def go_ahead(self, sequences, drafted): ...
    def prompts_end(self, sequences): ...
    def rests(self, sequences): return False
    def observe(self, sequence, num_drafted, num_accepted): ...
    def passed(self, rows, ms): ...


def test_the_state_after_rejected_drafts_is_that_of_never_having_drafted(dense):
    states = []
    for drafter in (None, WrongDrafter()):
        desk = desk_of(dense, "mtp")
        desk.loaded.drafter = None if drafter is None else drafter
        desk = Desk(desk.loaded)
        desk.stepper._runner.warm_mtp = True
        answer, seen = desk.submit(Request("r", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True))), []
        while answer.finish is None:
            desk.stepper.step()
            if desk.sequences["r"].slot >= 0:
                seen.append(desk.loaded.state.export_slot(desk.sequences["r"].slot).tobytes())
        assert answer.last.stats.num_accepted == 0 and (drafter is None) == (answer.last.stats.num_drafted == 0)
        states.append(seen)
    assert states[0] == states[1] and len(set(states[0])) > 10


def test_a_request_counts_its_drafts_by_source_and_depth(chain):
    share, path = chain
    desk = desk_of(path, "mtp", cap=3)
    answer = desk.submit(Request("counted", (100, 101, 102), SamplingParams(max_tokens=60)))
    desk.run()
    (count,), stats = answer.last.stats.drafts, answer.last.stats
    assert count.source == "mtp" and len(count.drafted) == 3 == len(count.accepted)
    assert sum(count.drafted) == stats.num_drafted and sum(count.accepted) == stats.num_accepted
    if share == 1.0:
        assert count.accepted == count.drafted


def test_a_rejected_drafter_is_tried_again_now_and_then():
    prices, control = PassPrices(), DepthControl(4)
    prices.record_pass(1, 1.0)
    prices.record_pass(4, 4.0)
    depths = []
    for _ in range(3 * EXPLORE):
        depths.append(control.choose(prices, 4, needs_steps=True))
        control.observe(depths[-1], 0)
    assert sum(depths[EXPLORE:]) >= 2 and max(depths[EXPLORE:]) == 1


@pytest.mark.parametrize("wishes", [{"draft": "guess"}, {"max_draft": 0}, {"max_draft": 16}])
def test_senseless_wishes_are_usage_errors(wishes):
    with pytest.raises(UsageError):
        check_config(EngineConfig("x.q27", **wishes))


@pytest.mark.parametrize("fast", [False, True])
def test_the_smaller_head_decides_only_when_asked(fast, tmp_path_factory):
    path = tmp_path_factory.mktemp("heads") / "two.q27"
    synthesize(path, tier="default", accept=1.0)
    loaded = open_model(EngineConfig(path, "numpy", context=256, slots=1, fast_head=fast, draft="mtp", max_draft=4), lambda share: None)
    weights = loaded.model.weights
    assert (weights.head is weights.draft_head) == fast and weights.mtp.head is weights.draft_head
    desk = Desk(loaded)
    answer = desk.submit(Request("r", (100, 101, 102), SamplingParams(max_tokens=12)))
    desk.run()
    assert answer.tokens == list(range(103, 115)) and answer.last.stats.num_accepted
