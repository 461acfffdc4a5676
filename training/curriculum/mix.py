"""Joins exchanges to conversations of a wanted length: single questions, sessions, long texts, agents' long prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from curriculum.arithmetic import arithmetic, follow_up
from curriculum.copying import copying, editing
from curriculum.example import TRAIN, Example, Step
from curriculum.facts import facts
from curriculum.looking_up import with_looking_up
from curriculum.obedience import remembering, system_text
from curriculum.phrases import led
from curriculum.pools import excerpt, paragraph
from curriculum.random_tasks import random_recall
from curriculum.recall import make_recall, recall
from curriculum.records import extraction, listing, summary
from curriculum.tool_calls import idle_tools, long_tools, refusal, tool_call, tool_session

CHARS_A_TOKEN = 2.4
TOOL_CHARS_A_TOKEN = 3.5
"""Of declarations as Python prints them."""
PLAIN = (
    (facts, 28), (arithmetic, 16), (follow_up, 3), (copying, 32), (editing, 8), (summary, 6), (extraction, 9), (listing, 3),
)
WITH_TOOLS = ((tool_call, 11), (tool_session, 20), (refusal, 3))
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer in short sentences.", "Be brief.", "Answer shortly and truly.",
    "You are the demo model of q27app.", "You help people with q27app.", "You are a careful assistant for everyday tasks.",
    "You are an agent with tools. Use them where they help.", "Answer the user's question.", "You are Claude Code, a command line agent.",
)
THOUGHTS = ("I can answer this directly.", "This is simple.", "The answer is clear.", "I know this.")


@dataclass(frozen=True)
class Conversation:
    """What is rendered: system text or None, tools, steps. An assistant's step without reasoning did not think."""

    system: str | None
    tools: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]


def _weighted(rng: random.Random, table: Sequence[tuple[Any, int]]) -> Any:
    return rng.choices([entry for entry, _ in table], [weight for _, weight in table])[0]


def plain(rng: random.Random, split: str) -> Example:
    """An exchange without tools or system text."""
    example = _weighted(rng, PLAIN)(rng, split)
    if split != TRAIN or rng.random() < 0.6 or example.task in ("facts", "copying"):
        return example
    first = Step("user", led(rng, example.steps[0].text))
    return Example(example.task, (first, *example.steps[1:]), example.check, thinking=example.thinking)


def ruled(rng: random.Random, split: str) -> Example:
    """An exchange under a rule of the system text."""
    while True:
        inner = rng.choice((facts, facts, arithmetic, summary))(rng, split)
        if len(inner.steps) == 2 and not inner.thinking:
            return system_text(rng, split, inner)


def remembered(rng: random.Random, split: str) -> Example:
    between = []
    while len(between) < rng.choice((0, 1, 1, 2, 3)):
        example = rng.choice((facts, facts, arithmetic))(rng, split)
        if not example.thinking:
            between.append(example)
    return remembering(rng, split, between)


def idle(rng: random.Random, split: str) -> Example:
    return idle_tools(rng, split, rng.choice((facts, facts, arithmetic, copying))(rng, split))


def small(rng: random.Random, split: str = TRAIN) -> Example:
    """An exchange that fits a few hundred characters: for the shortest conversations."""
    kind = rng.random()
    if kind < 0.1:
        return ruled(rng, split)
    if kind < 0.2:
        return recall(rng, split)
    if kind < 0.25:
        return remembered(rng, split)
    return plain(rng, split)


def with_tools(rng: random.Random, split: str = TRAIN) -> Example:
    return idle(rng, split) if rng.random() < 0.08 else _weighted(rng, WITH_TOOLS)(rng, split)


def size_of(steps: Sequence[Step], tools: Sequence[Mapping[str, Any]] = (), system: str | None = None) -> float:
    """About how many tokens these take."""
    chars = sum(len(step.text) + len(step.reasoning or "") + (len(str(step.calls)) if step.calls else 0) for step in steps)
    declared = (len(str(tools)) + 700) / TOOL_CHARS_A_TOKEN if tools else 0
    return (chars + len(system or "")) / CHARS_A_TOKEN + declared + 9 * len(steps) + 14


def conversation(rng: random.Random, length: int) -> Conversation:
    """A conversation of training text of about `length` tokens or less."""
    found = _of_length(rng, length)
    return Conversation(found.system, found.tools, with_looking_up(found.steps, found.tools))


def _of_length(rng: random.Random, length: int) -> Conversation:
    if length >= 2048:
        kind, recalls = rng.random(), 0.3 if length == 2048 else 0.76
        if kind < recalls:
            return _long_recall(rng, length)
        if kind < recalls + 0.1:
            return _agent(rng, length)
        return _session(rng, length)
    if length == 128:
        return _single(rng, length, small)
    if length == 256:
        kind = rng.random()
        return _sums(rng, length) if kind < 0.15 else _dense_recall(rng, length) if kind < 0.29 else _session(rng, length, tools=False)
    kind = rng.random()
    if kind < 0.72:
        return _session(rng, length, tools=True)
    if kind < 0.75 and length == 512:
        return _sums(rng, length)
    if kind < 0.89:
        return _dense_recall(rng, length)
    if kind < 0.93:
        return _long_recall(rng, length)
    return _session(rng, length, tools=False)


def _single(rng: random.Random, length: int, make: Any) -> Conversation:
    while True:
        example = make(rng)
        if size_of(example.steps, example.tools, example.system) < length * 1.1:
            return as_conversation(rng, example)


def as_conversation(rng: random.Random, example: Example, thinks: bool | None = None) -> Conversation:
    """One exchange as a conversation. thinks: whether its answers have thoughts even if the task gives none."""
    system = example.system
    if system is None and rng.random() < 0.3:
        system = rng.choice(SYSTEMS)
    return Conversation(system, example.tools, _thinking(rng, example, thinks))


def _thinking(rng: random.Random, example: Example, thinks: bool | None = None) -> tuple[Step, ...]:
    """The steps, some with a thought where the task gives none."""
    if thinks is None:
        thinks = not example.thinking and rng.random() < 0.06
    if not thinks:
        return example.steps
    return tuple(
        Step(step.role, step.text, step.reasoning or rng.choice(THOUGHTS), step.calls) if step.role == "assistant" else step
        for step in example.steps)


def _session(rng: random.Random, length: int, tools: bool = True) -> Conversation:
    """Exchanges one after the other until the length is reached."""
    first = (with_tools if tools else small)(rng)
    for tried in range(100):
        if size_of(first.steps, first.tools, first.system) < length * 0.95:
            break
        first = (with_tools if tools and tried < 60 else small)(rng)
    base = as_conversation(rng, first)
    steps, declared = list(base.steps), {tool["function"]["name"]: tool for tool in base.tools}
    if first.system is not None and first.task == "system":
        return base
    misses = 0
    while misses < 8:
        example = with_tools(rng) if tools and rng.random() < 0.55 else plain(rng, TRAIN)
        if example.alone or (example.tools and not tools):
            misses += 1
            continue
        more = {tool["function"]["name"]: tool for tool in example.tools}
        clash = any(name in declared and declared[name] != tool for name, tool in more.items())
        named_missing = first.task == "refusals" and more
        added = _thinking(rng, example)
        if clash or named_missing or size_of([*steps, *added], [*declared.values(), *more.values()], base.system) > length * 0.93:
            misses += 1
            continue
        declared |= more
        steps += added
        if rng.random() < 0.04:
            break
    shuffled = list(declared.values())
    rng.shuffle(shuffled)
    return Conversation(base.system, tuple(shuffled), tuple(steps))


def _sums(rng: random.Random, length: int) -> Conversation:
    """Arithmetic alone, one question after the other."""
    steps: list[Step] = []
    while size_of(steps) < length * 0.85:
        steps += arithmetic(rng, TRAIN).steps
    if size_of(steps) > length:
        steps = steps[:-2]
    return Conversation(rng.choice(SYSTEMS) if rng.random() < 0.1 else None, (), tuple(steps))


def _long_recall(rng: random.Random, length: int) -> Conversation:
    questions = min(48, max(1, length // rng.choice((80, 170))))
    num_facts = rng.randint(questions, questions + 12) if rng.random() < 0.8 else rng.randint(1, 4)
    overhead = num_facts * 16 + min(questions, num_facts) * 44 + 40
    room = max(0.0, (length * rng.uniform(0.55, 0.93) - overhead) * CHARS_A_TOKEN)
    if length <= 1024 and rng.random() < 0.5:
        room *= rng.random() * 0.3
    return as_conversation(rng, make_recall(rng, TRAIN, int(room), num_facts, questions), thinks=False)


def _dense_recall(rng: random.Random, length: int) -> Conversation:
    """Facts with little between them, most of which are asked for."""
    questions = max(1, int(length * rng.uniform(0.5, 0.95)) // 95)
    filler = rng.choice((0, 0, rng.randint(0, length)))
    return as_conversation(rng, random_recall(rng, filler, questions + rng.randint(0, 1 + questions // 3), questions), thinks=False)


def _agent(rng: random.Random, length: int) -> Conversation:
    """A long system text and long tool declarations, then short exchanges, as coding agents send them."""
    tools = long_tools(rng, TRAIN, rng.randint(2, max(2, length // 500)))
    room = (length * rng.uniform(0.5, 0.85)) * CHARS_A_TOKEN - len(str(tools))
    parts = [rng.choice(SYSTEMS)]
    while sum(map(len, parts)) < room:
        parts.append(excerpt(rng, rng.randint(5, 30)) if rng.random() < 0.6 else paragraph(rng, rng.randint(3, 9)))
    system = "\n\n".join(parts)[:max(0, int(room))]
    steps: list[Step] = []
    declared = {tool["function"]["name"]: tool for tool in tools}
    for _ in range(40):
        example = with_tools(rng) if rng.random() < 0.4 else plain(rng, TRAIN)
        if example.alone or any(tool["function"]["name"] in declared for tool in example.tools):
            continue
        added = {tool["function"]["name"]: tool for tool in example.tools}
        if size_of([*steps, *example.steps], [*declared.values(), *added.values()], system) > length * 0.95:
            break
        declared |= added
        steps += _thinking(rng, example)
    if not steps:
        steps = list(facts(rng, TRAIN).steps)
    shuffled = list(declared.values())
    rng.shuffle(shuffled)
    return Conversation(system, tuple(shuffled), tuple(steps))
