"""The suffix drafter against a plain search, and its price."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine import draft_suffix
from q27app.engine.depth import PassPrices
from q27app.engine.draft_suffix import GRAM, MAX_COMPARED, SuffixIndex, index_of, may_match
from q27app.engine.drafts import Drafts
from q27app.engine.request import Request, SamplingParams
from q27app.engine.sequence import Sequence
from tests.engine.test_ahead import prompt_of
from tests.engine.toy import Desk, expected_text


def plain_length(tokens: list[int], limit: int = MAX_COMPARED) -> int:
    """Longest run at the end that also ends earlier, at most `limit`; 0 below GRAM."""
    best = 0
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, limit) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= GRAM else 0


small = st.lists(st.integers(0, 2), max_size=40)


@settings(max_examples=150, deadline=None)
@given(small, st.lists(small, max_size=6))
def test_the_match_is_the_longest_earlier_occurrence(prompt, pieces):
    index, text = SuffixIndex(prompt), list(prompt)
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        assert min(index.match_length, MAX_COMPARED) == plain_length(text)


@settings(max_examples=150, deadline=None)
@given(small, small, st.integers(1, 20))
def test_a_proposal_is_what_followed_the_match(prompt, answer, limit):
    index, text = SuffixIndex(prompt), prompt + answer
    index.extend(answer)
    drafts = index.propose(limit, min_match=GRAM)
    length = min(index.match_length, MAX_COMPARED)
    assert len(drafts) == (limit if length else 0)
    if not drafts:
        return
    whole = text + drafts
    ends = [end for end in range(length, len(text)) if text[end - length:end] == text[len(text) - length:]]
    assert any(all(whole[end + place] == drafts[place] for place in range(limit)) for end in ends)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12),
       st.integers(GRAM, 12))
def test_a_text_that_did_not_repeat_need_not_be_looked_at_for_a_while(prompt, runs, min_match):
    sequence = Sequence(Request("r", tuple(prompt)), lambda event: None, 100)
    index_of(sequence)
    for run in (*runs, prompt[:20], prompt[20:]):
        sequence.append(tuple(run))
        if may_match(sequence, min_match):
            index_of(sequence)
        else:
            assert plain_length(sequence.tokens) < min_match


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """How many tokens were indexed, each time that some were."""
    sizes, inner = [], draft_suffix._few_keys
    monkeypatch.setattr(draft_suffix, "_few_keys", lambda tokens: sizes.append(len(tokens)) or inner(tokens))
    return sizes


def test_what_has_come_is_indexed_while_the_device_is_at_work(asked):
    text = np.random.default_rng(1).integers(0, 1000, 300).tolist()
    sequence = Sequence(Request("r", (*text, *text[:20]), SamplingParams(max_tokens=100)), lambda event: None, 100)
    drafts = Drafts(None, True, 15, PassPrices(), fixed=True)
    assert drafts.propose([sequence], [15]) == [text[20:35]] and not asked
    sequence.append(tuple(text[20:35]))
    assert drafts.propose([sequence], [15]) == [text[35:50]] and not asked
    drafts.go_ahead([sequence], [15])
    assert asked == [15 + GRAM - 1]
    drafts.go_ahead([sequence], [15])
    assert len(asked) == 1


@pytest.mark.parametrize("uses_suffix", [True, False])
def test_a_prompt_is_indexed_while_the_device_reads_the_rest_of_it(monkeypatch, uses_suffix):
    """A long one takes tens of milliseconds, for which its second token would wait."""
    desk, events = Desk(slots=1, drafter=Drafts(None, uses_suffix, 5, PassPrices())), []
    forward, backend, index = desk.model.forward, desk.model.backend, draft_suffix.SuffixIndex
    result = backend.result
    monkeypatch.setattr(desk.model, "forward", lambda batch, *rest: events.append(batch.phase) or forward(batch, *rest))
    monkeypatch.setattr(backend, "result", lambda: events.append("result") or result())
    monkeypatch.setattr(draft_suffix, "SuffixIndex", lambda tokens: events.append(len(tokens)) or index(tokens))
    answer = desk.ask(prompt_of(150), 3)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(150), 3)
    first = events.index("result")
    assert events[:first] == ["prefill"] * events.count("prefill") + [150] * uses_suffix
    assert not any(isinstance(event, int) for event in events[first:])


def test_tokens_that_continue_a_match_are_indexed_together(asked):
    """A copied text is long, and the card waits for its next drafts."""
    text = np.random.default_rng(1).integers(0, 1000, 3000).tolist()
    index = SuffixIndex(text + text[:GRAM])
    for start in range(GRAM, 2004, 16):
        assert index.propose(16, GRAM) == text[start:start + 16]
        index.extend(text[start:start + 16])
    assert len(asked) == 7 and index.match_length == 2004
    index.extend([1001, 1002])
    assert not index.match_length and index.propose(4, GRAM) == []
    index.extend(text[1000:1008])
    assert index.match_length == 8 and index.propose(4, GRAM) == text[1008:1012]


def test_a_period_goes_on():
    index = SuffixIndex([9, 1, 2, 3] + [4, 5, 6] * 6)
    assert index.propose(9) == [4, 5, 6] * 3


def test_short_matches_are_not_proposed():
    index = SuffixIndex(list(range(20)) + [3, 4, 5, 6, 7])
    assert index.match_length == 5 and index.propose(8) == []
    assert index.propose(3, min_match=5) == [8, 9, 10]


def test_the_latest_of_equal_matches_wins():
    run = list(range(10, 22))
    index = SuffixIndex(run + [1] + run + [2] + run)
    assert index.propose(1) == [2]


@settings(max_examples=150, deadline=None)
@given(small, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8))
def test_other_drafts_are_continued_without_being_kept(prompt, after, limit):
    index = SuffixIndex(prompt)
    size, length = len(index), index.match_length
    drafts = index.propose(limit, min_match=GRAM, after=after)
    assert (len(index), index.match_length) == (size, length)
    assert len(drafts) in (0, limit)
    if drafts:
        whole = prompt + after + drafts
        end = len(prompt) + len(after)
        assert any(whole[place - GRAM:place] == whole[end - GRAM:end] and whole[place] == drafts[0]
                   for place in range(GRAM, end))


@pytest.mark.parametrize("kind", ["random", "copied"])
def test_a_step_costs_little_at_a_full_window(kind):
    """50 us a step at 262,144 tokens; processor time, the median of many."""
    random = np.random.default_rng(3)
    prompt = random.integers(0, 248_320 if kind == "random" else 50, 262_144).tolist()
    index = SuffixIndex(prompt)
    answer = prompt[1000:1400] if kind == "copied" else random.integers(0, 248_320, 400).tolist()
    spent = []
    for token in answer:
        started = time.process_time_ns()
        index.extend([token])
        index.propose(15)
        spent.append(time.process_time_ns() - started)
    assert np.median(spent) < 50_000
