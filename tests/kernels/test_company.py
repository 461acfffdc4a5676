"""The bits of a row depend on its sequence, its position and the phase; never on company, chunks, blocks or stale data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from q27app.engine.request import SamplingParams
from q27app.engine.sampling import LogitRow, sampling_rows
from q27app.errors import Q27Error
from q27app.kernels.batch import Keep
from tests.kernels import made
from tests.kernels.cuda_checks import check_keeps, check_pass_behind

SEED = 5
TOKENS = np.random.default_rng(SEED).integers(0, 101, 700)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def model(request):
    return made.dense_model({"tiny": made.TINY, "demo": replace(made.DEMO, vocab_size=1000)}[request.param])


@pytest.fixture(scope="module")
def tiny():
    return made.dense_model(made.TINY)


def prefilled(model, lengths, tokens=TOKENS, **options):
    """Lines whose slot i has the first lengths[i] tokens, shifted by i."""
    lines = made.Lines(model, **({"slots": len(lengths)} | options))
    for slot, length in enumerate(lengths):
        if length:
            lines.feed(slot, np.roll(tokens, slot)[:length], logit_rows=[])
    return lines


def everything(lines, slot):
    """The slot's bytes and those of its written keys and values."""
    parts = [lines.state.export_slot(slot)]
    for position in range(lines.lengths[slot]):
        row = lines.tables[slot][position // 64] * 64 + position % 64
        parts += [array[:, row].tobytes() for array in (*lines.state.keys, *lines.state.values)]
    return b"".join(bytes(part) for part in parts)


@pytest.fixture(scope="module")
def crowd(model):
    """(16 lines of different lengths, their slots' bytes, for each: two steps' logits and the bytes after, decoded alone)."""
    lines = prefilled(model, [1 + 4 * i + 20 * (i % 3) for i in range(16)], slots=16)
    slots = [lines.state.export_slot(slot) for slot in range(16)]
    alone = []
    for slot in range(16):
        logits = [lines.feed(slot, [int(TOKENS[slot + step])], "decode") for step in range(2)]
        alone.append((logits, everything(lines, slot)))
        rewind(lines, slot, slots[slot])
    return lines, slots, alone


def rewind(lines, slot, kept):
    lines.state.import_slot(slot, kept)
    lines.lengths[slot] -= 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_decode_bits_do_not_depend_on_the_number_of_rows(crowd, count):
    lines, slots, alone = crowd
    order = list(reversed(range(count)))
    found = [lines.feed_many({slot: [int(TOKENS[slot + step])] for slot in order}, "decode") for step in range(2)]
    after = [everything(lines, slot) for slot in order]
    for slot in order:
        rewind(lines, slot, slots[slot])
    for place, slot in enumerate(order):
        logits, expected = alone[slot]
        np.testing.assert_array_equal(np.stack([found[0][place], found[1][place]]), np.concatenate(logits))
        assert after[place] == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_verify_rows_have_the_bits_of_single_steps(model, count):
    lines, steps = prefilled(model, [61, 9]), prefilled(model, [61, 9])
    drafts = TOKENS[100:100 + count].tolist()
    expected = np.concatenate([steps.feed(0, [token], "decode") for token in drafts])
    found = lines.feed_many({1: [3, 4], 0: drafts}, "verify", deferred=True)[2:]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("accepted", [[0, 2], [1, 1], [4, 0], [7, 2]])
def test_commit_equals_decoding_the_accepted_rows(model, accepted):
    lines, steps = prefilled(model, [62, 30, 5]), prefilled(model, [62, 30, 5])
    work = {0: TOKENS[50:57].tolist(), 2: TOKENS[60:62].tolist()}
    lines.feed_many(work, "verify", deferred=True)
    lines.model.backend.commit(np.array(accepted))
    for (slot, tokens), count in zip(work.items(), accepted):
        lines.lengths[slot] += count
        for token in tokens[:count]:
            steps.feed(slot, [token], "decode")
    for slot in range(3):
        assert everything(lines, slot) == everything(steps, slot)
    after = [line.feed_many({slot: [9] for slot in range(3)}, "decode") for line in (lines, steps)]
    np.testing.assert_array_equal(*after)


def test_a_deferred_pass_leaves_the_slots_alone(model):
    lines = prefilled(model, [70])
    before = lines.state.export_slot(0)
    lines.feed_many({0: [1, 2, 3]}, "verify", deferred=True)
    np.testing.assert_array_equal(lines.state.export_slot(0), before)


def chunked(model, tokens, cuts, **options):
    """(lines, logits of every row) of a prompt prefilled with chunks that end at the cuts."""
    lines = made.Lines(model, **options)
    pieces = np.split(np.asarray(tokens), cuts)
    return lines, np.concatenate([lines.feed(0, piece) for piece in pieces])


@pytest.mark.parametrize("length, cuts", [(200, [64]), (200, [128]), (200, [64, 128, 192]), (257, [192, 256]), (65, [64])])
def test_prefill_bits_do_not_depend_on_chunks(model, length, cuts):
    tokens = TOKENS[:length]
    whole, expected = chunked(model, tokens, [])
    lines, found = chunked(model, tokens, cuts)
    np.testing.assert_array_equal(found, expected)
    assert everything(lines, 0) == everything(whole, 0)


@pytest.mark.parametrize("stop", [64, 192, 320])
def test_a_resumed_prompt_has_the_bits_of_a_cold_one(model, stop):
    tokens = TOKENS[:330]
    whole, expected = chunked(model, tokens, [])
    lines = made.Lines(model)
    lines.feed(0, tokens[:stop], logit_rows=[])
    lines.state.copy_slot(0, 2)
    lines.tables[2], lines.lengths[2] = list(lines.tables[0]), stop
    lines.feed(0, tokens[:9], logit_rows=[])
    np.testing.assert_array_equal(lines.feed(2, tokens[stop:]), expected[stop:])
    assert everything(lines, 2) == everything(whole, 0)


def test_prefill_bits_do_not_depend_on_other_sequences_or_logit_rows(model):
    tokens, other = TOKENS[:150], TOKENS[200:290]
    whole, expected = chunked(model, tokens, [])
    lines = made.Lines(model)
    lines.feed(1, other[:33])
    found = lines.feed_many({1: other[33:], 0: tokens}, "prefill", logit_rows=[60, 57 + 149])
    np.testing.assert_array_equal(found, expected[[3, 149]])
    assert everything(lines, 0) == everything(whole, 0)


@pytest.mark.parametrize("length", [65, 67, 101])
def test_a_row_does_not_depend_on_what_follows_it(model, length):
    """A tile with one row would else be another kind of product."""
    _, whole = chunked(model, TOKENS[:128], [])
    _, part = chunked(model, TOKENS[:length], [])
    np.testing.assert_array_equal(part, whole[:length])


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "fp8"])
def test_blocks_may_lie_anywhere_and_hold_anything(tiny, kv_format):
    tokens = TOKENS[:200]
    whole, expected = chunked(tiny, tokens, [128], kv_format=kv_format)
    lines = made.Lines(tiny, kv_format=kv_format)
    for array in (*lines.state.keys, *lines.state.values):
        array.view(np.uint8)[...] = 0x7F  # NaN in fp8; 3.4e38 and NaN in the others
        if array.dtype != np.uint8:
            array[...] = np.nan
    lines.reserve(0, 260, scattered=True)
    found = np.concatenate([lines.feed(0, tokens[:128]), lines.feed(0, tokens[128:])])
    np.testing.assert_array_equal(found, expected)
    assert everything(lines, 0) == everything(whole, 0)
    np.testing.assert_array_equal(lines.feed(0, [7], "decode"), whole.feed(0, [7], "decode"))


@pytest.mark.parametrize("cuts", [[1], [63, 65], [70, 71, 130], [5, 190]])
def test_chunks_that_begin_or_end_inside_a_block_are_right(model, cuts):
    _, expected = chunked(model, TOKENS[:200], [])
    _, found = chunked(model, TOKENS[:200], cuts)
    assert made.relative_error(found, expected) < 1e-5


def test_prefill_after_decode_inside_a_block_is_right(model):
    _, expected = chunked(model, TOKENS[:160], [])
    lines = made.Lines(model)
    lines.feed(0, TOKENS[:70])
    for token in TOKENS[70:75]:
        lines.feed(0, [token], "decode")
    assert made.relative_error(lines.feed(0, TOKENS[75:160]), expected[75:]) < 1e-5


def test_steps_agree_with_prefill(model):
    _, expected = chunked(model, TOKENS[:100], [])
    lines = made.Lines(model)
    found = np.concatenate([lines.feed(0, [token], "decode") for token in TOKENS[:100]])
    assert made.relative_error(found, expected) < 1e-5


def draft_chain(lines, token, depth):
    logits = []
    for step in range(depth):
        batch = made.make_batch("draft", [[token]], [lines.lengths[0] + step], [0], [lines.tables[0]])
        row = lines.model.backend.download(lines.model.draft(batch, lines.state, step == 0))[0]
        token = int(row.argmax())
        logits.append(row)
    return np.stack(logits)


def test_drafts_do_not_depend_on_how_the_prompt_was_chunked(model):
    chains = []
    for cuts in ([], [64, 128]):
        lines, _ = chunked(model, TOKENS[:140], cuts)
        lines.reserve(0, 200)
        chains.append(draft_chain(lines, 11, 3))
    np.testing.assert_array_equal(*chains)


def test_drafts_after_a_commit_are_those_after_decoding(model):
    lines, steps = prefilled(model, [62]), prefilled(model, [62])
    tokens = TOKENS[50:53].tolist()
    lines.feed_many({0: tokens}, "verify", deferred=True)
    lines.model.backend.commit(np.array([2]))
    lines.lengths[0] += 2
    for token in tokens[:2]:
        steps.feed(0, [token], "decode")
    lines.reserve(0, 128), steps.reserve(0, 128)
    np.testing.assert_array_equal(draft_chain(lines, 4, 2), draft_chain(steps, 4, 2))


def test_a_draft_at_position_0_sees_no_key(tiny):
    lines = made.Lines(tiny)
    lines.reserve(0, 64)
    for array in (*lines.state.keys, *lines.state.values):
        array[...] = np.nan
    assert np.isfinite(draft_chain(lines, 4, 2)).all()


def test_what_does_not_fit_is_refused_before_it_runs(tiny):
    backend, lines = tiny.backend, prefilled(tiny, [5, 5], record=8)
    table = [lines.tables[0]]

    def begin(message, *arguments, **options):
        with pytest.raises(Q27Error, match=message):
            backend.begin(made.make_batch(*arguments, **options), lines.state)

    begin("17 rows of one sequence", "decode", [[1] * 17], [5], [0], table)
    begin("9 deferred rows, the state records at most 8", "verify", [[1] * 9], [5], [0], table, deferred=True)
    begin("slots .0, 0., expected different", "decode", [[1], [1]], [5, 5], [0, 0], table * 2)
    begin("slots .4.", "decode", [[1]], [5], [4], table)
    begin("too short", "prefill", [[1] * 60], [5], [0], table)
    begin("outside 0 to 63", "prefill", [[1] * 60], [5], [0], [[0, 64]])
    begin("outside 0 to 63", "prefill", [[1] * 60], [5], [0], [[0, -1]])
    begin("logit_rows .1.", "decode", [[1]], [5], [0], table, logit_rows=[1])
    begin("cannot be deferred", "prefill", [[1]], [5], [0], table, deferred=True)
    with pytest.raises(Q27Error, match="token ids from 101 to 101, expected 0 to 100"):
        lines.feed(0, [101])
    lines.feed_many({0: [1, 2]}, "verify", deferred=True)
    with pytest.raises(Q27Error, match="accepted counts .3., expected 0 to .2."):
        backend.commit(np.array([3]))
    backend.commit(np.array([2]))
    with pytest.raises(Q27Error, match="commit without a deferred pass"):
        backend.commit(np.array([2]))


def test_states_kept_within_a_prefill_are_those_of_its_parts(model):
    check_keeps(made.Lines(model, 4, 16))


@pytest.mark.parametrize("keep", [Keep(0, 60, 3), Keep(0, 128, 3), Keep(1, 64, 3), Keep(0, 64, 0), Keep(0, 64, 4)])
def test_a_keep_that_does_not_fit_is_refused(tiny, keep):
    lines = made.Lines(tiny, 4, 16)
    batch = made.make_batch("prefill", [[1] * 70], [0], [0], [[0, 1]])
    with pytest.raises(Q27Error, match="keep"):
        tiny.forward(replace(batch, keeps=(keep,)), lines.state, True)


def test_a_decode_pass_behind_another_takes_what_that_one_drew(tiny):
    rows = sampling_rows([LogitRow(SamplingParams(), 5), LogitRow(SamplingParams(temperature=0.8, seed=3), 4)], tiny.config.vocab_size)
    check_pass_behind(made.Lines(tiny, 2, 4), rows)
