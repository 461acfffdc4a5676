"""Copying text and code exactly, and small edits of it."""

from __future__ import annotations

import random

from curriculum.example import NEW, TRAIN, Example, ask, choose, is_held_out
from curriculum.phrases import copy_request, noisy
from curriculum.pools import code, excerpt, sentence, thing, word
from curriculum.random_tasks import random_copying, random_editing

MADE_SHARE = 0.85
"""Of the training examples: made by `random_tasks`."""
COPY = (
    "Repeat this exactly:\n{x}", "Copy this text:\n{x}", "Write this again, without changes:\n{x}", "Repeat after me: {x}",
    "Say exactly this: {x}", "Copy the following exactly.\n\n{x}", "Please repeat the following text word for word:\n\n{x}",
    "Echo: {x}", "{x}\n\nRepeat the text above exactly.", "Output this text unchanged:\n{x}", "Copy:\n{x}",
    "Please copy this code exactly:\n{x}", "Return this as it is:\n{x}", "Print this again:\n{x}", "I give you a text. Repeat it.\n{x}",
    "Write the following once more: {x}", "Can you repeat this for me?\n{x}", "Here is a text:\n{x}\nWrite exactly the same.",
    "Send me the same text back:\n\n{x}", "Quote this: {x}", "Duplicate this:\n{x}", "Tell me exactly this: {x}",
    "I would like you to copy these lines:\n{x}", "Put the following text into your answer, nothing else:\n{x}",
    "Do not change anything and write down: {x}", "{x}\nSay that again.", "Answer with this text:\n{x}", "The same again, please:\n{x}",
)
NEW_COPY = (
    "Type out what follows, letter by letter:\n{x}", "Reproduce this verbatim: {x}",
    "I want to see precisely these characters again:\n\n{x}", "Give me back this same text:\n{x}",
)
REPLACE = (
    'Replace "{a}" with "{b}" in this text:\n{x}', "Change the word {a} to {b}:\n{x}", 'In the text below, write "{b}" instead of "{a}".\n\n{x}',
    "Copy this text, but replace {a} by {b}:\n{x}", "Rename {a} to {b} in this code:\n{x}", "Put {b} in place of {a}:\n{x}",
    'Where the text says "{a}", write "{b}":\n{x}', "{x}\n\nReplace {a} with {b}.", "Turn {a} into {b} in the following: {x}",
    'Write this with "{b}" for "{a}":\n{x}', "Exchange {a} for {b}:\n{x}", "Every {a} becomes {b}:\n{x}",
)
NEW_REPLACE = ('Swap every "{a}" for "{b}" here:\n{x}', "Use {b} where this says {a}:\n{x}")
NAMES = "value total index result count items name path size data text line key node left right".split()
NEW_NAMES = "buffer weight cursor offset".split()


def small_code(rng: random.Random, split: str) -> str:
    """A few lines of Python that read well."""
    names = NEW_NAMES if split == NEW else NAMES
    a, b, c = rng.choice(names), rng.choice(NAMES), rng.choice(names)
    n, m = rng.randint(0, 99), rng.randint(1, 99)
    forms = (
        f"def {a}_{b}({c}, {b}={n}):\n    if {c} > {m}:\n        return {c} - {b}\n    return {c} + {b}",
        f"{a} = [{n}, {m}, {n + m}]\nfor {b} in {a}:\n    print({b} * {m})",
        f"class {thing(rng, split).capitalize()}:\n    def __init__(self, {a}):\n        self.{a} = {a}\n\n    def {b}(self):\n        return self.{a} + {n}",
        f"with open(\"{word(rng, split)}.txt\") as file:\n    {a} = file.read()\nprint(len({a}), {m})",
        f"{a} = {{\"{word(rng, split)}\": {n}, \"{word(rng, split)}\": {m}}}\nassert {a}[\"{word(rng, split)}\"] == {n}",
        f"while {a} < {m}:\n    {a} += {n + 1}\n    {b}.append({a})",
        f"{a} = sorted({b}, key=lambda {c}: {c}[{n % 10}])\nreturn {a}[:{m}]",
    )
    return rng.choice(forms)


def material(rng: random.Random, split: str) -> str:
    """Something to copy."""
    kind = rng.randrange(8)
    if kind <= 1:
        return " ".join(sentence(rng, split) for _ in range(rng.randint(1, 3)))
    if kind == 2:
        return " ".join(word(rng, split) for _ in range(rng.randint(3, 14)))
    if kind == 3:
        return small_code(rng, split)
    if kind == 4:
        return " ".join(code(rng) for _ in range(rng.randint(1, 5)))
    if kind == 5:
        return ", ".join(str(rng.randint(0, 10 ** rng.randint(1, 5))) for _ in range(rng.randint(3, 10)))
    if kind == 6 and split == TRAIN:
        return excerpt(rng, rng.randint(1, 5)).strip() or word(rng, split)
    return "\n".join(f"- {word(rng, split)} {thing(rng, split)}: {rng.randint(1, 500)}" for _ in range(rng.randint(2, 5)))


def _belonging(rng: random.Random, split: str) -> str:
    while True:
        text = material(rng, split)
        if is_held_out(text) == (split != TRAIN):
            return text


def copying(rng: random.Random, split: str) -> Example:
    if split == TRAIN and rng.random() < MADE_SHARE:
        return random_copying(rng)
    text = _belonging(rng, split)
    if split == TRAIN and rng.random() < 0.6:
        question = copy_request(rng, text)
    else:
        question = noisy(rng, split, choose(rng, split, COPY, NEW_COPY)).format(x=text)
    return Example("copying", ask(question, text), {"kind": "exact", "value": text})


def editing(rng: random.Random, split: str) -> Example:
    if split == TRAIN and rng.random() < MADE_SHARE:
        return random_editing(rng)
    text = small_code(rng, split) if rng.random() < 0.5 else " ".join(word(rng, split) for _ in range(rng.randint(5, 14)))
    pieces = [piece for piece in text.replace("(", " ").replace(")", " ").replace(".", " ").replace(":", " ").split() if piece.isalpha()]
    old, new = rng.choice(pieces), word(rng, split)
    question = choose(rng, split, REPLACE, NEW_REPLACE).format(a=old, b=new, x=text)
    import re
    answer = re.sub(rf"(?<![A-Za-z]){re.escape(old)}(?![A-Za-z])", new, text)
    return Example("editing", ask(question, answer), {"kind": "exact", "value": answer})
