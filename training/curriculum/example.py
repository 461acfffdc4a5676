"""One exchange of a task, and how an answer to it is judged."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRAIN, HELD, NEW, BLIND = "train", "held", "new", "blind"
SPLITS = (TRAIN, HELD, NEW)


@dataclass(frozen=True)
class Step:
    """One message after the first user message: the model's, or a tool's result, or the next user message.

    role: "assistant", "tool" or "user". calls: [{"name", "arguments"}] of an assistant.
    """

    role: str
    text: str = ""
    reasoning: str | None = None
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Example:
    """A task's exchange. steps begin with a user's message and end with an assistant's.

    check: how the last answer is judged, see q27app/bench/demo_eval.py. system: what the system text must say for this exchange to make
    sense, or None. tools: declarations in OpenAI's form. alone: it cannot share a conversation with other exchanges.
    """

    task: str
    steps: tuple[Step, ...]
    check: Mapping[str, Any]
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    alone: bool = False
    thinking: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)


Task = Callable[[random.Random, str], Example]


def ask(question: str, answer: str, reasoning: str | None = None) -> tuple[Step, ...]:
    return Step("user", question), Step("assistant", answer, reasoning)


def is_held_out(*values: object) -> bool:
    """About one in ten tuples of values never occurs in training; which ones depends on the values alone."""
    digest = hashlib.blake2s(json.dumps(values, default=str).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") % 10 == 0


def draw(rng: random.Random, split: str, make: Callable[[], Any]) -> Any:
    """A value from `make` that belongs to the split."""
    wanted = split != TRAIN
    for _ in range(1000):
        value = make()
        if is_held_out(value) == wanted:
            return value
    raise AssertionError("the pool of values is too small for its split")


def choose(rng: random.Random, split: str, own: Sequence[Any], new: Sequence[Any]) -> Any:
    """One of the task's own items, or of the new ones in the split of that name."""
    return rng.choice(new if split == NEW else own)
