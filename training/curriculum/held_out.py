"""The held-out sets: for every task and split the same examples whoever makes them.

A request for a call must tell which of the declared tools it means (`is_told`), or no answer to it is right or wrong. The rule goes
by words alone, so it holds for tools that nobody was taught; requests in wordings of the training, which say what they mean by
having been learnt ("How much is 3 EUR in USD?"), are left as they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from curriculum.arithmetic import arithmetic, follow_up
from curriculum.copying import copying, editing
from curriculum.blind import blind_call, blind_recall
from curriculum.example import BLIND, HELD, NEW, Example
from curriculum.facts import facts
from curriculum.mix import idle, remembered, ruled
from curriculum.recall import make_recall
from curriculum.records import extraction, listing, summary
from curriculum.telling import telling_words, tells, tool_words
from curriculum.tool_calls import refusal, tool_call
from curriculum.tool_pool import WRITTEN

SEED = 270
CHARS_OF_4K = 12_300
"""Of filler and facts that make about 4,096 tokens with the question."""


def recall_4k(rng: random.Random, split: str) -> Example:
    return make_recall(rng, split, CHARS_OF_4K, rng.randint(3, 12), 1)


TAUGHT = frozenset(tool.name for tool in WRITTEN)


def is_told(example: Example) -> bool:
    """Whether every call's request has more words of the called tool than of each other declared one, words of its values aside."""
    tools = {tool["function"]["name"]: tool_words(tool) for tool in example.tools}
    if len({frozenset(telling_words(name)) for name in tools}) < len(tools):
        return False
    text = ""
    for step in example.steps:
        if step.role == "user":
            text = step.text
        for call in step.calls:
            rest = [words for name, words in tools.items() if name != call["name"]]
            if call["name"] not in TAUGHT and not tells(text, call["arguments"].values(), tools[call["name"]], rest):
                return False
    return True


def _told(rng: random.Random, split: str, task: str) -> Example:
    while True:
        example = tool_call(rng, split)
        if example.task == task and is_told(example):
            return example


def _result(rng: random.Random, split: str) -> Example:
    return _told(rng, split, "tool_results")


def _call(rng: random.Random, split: str) -> Example:
    return _told(rng, split, "tool_calls")


def _blind_call(rng: random.Random) -> Example:
    while True:
        example = blind_call(rng)
        if is_told(example):
            return example


def _multi_turn(rng: random.Random, split: str) -> Example:
    return (follow_up if rng.random() < 0.5 else remembered)(rng, split)


def _json(rng: random.Random, split: str) -> Example:
    return (listing if rng.random() < 0.25 else extraction)(rng, split)


TASKS = {
    "facts": facts, "arithmetic": arithmetic, "copying": copying, "recall_4k": recall_4k, "tool_calls": _call, "json": _json,
    "editing": editing, "summaries": summary, "tool_results": _result, "refusals": refusal, "system": ruled,
    "multi_turn": _multi_turn, "idle_tools": idle,
}


BLIND_TASKS = {"tool_calls": _blind_call, "recall_4k": blind_recall}
COUNTS = {"tool_calls": 100, "facts": 60, "arithmetic": 60, "copying": 60, "recall_4k": 60, "json": 60}
OTHERS = 30
"""Examples of a task in each split: more where there is a target."""


def held_out(count: int | None = None, tasks: tuple[str, ...] = tuple(TASKS)) -> Iterator[tuple[str, str, Example]]:
    """(task, split, example), `count` of each, or COUNTS; the first ones are the same whatever the count."""
    for task in tasks:
        for split in (HELD, NEW, BLIND)[:3 if task in BLIND_TASKS else 2]:
            rng = random.Random(f"{SEED} {task} {split}")
            for _ in range(count or COUNTS.get(task, OTHERS)):
                yield task, split, BLIND_TASKS[task](rng) if split == BLIND else TASKS[task](rng, split)
