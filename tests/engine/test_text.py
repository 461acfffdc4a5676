"""A request's text is that of a cold, solitary run: whatever runs beside it, however it is cut into passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine.request import FinishReason, Request, SamplingParams
from tests.engine.toy import VOCAB, Desk, ScriptedDrafter, expected_text, load_toy, mix


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(mix(seed, index) % VOCAB for index in range(length))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
def test_text_follows_from_its_definition(length):
    desk = Desk()
    answer = desk.ask(prompt_of(1, length), 70)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(1, length), 70)
    assert answer.finish is FinishReason.LENGTH and answer.last.stats.num_generated == 70


def test_seeded_text_follows_from_seed_and_position_alone():
    params = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=77, max_tokens=40)
    desk = Desk(slots=3)
    first = desk.submit(Request("a", prompt_of(2, 70), params))
    other = desk.ask(prompt_of(3, 10), 40, temperature=1.5, seed=78)
    desk.run()
    assert first.tokens == expected_text(prompt_of(2, 70), 40, params)
    assert other.tokens != expected_text(prompt_of(3, 10), 40)


def test_forty_requests_over_sixteen_slots_each_get_their_own_text():
    desk = Desk(slots=16, max_context=192)
    answers = {seed: desk.ask(prompt_of(seed, 1 + seed * 3), 30) for seed in range(40)}
    desk.run()
    for seed, answer in answers.items():
        assert answer.tokens == expected_text(prompt_of(seed, 1 + seed * 3), 30)


def test_a_decode_pass_takes_sixteen_rows_and_twenty_sequences_take_two():
    desk = Desk(slots=20, max_context=64)
    for seed in range(20):
        desk.ask(prompt_of(seed, 3), 4)
    desk.run()
    decodes = [batch.num_rows for batch in desk.model.passes if batch.phase == "decode"]
    assert max(decodes) == 16
    assert (16, 4) in list(zip(decodes, decodes[1:]))


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("width", [1, 3, 15])
def test_drafts_never_change_greedy_or_seeded_text(accuracy, width):
    settings_of = {"a": dict(), "b": dict(temperature=1.2, seed=5), "c": dict(temperature=2.0, top_p=0.8, seed=6)}
    plain = Desk(slots=3)
    for index, (name, params) in enumerate(settings_of.items()):
        plain.ask(prompt_of(index, 30 + 40 * index), 60, name, **params)
    plain.run()
    texts = {name: answer.tokens for name, answer in plain.answers.items()}
    drafter = ScriptedDrafter(texts, lambda name, index: mix(index, len(name), 3) % 1000 < 1000 * accuracy,
                              lambda name, index: width)
    desk = Desk(slots=3, drafter=drafter)
    for index, (name, params) in enumerate(settings_of.items()):
        desk.ask(prompt_of(index, 30 + 40 * index), 60, name, **params)
    desk.run()
    assert {name: answer.tokens for name, answer in desk.answers.items()} == texts
    stats = desk.answers["a"].last.stats
    assert stats.num_drafted > 0 and stats.num_accepted <= stats.num_drafted
    if accuracy in (0.0, 1.0):
        assert stats.num_accepted == accuracy * stats.num_drafted
    assert {batch.phase for batch in desk.model.passes} >= {"prefill", "verify"}


def test_state_after_rejected_drafts_is_that_of_never_having_drafted():
    prompt = prompt_of(9, 40)
    texts = {"a": expected_text(prompt, 60)}
    held = []
    for drafter in (None, ScriptedDrafter(texts, lambda name, index: mix(index) % 3 > 0)):
        desk = Desk(drafter=drafter)
        desk.model.backend.is_ahead = False   # else the state is a row further than anybody knows
        desk.ask(prompt, 60, "a")
        states = {}
        while desk.stepper.has_work:
            desk.stepper.step()
            sequence = desk.sequences["a"]
            if not sequence.is_finished:
                states[sequence.num_computed] = desk.state.get_slot(sequence.slot)
        held.append(states)
    shared = held[0].keys() & held[1].keys()
    assert len(held[1]) < len(held[0]) and len(shared) > 10
    assert {at: held[0][at] for at in shared} == {at: held[1][at] for at in shared}


def test_rows_left_over_are_shared_alike_between_drafting_sequences():
    texts = {f"r{seed}": expected_text(prompt_of(seed, 5), 60) for seed in range(3)}
    desk = Desk(slots=3, drafter=ScriptedDrafter(texts))
    for seed in range(3):
        desk.ask(prompt_of(seed, 5), 60, f"r{seed}")
    desk.run()
    widest = max((batch for batch in desk.model.passes if batch.phase == "verify"), key=lambda batch: batch.num_seqs)
    assert sorted(np.diff(widest.row_starts).tolist()) == [5, 5, 6]


def test_drafts_stop_at_max_tokens_and_at_the_window():
    prompt = prompt_of(4, 100)
    texts = {"a": expected_text(prompt, 28), "b": expected_text(prompt, 28)}
    desk = Desk(slots=2, max_context=128, drafter=ScriptedDrafter(texts))
    limited, window = desk.ask(prompt, 5, "a"), desk.ask(prompt, 1000, "b")
    desk.run()
    assert limited.tokens == texts["a"][:5] and window.tokens == texts["b"]
    assert window.finish is FinishReason.LENGTH
    assert max(int(batch.positions.max()) for batch in desk.model.passes) < 127


def test_penalties_count_generated_tokens_and_are_the_same_with_drafts():
    prompt = (5,) * 30
    params = dict(presence_penalty=3.0, frequency_penalty=1.0)
    plain = Desk()
    first = plain.ask(prompt, 80, "a", **params)
    plain.run()
    assert first.tokens != expected_text(prompt, 80)
    assert first.tokens[0] == expected_text(prompt, 1)[0], "the prompt is not counted"
    assert len(set(first.tokens)) > len(set(expected_text(prompt, 80)))
    desk = Desk(drafter=ScriptedDrafter({"a": first.tokens}, lambda name, index: index % 5 > 0))
    again = desk.ask(prompt, 80, "a", **params)
    desk.run()
    assert again.tokens == first.tokens and again.last.stats.num_accepted > 20


def test_logprobs_belong_to_their_tokens_with_and_without_drafts():
    prompt = prompt_of(6, 20)
    plain = Desk()
    first = plain.ask(prompt, 40, "a", logprobs=3)
    plain.run()
    entries = [entry for event in first.events for entry in event.logprobs]
    assert [entry.token for entry in entries] == first.tokens
    assert all(entry.top_ids[0] == entry.token and entry.top_logprobs[0] == pytest.approx(entry.logprob)
               for entry in entries) and all(len(entry.top_ids) == 3 for entry in entries)
    desk = Desk(drafter=ScriptedDrafter({"a": first.tokens}, lambda name, index: index % 4 > 0))
    again = desk.ask(prompt, 40, "a", logprobs=3)
    desk.run()
    assert [entry for event in again.events for entry in event.logprobs] == entries


@pytest.mark.parametrize("length", [1, 64, 150])
def test_prompt_logits_come_once_and_whole(length):
    desk = Desk(chunk=128)
    beside = desk.ask(prompt_of(8, 90), 5)
    answer = desk.submit(Request("a", prompt_of(1, length), SamplingParams(max_tokens=3), prompt_logits=True))
    desk.run()
    given = [event.prompt_logits for event in answer.events if event.prompt_logits is not None]
    assert len(given) == 1 and given[0].shape == (length, VOCAB)
    greedy = [expected_text(prompt_of(1, length)[:count], 1)[0] for count in range(1, length + 1)]
    assert given[0].argmax(-1).tolist() == greedy
    assert answer.tokens == expected_text(prompt_of(1, length), 3) and beside.tokens == expected_text(prompt_of(8, 90), 5)


def test_prompt_logits_come_without_any_token_too():
    desk = Desk()
    answer = desk.submit(Request("a", prompt_of(1, 70), SamplingParams(max_tokens=0), prompt_logits=True))
    desk.run()
    assert answer.finish is FinishReason.LENGTH and answer.tokens == []
    assert any(event.prompt_logits is not None for event in answer.events)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 150), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
    ),
    min_size=1, max_size=30)


def play(actions, slots, chunk, num_blocks, seed):
    """Run the actions on a desk with a half-right drafter; every text is compared with its definition."""
    texts, expected, cancelled = {}, {}, set()
    drafter = ScriptedDrafter(texts, lambda name, index: mix(index, seed) % 3 > 0,
                              lambda name, index: mix(index, 9, seed) % 9)
    desk = Desk(load_toy(slots, 256, num_blocks, chunk, drafter))
    for action in actions:
        if action[0] == "submit":
            _, length, count, is_drawn = action
            name, prompt = f"r{len(expected)}", prompt_of(len(expected) + seed, length)
            params = SamplingParams(temperature=1.5 * is_drawn, seed=length, max_tokens=count)
            texts[name] = expected[name] = expected_text(prompt, count, params) if count else []
            desk.submit(Request(name, prompt, params))
        elif action[0] == "cancel" and expected:
            name = f"r{action[1] % len(expected)}"
            if not desk.sequences[name].is_finished:
                cancelled.add(name)
            desk.cancel(name)
        elif action[0] == "steps":
            for _ in range(action[1]):
                desk.stepper.step()
    desk.run()
    for name, answer in desk.answers.items():
        if name in cancelled:
            assert answer.finish is FinishReason.CANCELLED
            assert answer.tokens == expected[name][:len(answer.tokens)]
        else:
            assert answer.finish is FinishReason.LENGTH and answer.tokens == expected[name]


@settings(max_examples=40, deadline=None)
@given(ACTIONS, st.integers(1, 5), st.sampled_from([64, 128]), st.integers(4, 12), st.integers(0, 1000))
def test_any_interleaving_gives_each_request_its_solitary_text(actions, slots, chunk, num_blocks, seed):
    play(actions, slots, chunk, num_blocks, seed)


@pytest.mark.long
def test_many_interleavings_give_each_request_its_solitary_text(long_scale):
    @settings(max_examples=max(10, int(2000 * long_scale)), deadline=None)
    @given(ACTIONS, st.integers(1, 20), st.sampled_from([64, 128, 256]), st.integers(4, 40), st.integers(0, 1000))
    def run(actions, slots, chunk, num_blocks, seed):
        play(actions, slots, chunk, num_blocks, seed)

    run()
