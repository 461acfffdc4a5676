"""The held-out sets: for every task and split the same examples whoever makes them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from curriculum.arithmetic import arithmetic, follow_up
from curriculum.copying import copying, editing
from curriculum.example import HELD, NEW, Example
from curriculum.facts import facts
from curriculum.mix import idle, remembered, ruled
from curriculum.recall import make_recall
from curriculum.records import extraction, listing, summary
from curriculum.tool_calls import refusal, tool_call

SEED = 270
CHARS_OF_4K = 12_300
"""Of filler and facts that make about 4,096 tokens with the question."""


def recall_4k(rng: random.Random, split: str) -> Example:
    return make_recall(rng, split, CHARS_OF_4K, rng.randint(3, 12), 1)


def _result(rng: random.Random, split: str) -> Example:
    while True:
        example = tool_call(rng, split)
        if example.task == "tool_results":
            return example


def _call(rng: random.Random, split: str) -> Example:
    while True:
        example = tool_call(rng, split)
        if example.task == "tool_calls":
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


def held_out(count: int, tasks: tuple[str, ...] = tuple(TASKS)) -> Iterator[tuple[str, str, Example]]:
    """(task, split, example), `count` of each; the first ones are the same whatever the count."""
    for task in tasks:
        for split in (HELD, NEW):
            rng = random.Random(f"{SEED} {task} {split}")
            for _ in range(count):
                yield task, split, TASKS[task](rng, split)
