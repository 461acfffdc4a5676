"""Choosing tokens: the noise bit by bit, the order of the filters, exact distributions, damaged logits, acceptance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from q27app.kernels import open_backend, reference_sample
from q27app.kernels.batch import SamplingRows
from q27app.kernels.numpy_state import NumpyState
from q27app.kernels.reference_sample import gumbel_noise, philox, sample_rows
from tests.kernels import made

INF = np.float32(np.inf)


def rows(count=1, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence=0.0, frequency=0.0, seeds=None, positions=None,
         penalties=None, masks=None, num_logprobs=-1) -> SamplingRows:
    """Equal parameters for every row; penalties: one {id: count} a row."""
    penalties = penalties or [{}] * count
    ids = [token for part in penalties for token in part]
    counts = [number for part in penalties for number in part.values()]

    def full(value, dtype):
        return np.full(count, value, dtype)

    return SamplingRows(
        temperature=full(temperature, np.float32), top_k=full(top_k, np.int32), top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32), presence=full(presence, np.float32), frequency=full(frequency, np.float32),
        seeds=np.asarray(seeds if seeds is not None else np.zeros(count), np.uint64),
        positions=np.asarray(positions if positions is not None else np.arange(count), np.int64),
        penalty_starts=np.cumsum([0] + [len(part) for part in penalties]).astype(np.int32),
        penalty_ids=np.asarray(ids, np.int32), penalty_counts=np.asarray(counts, np.int32),
        num_logprobs=full(num_logprobs, np.int32), masks=masks,
    )


def drawn(logits, **options) -> np.ndarray:
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    return sample_rows(logits, rows(len(logits), **options))[0]


def mask_of(vocab, allowed) -> np.ndarray:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


# noise


@pytest.mark.parametrize("counter, key, expected", [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0),
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
])
def test_philox_gives_the_published_words(counter, key, expected):
    found = philox(np.array([counter], np.uint32), key)[0]
    np.testing.assert_array_equal(found, np.array(expected, np.uint32))


def philox_by_hand(counter, key):
    """Salmon et al. 2011, one word at a time."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = second >> 32 ^ b ^ k0, second & 0xFFFFFFFF, first >> 32 ^ d ^ k1, first & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.parametrize("seed, position", [(0, 0), (2**64 - 1, 5), (0x123456789ABCDEF0, 655359), (1, 2**33 + 7)])
def test_noise_is_named_by_seed_position_and_id(seed, position):
    ids = np.array([0, 1, 2, 3, 4, 1002, 248319])
    expected = []
    for i in ids.tolist():
        words = philox_by_hand((i // 4, position % 2**32, position >> 32, 0), (seed % 2**32, seed >> 32))
        uniform = min(float(np.float32((words[i % 4] + 0.5) * 2.0**-32)), 1 - 2.0**-24)
        expected.append(-math.log(-math.log1p(-uniform)))
    np.testing.assert_allclose(gumbel_noise(seed, position, ids), expected, rtol=2e-6, atol=2e-7)


def test_the_highest_word_stays_finite(monkeypatch):
    monkeypatch.setattr(reference_sample, "philox", lambda counters, key: np.full((len(counters), 4), 0xFFFFFFFF, np.uint32))
    assert np.isfinite(gumbel_noise(0, 0, np.arange(3))).all()


# distributions


def chi_square(counts, probabilities):
    """(statistic, bound): the bound is 5 standard deviations above the mean of a chi-square with these classes."""
    expected = counts.sum() * probabilities
    kept = expected > 0
    assert not counts[~kept].any()
    freedom = kept.sum() - 1
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()), freedom + 5 * math.sqrt(2 * freedom)


def softmax(values):
    weights = np.exp(values - values.max())
    return weights / weights.sum()


DRAWS = 1500
LOGITS = np.array([1.0, 0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 0.25])


@pytest.mark.parametrize("options, scaled, kept", [
    ({}, LOGITS, range(8)),
    ({"temperature": 0.7}, LOGITS / 0.7, range(8)),
    ({"top_k": 3}, LOGITS, [0, 3, 5]),
    ({"top_p": 0.6, "temperature": 2.0}, LOGITS / 2, [0, 1, 3, 5]),
    ({"min_p": 0.3}, LOGITS, [0, 3, 5]),
])
def test_draws_follow_the_distribution(options, scaled, kept):
    check_draws(scaled, kept, seeds=np.arange(DRAWS), positions=np.full(DRAWS, 9), **options)


def test_draws_along_a_text_follow_the_distribution():
    check_draws(LOGITS, range(8), seeds=np.full(DRAWS, 77), positions=np.arange(DRAWS))


def check_draws(scaled, kept, **options):
    counts = np.bincount(drawn(np.tile(LOGITS, (DRAWS, 1)), **options), minlength=8)
    probabilities = np.zeros(8)
    probabilities[list(kept)] = softmax(scaled[list(kept)])
    statistic, bound = chi_square(counts, probabilities)
    assert statistic < bound


def test_the_chi_square_would_see_a_wrong_temperature():
    counts = np.bincount(drawn(np.tile(LOGITS, (DRAWS, 1)), temperature=0.7, seeds=np.arange(DRAWS)), minlength=8)
    statistic, bound = chi_square(counts, softmax(LOGITS))
    assert statistic > bound


def kept_ids(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    logits = np.asarray(logits, np.float32)
    return reference_sample.distribution(logits, np.arange(len(logits)), temperature, top_k, top_p, min_p)[0].tolist()


def test_ties_with_the_last_of_top_k_are_kept():
    assert kept_ids([1, 3, 2, 2, 2, 0], top_k=2) == [1, 2, 3, 4]
    assert kept_ids([1, 3, 2], top_k=7) == kept_ids([1, 3, 2], top_k=3) == [0, 1, 2]


def test_top_p_is_the_smallest_set_that_reaches_the_mass():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert kept_ids(logits, top_p=0.39) == [1]
    assert kept_ids(logits, top_p=0.41) == [1, 3]
    assert kept_ids(logits, top_p=0.69) == [1, 3]
    assert kept_ids(logits, top_p=0.71) == [1, 2, 3]
    assert kept_ids(logits, top_p=1.0) == [0, 1, 2, 3]


def test_ties_at_the_threshold_of_top_p_are_kept():
    assert kept_ids([2, 1, 1, 1, -5], top_p=0.6) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_best():
    assert kept_ids(np.log([0.5, 0.26, 0.24]), min_p=0.5) == [0, 1]


def test_top_p_sees_what_top_k_kept_and_scaled_logits():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert kept_ids(logits, top_k=2, top_p=0.56) == [0]
    assert kept_ids(logits, top_p=0.56) == [0, 1]
    assert kept_ids(logits, temperature=0.2, top_p=0.7) == [0]
    assert kept_ids(logits, temperature=5.0, min_p=0.8) == [0, 1, 2]


def test_a_seed_and_a_position_name_the_token_whatever_else_is_drawn():
    logits = np.random.default_rng(3).standard_normal((5, 50)).astype(np.float32)
    seeds, positions = np.array([7, 7, 2**63, 1, 0]), np.array([10, 11, 10, 2**40, 0])
    together = drawn(logits, seeds=seeds, positions=positions)
    alone = [drawn(logits[i], seeds=seeds[i:i + 1], positions=positions[i:i + 1])[0] for i in range(5)]
    assert together.tolist() == alone


def test_noise_of_an_id_does_not_depend_on_which_others_are_kept():
    ids = np.arange(1000)
    some = np.array([3, 17, 18, 999])
    np.testing.assert_array_equal(gumbel_noise(5, 6, some), gumbel_noise(5, 6, ids)[some])


# greedy, penalties, masks


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_greedy_takes_the_lowest_of_equal_ids(temperature):
    assert drawn([[0, 5, 5], [-1, -0.0, 0.0], [-1, 0.0, -0.0]], temperature=temperature).tolist() == [1, 1, 1]


def test_penalties_come_first():
    logits = [2.0, 1.9, 0.0]
    assert drawn(logits, temperature=0, presence=0.2, penalties=[{0: 1}])[0] == 1
    assert drawn(logits, temperature=0, presence=0.05, penalties=[{0: 9}])[0] == 0
    assert drawn(logits, temperature=0, frequency=0.05, penalties=[{0: 1}])[0] == 0
    assert drawn(logits, temperature=0, frequency=0.05, penalties=[{0: 3}])[0] == 1
    assert drawn(logits, temperature=0, presence=-3.0, penalties=[{2: 1}])[0] == 2


def test_each_row_has_its_own_penalties():
    penalties = [{0: 1}, {}, {1: 2, 0: 1}]
    assert drawn([[2, 1, 0]] * 3, temperature=0, presence=5, penalties=penalties).tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_never_broken(temperature):
    logits = np.full(70, -INF, np.float32)
    logits[0] = 1
    for allowed in ([69], [31, 32], [33, 64]):
        masks = np.tile(mask_of(70, allowed), (1, 1))
        assert drawn(logits, temperature=temperature, masks=masks)[0] == allowed[0]


def test_masked_ids_take_no_part_in_top_k():
    masks = np.tile(mask_of(4, [2, 3]), (200, 1))
    tokens = drawn(np.tile([9.0, 8.0, 1.0, 0.9], (200, 1)), top_k=2, masks=masks, seeds=np.arange(200))
    assert set(tokens.tolist()) == {2, 3}


# damaged logits


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.7])
@pytest.mark.parametrize("logits, expected", [
    ([np.nan, np.nan, np.nan], 0),
    ([-INF, -INF, -INF], 0),
    ([np.nan, -5, np.nan], 1),
    ([0, INF, INF], 1),
    ([np.nan, -INF, INF], 2),
    ([-INF, np.nan, 3.4e38], 2),
])
def test_damaged_logits_give_one_definite_token(temperature, logits, expected):
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for top_p in (1.0, 0.5):
            assert drawn(logits, temperature=temperature, top_p=top_p, min_p=0.1, num_logprobs=2)[0] == expected


@pytest.mark.parametrize("options", [{"top_k": -3}, {"top_p": -1.0}, {"top_p": np.nan}, {"min_p": np.nan}, {"min_p": 7.0}])
def test_senseless_filters_are_off(options):
    name, value = next(iter(options.items()))
    assert kept_ids([3, 1, 2], **{name: value}) == [0, 1, 2]


# margins and log probabilities


def test_margins_and_log_probabilities_are_of_the_raw_logits():
    logits = np.array([[1.0, 3.0, 2.0, 3.0], [0.0, 4.0, 1.0, -2.0]], np.float32)
    tokens, margins, logprobs = sample_rows(
        logits, rows(2, temperature=0, presence=10, penalties=[{1: 1, 3: 1}, {}], num_logprobs=3))
    np.testing.assert_array_equal(margins, np.array([0, 3], np.float32))
    logs = np.log(softmax(logits[0].astype(np.float64)))
    value, ids, values = logprobs[0]
    assert tokens[0] == 2 and value == pytest.approx(logs[2])
    assert ids.tolist() == [1, 3, 2]
    np.testing.assert_allclose(values, logs[[1, 3, 2]], rtol=1e-6)


def test_no_log_probabilities_unless_wanted():
    logits = np.zeros((1, 4), np.float32)
    assert sample_rows(logits, rows(num_logprobs=-1))[2] == [None]
    value, ids, values = sample_rows(logits, rows(num_logprobs=0))[2][0]
    assert value == pytest.approx(-math.log(4)) and len(ids) == len(values) == 0


# acceptance


@pytest.fixture
def backend_and_state():
    return open_backend("numpy"), NumpyState(made.TINY, 2, 3, "fp32", 3, 4, 16)


def accepted(backend, state, phase, tokens, choices):
    batch = made.make_batch(phase, tokens, [3] * len(tokens), range(len(tokens)), [[i] for i in range(len(tokens))])
    backend.begin(batch, state)
    logits = np.zeros((len(choices), 101), np.float32)
    logits[np.arange(len(choices)), choices] = 1
    backend.sample(backend.upload(logits), rows(len(choices), temperature=0))
    backend.accept()
    return backend.result()


def test_the_longest_agreeing_run_is_accepted(backend_and_state):
    found = accepted(*backend_and_state, "verify", [[5, 6, 7], [5, 6, 7], [9]], [6, 7, 8, 6, 9, 8, 1])
    assert found.accepted.tolist() == [3, 2, 1]
    assert found.tokens.tolist() == [6, 7, 8, 6, 9, 8, 1]


def test_an_agreement_after_a_rejection_does_not_count(backend_and_state):
    assert accepted(*backend_and_state, "verify", [[5, 6, 7, 8]], [0, 7, 8, 9]).accepted.tolist() == [1]


def test_without_drafts_one_row_is_accepted(backend_and_state):
    assert accepted(*backend_and_state, "decode", [[5], [6]], [6, 7]).accepted.tolist() == [1, 1]


def test_commit_takes_what_accept_left(backend_and_state):
    backend, state = backend_and_state
    model = made.dense_model(made.TINY)
    lines = made.Lines(model)
    lines.feed(0, [1, 2, 3])
    logits = lines.feed_many({0: [4, 5, 6]}, "verify", deferred=True)
    choices = logits.argmax(1)
    steps = made.Lines(model)
    steps.feed(0, [1, 2, 3])
    batch_tokens = [4, int(choices[0]), (int(choices[1]) + 1) % 101]
    lines.feed_many({0: batch_tokens}, "verify", deferred=True)
    model.backend.sample(model.logit_rows.rows(3), rows(3, temperature=0))
    model.backend.accept()
    model.backend.commit()
    for token in batch_tokens[:2]:
        steps.feed(0, [token], "decode")
    np.testing.assert_array_equal(lines.state.export_slot(0), steps.state.export_slot(0))
