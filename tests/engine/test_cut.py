"""Cuts, masks, counts and parameter rows, each alone."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine.cut import cut_run
from q27app.engine.masks import masks_for
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.engine.sequence import Sequence, TokenCounts
from q27app.errors import Q27Error
from tests.engine.toy import VOCAB, Say, TableGuide

EOS = 50


class Recorder:
    """Keeps what it was shown; answers what it was told to."""

    def __init__(self, answer=None):
        self.answer, self.shown = answer, []

    def advance(self, tokens):
        self.shown.append(tokens)
        return self.answer or Say(len(tokens))


def sequence_of(room=100, guide=None, **params) -> Sequence:
    request = Request("a", (1, 2), SamplingParams(max_tokens=room, **params), guide, eos_ids=(EOS, EOS + 1))
    return Sequence(request, lambda event: None, room)


@pytest.mark.parametrize("drawn, room, expected", [
    ([3], 100, (1, None, 1)),
    ([3, 4, 5], 100, (3, None, 3)),
    ([3, 4, 5], 3, (3, FinishReason.LENGTH, 3)),
    ([3, 4, 5], 2, (2, FinishReason.LENGTH, 3)),
    ([3, 4, 5, 6], 2, (2, FinishReason.LENGTH, 3)),
    ([EOS], 100, (0, FinishReason.STOP, 1)),
    ([3, EOS, 5, 6], 100, (1, FinishReason.STOP, 2)),
    ([3, 4, EOS + 1], 2, (2, FinishReason.LENGTH, 3)),
    ([3, EOS + 1], 2, (1, FinishReason.STOP, 2)),
])
def test_a_run_is_cut_at_end_of_text_and_at_the_limit(drawn, room, expected):
    cut = cut_run(sequence_of(room), drawn, VOCAB)
    assert (cut.keep, cut.finish, cut.num_rows) == expected


def test_ignored_end_of_text_is_kept():
    assert cut_run(sequence_of(ignore_eos=True), [3, EOS, 4], VOCAB).keep == 3


@pytest.mark.parametrize("drawn, room, shown", [
    ([3, 4, 5], 100, (3, 4, 5)), ([3, 4, 5], 2, (3, 4)), ([3, EOS, 5], 100, (3, EOS)), ([3, 4, EOS], 2, (3, 4))])
def test_a_guide_sees_nothing_past_the_end_or_the_limit(drawn, room, shown):
    guide = Recorder()
    cut_run(sequence_of(room, guide), drawn, VOCAB)
    assert guide.shown == [shown]


@pytest.mark.parametrize("answer, expected", [
    (Say(3, (), "stop"), (3, (), FinishReason.STOP, 4)),
    (Say(1, (7, 8)), (1, (7, 8), None, 2)),
    (Say(0, (7,)), (0, (7,), None, 1)),
    (Say(4, (7,)), (4, (7,), None, 4)),
    (Say(2, (), "length"), (2, (), FinishReason.LENGTH, 3)),
    (Say(2, (7,), "stop"), (2, (7,), FinishReason.STOP, 3)),
])
def test_what_a_guide_decides_is_done(answer, expected):
    cut = cut_run(sequence_of(guide=Recorder(answer)), [3, 4, 5, 6], VOCAB)
    assert (cut.keep, cut.force, cut.finish, cut.num_rows) == expected


def test_a_grammar_that_ends_nowhere_after_a_draft_drops_the_draft():
    guide = TableGuide(mask_at=lambda index: {0: {1, 2}, 1: {3}, 2: set()}.get(index))
    drafts = [1, 3, 9]
    masks = masks_for(guide, drafts, VOCAB)
    assert drafts == [1] and len(masks) == 2


def test_a_draft_that_its_mask_forbids_goes_with_all_after_it():
    guide = TableGuide(mask_at=lambda index: None if index == 0 else {5})
    drafts = [1, 5, 6, 7]
    masks = masks_for(guide, drafts, VOCAB)
    assert drafts == [1, 5] and [mask is None for mask in masks] == [True, False, False]


def test_no_masks_are_made_where_nothing_is_constrained():
    assert masks_for(None, [1, 2], VOCAB) is None and masks_for(TableGuide(), [1, 2], VOCAB) is None


def test_a_grammar_that_allows_nothing_is_an_error():
    with pytest.raises(Q27Error, match="allows no token"):
        masks_for(TableGuide(mask_at=lambda index: set()), [], VOCAB)


def test_counts_grow_with_every_token_and_drafts_count_for_later_rows_only():
    counts = TokenCounts()
    for token in [*range(100), 5, 5, 7]:
        counts.add(token)
    plain = dict(zip(*(part.tolist() for part in counts.arrays([]))))
    assert plain == {token: 1 for token in range(100)} | {5: 3, 7: 2}
    more = dict(zip(*(part.tolist() for part in counts.arrays([5, 200, 200, 300]))))
    assert more == plain | {5: 4, 200: 2, 300: 1}
    assert dict(zip(*(part.tolist() for part in counts.arrays([])))) == plain


def test_rows_become_arrays_in_their_order():
    counts = TokenCounts()
    counts.add(9)
    mask = np.array([1, 2], np.uint32)
    params = SamplingParams(0.5, 3, 0.9, 0.1, 1.0, 2.0, 100, -1)
    rows = sampling_rows([LogitRow(None, 8, counts), LogitRow(params, 9, counts, (9, 4), mask)], VOCAB)
    assert rows.temperature.tolist() == [0.0, 0.5] and rows.top_k.tolist() == [0, 3]
    assert rows.seeds.tolist() == [0, (1 << 64) - 1] and rows.positions.tolist() == [8, 9]
    assert rows.penalty_starts.tolist() == [0, 0, 2]
    assert rows.penalty_ids.tolist() == [9, 4] and rows.penalty_counts.tolist() == [2, 1]
    assert rows.num_logprobs.tolist() == [-1, VOCAB]
    assert rows.masks.tolist() == [[0xFFFFFFFF] * 2, [1, 2]]
    assert {rows.top_p.dtype, rows.min_p.dtype, rows.presence.dtype, rows.frequency.dtype} == {np.dtype(np.float32)}
