"""No wording, tool or name of the held-out split "new" occurs in the text that the demo model learns from."""

from __future__ import annotations

import random
import re

import pytest

from tests.bench.training_rooms import training_module

SHORTEST = 12
"""Letters of a wording that are its own; with fewer it says nothing about where a text comes from."""


@pytest.fixture(scope="module")
def curriculum():
    with training_module("curriculum.mix") as module:
        yield module


@pytest.fixture(scope="module")
def conversations(curriculum):
    rng = random.Random(11)
    return [curriculum.conversation(rng, length) for length in (128, 256, 512, 1024) for _ in range(60)]


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _strings(entry)


def new_wordings():
    """Every template and question of the split, as a pattern in which values may be anything."""
    from curriculum import arithmetic, copying, facts, obedience, recall, records, tool_calls

    texts = {text for module in (arithmetic, copying, obedience, recall, records, tool_calls)
             for name, value in vars(module).items() if name.startswith("NEW_") and name not in ("NEW_NAMES", "NEW_KINDS")
             for text in _strings(value)}
    texts |= {ask for tool in tool_calls.NEW_WRITTEN for ask in tool.asks}
    texts |= {question for group in facts.all_facts() for fact in group for question in fact[3]}
    for text in sorted(texts):
        parts = [part.strip() for part in re.split(r"\{\w+\}", text)]
        if sum(char.isalpha() for part in parts for char in part) >= SHORTEST:
            yield text, re.compile(r"\s*\S[^\n]{0,80}?\s*".join(map(re.escape, parts)), re.IGNORECASE)


def test_no_new_wording_is_learnt(conversations):
    said = "\n\n".join(text for item in conversations for text in
                       [item.system or "", *(step.text for step in item.steps if step.role == "user")])
    wordings = list(new_wordings())
    assert len(wordings) > 300
    assert [text for text, pattern in wordings if pattern.search(said)] == []


def test_no_new_tool_key_or_name_is_learnt(conversations):
    from curriculum import pools, tool_pool

    tools = [tool["function"] for item in conversations for tool in item.tools]
    assert len(tools) > 100
    names = {tool["name"] for tool in tools}
    parts = {part for name in names for part in re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower())}
    keys = {key for tool in tools for key in tool["parameters"]["properties"]}
    assert parts & {*tool_pool.NEW_VERBS, *tool_pool.NEW_NOUNS} == set()
    assert keys & set(tool_pool.NEW_PARAMS) == set()
    assert names & {tool.name for tool in tool_pool.NEW_WRITTEN} == set()
    text = " ".join(step.text for item in conversations for step in item.steps)
    people = {*pools.NEW_PEOPLE, *pools.NEW_SURNAMES, *pools.NEW_CITIES}
    assert people & set(re.findall(r"\w+", text)) == set()


def test_a_new_wording_would_be_found():
    found = dict(new_wordings())
    assert found["Reproduce this verbatim: {x}"].search("Okay. Reproduce this verbatim: a b c")
