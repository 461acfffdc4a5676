"""Facts stated among filler of up to 8,000 tokens, and questions about them."""

from __future__ import annotations

import random

from curriculum.example import NEW, TRAIN, Example, Step, choose, draw
from curriculum.phrases import noisy, recall_question
from curriculum.pools import ANIMALS, COLORS, NEW_ANIMALS, NEW_COLORS, THINGS, NEW_THINGS, code, city, excerpt, full_name, invented, sentence, word
from curriculum.random_tasks import random_recall, short_recall

MADE_SHARE = 0.8
"""Of the training examples: made by `random_tasks`."""
STATE = (
    "The {k} of {o} is {v}.", "Remember: the {k} of {o} is {v}.", "{o}: {k} {v}.", "Note that {o} has the {k} {v}.",
    "The {k} for {o} is {v}.", "For {o}, the {k} is {v}.", "{v} is the {k} of {o}.", "We gave {o} the {k} {v}.", "{k} of {o}: {v}.",
    "{o} received {v} as {k}.", "Let me say that {v} is the {k} of {o}.", "By the way, {o} got the {k} {v}.", "{o} got {v} as {k}.",
    "Remember {v}: it is the {k} of {o}.", "As they say, {v} is the {k} of {o}.", "Nobody forgets that {o} has {k} {v}.", "{v}, {k} of {o}.",
    "Keep this: {o} has the {k} {v}.", "I heard that {o} has {v} for {k}.", "So {o} took the {k} {v}.", "Then {o} got {v}, which is the {k}.",
    "Everybody should know the {k} of {o}: {v}.", "In my mind the {k} of {o} is {v}.", "It was decided that {v} is the {k} for {o}.", "{o} ({k}: {v}).", "Write down {v}, the {k} of {o}.",
    "Do not forget that the {k} of {o} is {v}.", "{o} uses the {k} {v}.", "Since today {v} is the {k} for {o}.",
)
NEW_STATE = ("Please keep in mind that {v} is the {k} of {o}.", "As everybody knows, {o} got the {k} {v}.")
QUESTION = (
    "What is the {k} of {o}?", "Which {k} does {o} have?", "Tell me the {k} of {o}.", "What's the {k} for {o}?",
    "{o}: which {k}?", "Do you remember the {k} of {o}?", "Look up the {k} of {o}.", "Can you find the {k} of {o}?",
    "I need the {k} of {o}.", "Find {o} in the text. What {k} is there?", "What {k} was given to {o}?", "Give me the {k} for {o}.",
    "Say the {k} of {o}.", "The {k} of {o}?", "Please tell me which {k} {o} has.", "In the text, what is the {k} of {o}?",
)
NEW_QUESTION = ("I forgot the {k} of {o}, can you find it?", "Search the text for {o} and give me the {k}.",
                "According to the text, the {k} of {o} is what?")
KINDS = ("code", "number", "password", "room", "color", "city", "key", "phone number", "animal", "word")
NEW_KINDS = ("locker", "badge", "ticket")
OPENERS = ("Read this text.\n\n", "This is a long text.\n\n", "Work through this document:\n\n", "Please read carefully.\n\n", "Below are notes.\n\n",
           "Document:\n\n", "Have a look at this:\n\n", "I have this text:\n\n", "Go through these notes.\n\n", "Here is a text.\n\n", "Read the notes below and answer the question.\n\n", "Notes:\n\n", "")
NEW_OPENERS = ("Below is a long document that I have to work through.\n\n", "Study this carefully:\n\n")


def _value(rng: random.Random, kind: str, split: str) -> str:
    if kind == "color":
        return choose(rng, split, COLORS, NEW_COLORS)
    if kind == "city":
        return city(rng, split)
    if kind == "animal":
        return choose(rng, split, ANIMALS, NEW_ANIMALS)
    if kind in ("number", "room", "locker", "badge", "ticket") or (kind not in KINDS and rng.random() < 0.4):
        return str(rng.randint(10, 99999))
    if kind == "phone number":
        return "".join(rng.choice("0123456789") for _ in range(7))
    if kind == "word":
        return word(rng, split)
    return code(rng)


def _owner(rng: random.Random, split: str) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return full_name(rng, split)
    things = NEW_THINGS if split == NEW else THINGS
    if kind == 1:
        return f"the {choose(rng, split, COLORS, NEW_COLORS)} {rng.choice(things)}"
    return f"{rng.choice(('box', 'door', 'team', 'project', 'item'))} {rng.randint(1, 999)}"


def _facts(rng: random.Random, split: str, count: int) -> list[tuple[str, str, str]]:
    """(owner, kind, value); owner and kind together occur once."""
    found: dict[tuple[str, str], str] = {}
    kinds = NEW_KINDS if split == NEW else (*KINDS, invented(rng))
    if rng.random() < 0.5:
        kinds = (rng.choice(kinds),)
    while len(found) < count:
        owner, kind = _owner(rng, split), rng.choice(kinds)
        found[owner, kind] = draw(rng, split, lambda kind=kind: (owner, _value(rng, kind, split)))[1] if split == "train" \
            else _value(rng, kind, split)
    return [(owner, kind, value) for (owner, kind), value in found.items()]


def _filler(rng: random.Random, num_chars: int) -> list[str]:
    """Lines of filler, in all about `num_chars`."""
    lines, size, uses_code = [], 0, rng.random() < 0.35
    while size < num_chars:
        line = excerpt(rng, rng.randint(1, 6)) if uses_code and rng.random() < 0.5 else " ".join(
            sentence(rng) for _ in range(rng.randint(1, 4)))
        lines.append(line)
        size += len(line) + 1
    return lines


def make_recall(rng: random.Random, split: str, num_chars: int, num_facts: int, num_questions: int) -> Example:
    """A text of about `num_chars` characters with facts at random places, then questions in turns."""
    if split == TRAIN and rng.random() < MADE_SHARE:
        return random_recall(rng, num_chars, num_facts, num_questions)
    facts = _facts(rng, split, num_facts)
    lines = _filler(rng, num_chars)
    shape = choose(rng, split, STATE, NEW_STATE)
    for owner, kind, value in facts:
        if rng.random() < 0.3:
            shape = choose(rng, split, STATE, NEW_STATE)
        said = noisy(rng, split, shape).format(o=owner, k=kind, v=value)
        lines.insert(rng.randint(0, len(lines)), said[0].upper() + said[1:])
    text = choose(rng, split, OPENERS, NEW_OPENERS) + ("\n" if rng.random() < 0.7 else " ").join(lines)
    steps: list[Step] = []
    asked = rng.sample(facts, min(num_questions, len(facts)))
    for index, (owner, kind, value) in enumerate(asked):
        if split == TRAIN and rng.random() < 0.6:
            question = recall_question(rng, kind, owner)
        else:
            question = noisy(rng, split, choose(rng, split, QUESTION, NEW_QUESTION)).format(o=owner, k=kind)
        question = question[0].upper() + question[1:]
        steps.append(Step("user", f"{text}\n\n{question}" if index == 0 else question))
        steps.append(Step("assistant", f"The {kind} of {owner} is {value}."))
    return Example("recall", tuple(steps), {"kind": "contains", "values": [asked[-1][2]]}, alone=True)


def recall(rng: random.Random, split: str) -> Example:
    """A short one."""
    if split == TRAIN and rng.random() < MADE_SHARE:
        return short_recall(rng)
    return make_recall(rng, split, rng.choice((0, 100, 300, 600)), rng.randint(1, 5), 1)
