"""A corpus of hand-made answers, clean, drifted, shown and truncated: no split changes what is read."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.drifts import CALL, DRIFTED, REFUSED, SHOWN, TOOLS, WRAPPED, XML
from tests.chat.test_stream import CASES, parse

CORPUS = [
    *(text for text, _ in CASES.values()),
    *(text for text, *_ in DRIFTED.values()),
    *(f"Go.\n\n{text}\n\nThen {CALL}" for text, *_ in DRIFTED.values()),
    *(f"<tool_call>\n{text}\n</tool_call>\n{WRAPPED}" for text, *_ in DRIFTED.values()),
    *REFUSED.values(),
    *SHOWN.values(),
    f"<think>{CALL}</think>\n\n{XML}\n{WRAPPED}",
]
ALPHABET = '<>/=`"{}[]\\ \n\t:,' + "abcdefghilmnoprstu_é"


def outcome(text: str, pieces: list[str], is_cut: bool) -> tuple:
    found, parser = parse(text, pieces, tools=TOOLS, is_cut=is_cut)
    return found, parser.missed, parser.rescues, parser.is_unfinished


def test_the_corpus_is_large():
    assert len(set(CORPUS)) >= 200


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(CORPUS), st.booleans(), st.lists(st.floats(0, 1), max_size=10), st.floats(0.3, 1))
def test_no_split_and_no_cut_changes_what_is_read(text, is_cut, cuts, share):
    text = text[: int(len(text) * share) if share < 0.9 else len(text)]
    places = sorted(int(cut * len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]
    whole = outcome(text, [text], is_cut)
    assert outcome(text, pieces, is_cut) == whole
    assert outcome(text, list(text), is_cut) == whole


@pytest.mark.parametrize("name", ["2", "4", "7", "14", "20", "21", "22", "X"])
def test_answers_truncated_at_every_character_are_read_alike(name):
    text = f"a `b` {DRIFTED[name][0]}\n"
    for end in range(len(text)):
        for is_cut in (False, True):
            assert outcome(text[:end], [text[:end]], is_cut) == outcome(text[:end], list(text[:end]), is_cut)


def mutated(rng: random.Random) -> str:
    chars = list(rng.choice(CORPUS))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(chars))
        chars[at : at + rng.randrange(3)] = rng.choice(ALPHABET)
    return "".join(chars)


def check_mutated(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for index in range(count):
        text = mutated(rng)
        whole = outcome(text, [text], False)
        names = {tool.name for tool in TOOLS}
        assert all(item[0] in names or item[0] in ("text", "reasoning") for item in whole[0])
        if index % 10 == 0:
            assert outcome(text, list(text), False) == whole, text


def check_random(size: int, seed: int) -> float:
    text = random.Random(seed).randbytes(size).decode("utf-8", "replace")
    start = time.process_time()
    parse(text, [text[at : at + 64] for at in range(0, len(text), 64)], tools=TOOLS)
    return time.process_time() - start


def test_mutated_answers_never_raise():
    check_mutated(800, 1)


def test_random_bytes_never_raise():
    assert check_random(50_000, 1) < 3


@pytest.mark.long
def test_many_mutated_answers_never_raise(long_scale):
    check_mutated(int(100_000 * long_scale), 2)


@pytest.mark.long
def test_a_megabyte_of_random_bytes_takes_linear_time():
    assert check_random(1_000_000, 2) < 60
