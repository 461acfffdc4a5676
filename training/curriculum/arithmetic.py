"""Sums, differences and products, with and without thinking; words around them; chains of two steps."""

from __future__ import annotations

import random

from curriculum.example import NEW, TRAIN, Example, ask, choose, draw
from curriculum.phrases import noisy
from curriculum.pools import person, thing
from curriculum.random_words import any_word, words
from curriculum.stories import plain_question, story_question

MADE_SHARE = 0.8
"""Of the training questions: put together by `stories`."""
SIGNS = {"+": "plus", "-": "minus", "*": "times"}
PLAIN = (
    "What is {a} {s} {b}?", "{a} {s} {b} =", "What is {a} {w} {b}?", "Compute {a} {s} {b}.", "How much is {a} {s} {b}?",
    "Calculate {a} {w} {b}.", "{a} {w} {b}?", "Please compute {a} {s} {b}", "Tell me what {a} {s} {b} is.", "{a}{s}{b}?",
    "What does {a} {w} {b} give?", "The value of {a} {s} {b}?", "I want to know {a} {w} {b}.", "Work out {a} {s} {b}.", "Find {a} {s} {b}.",
    "Result of {a} {s} {b}?", "Do you know {a} {w} {b}?", "Give me {a} {s} {b}.", "{a} {s} {b} is what?", "Say what {a} {w} {b} is.",
    "Please, {a} {s} {b}!", "For my homework I need {a} {s} {b}.", "Solve {a} {s} {b}.", "What's {a} {s} {b}", "Can you compute {a} {w} {b}?",
)
NEW_PLAIN = (
    "I need the value of {a} {s} {b}.", "Quick, {a} {s} {b}!", "Give me the result of {a} {w} {b}.",
    "My homework says {a} {s} {b}. What do I write down?", "Evaluate: {a} {s} {b}",
)
STORY = {
    "+": ("{p} has {a} {t}s and gets {b} more. How many {t}s does {p} have now?",
          "There are {a} {t}s on one shelf and {b} on another. How many {t}s are there?",
          "{p} sold {a} {t}s in the morning and {b} in the evening. How many in all?",
          "{p} made {a} {t}s, then another {b}. What is the sum?", "With {a} {t}s here and {b} there, what is the total?",
          "{a} {t}s and {b} {t}s are put together. How many is that?"),
    "-": ("{p} had {a} {t}s and gave away {b}. How many {t}s are left?",
          "Of {a} {t}s, {b} are broken. How many are whole?",
          "{p} needs {a} {t}s and has {b}. How many are missing?",
          "From {a} {t}s {p} takes {b}. How many remain?", "{p} lost {b} of {a} {t}s. How many are there still?",
          "There were {a} {t}s before {b} were sold. How many remained?"),
    "*": ("{p} buys {a} boxes with {b} {t}s each. How many {t}s is that?",
          "There are {a} rows of {b} {t}s. How many {t}s are there?",
          "{a} shelves hold {b} {t}s each. How many {t}s in all?", "In each of {a} boxes there are {b} {t}s. How many are in the boxes?"),
}
NEW_STORY = {
    "+": ("{p} found {a} {t}s, then {b} others. What is the total?",),
    "-": ("After {p} lost {b} of {a} {t}s, how many remained?",),
    "*": ("Each of {a} bags holds {b} {t}s. How many {t}s do the bags hold?",),
}


def _value(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def _work(a: int, sign: str, b: int) -> str:
    """The steps that a thinking answer writes down."""
    if sign == "*":
        tens, ones = b - b % 10, b % 10
        if not tens or not ones:
            return f"{a} * {b} = {a * b}."
        return f"{a} * {tens} = {a * tens}. {a} * {ones} = {a * ones}. {a * tens} + {a * ones} = {a * b}."
    tens, ones = b - b % 10, b % 10
    middle = _value(a, sign, tens)
    return f"{a} {sign} {tens} = {middle}. {middle} {sign} {ones} = {_value(middle, sign, ones)}."


def _numbers(rng: random.Random, sign: str, split: str, easy: bool) -> tuple[int, int]:
    """Two numbers of two digits, in training sometimes of one or three; easy: products small enough without thinking."""
    def make() -> tuple[str, int, int]:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if split == "train":
            kind = rng.random()
            if kind < 0.12:
                a = rng.randint(0, 9)
            elif kind < 0.24:
                b = rng.randint(0, 9)
            elif kind < 0.32 and sign != "*":
                a = rng.randint(100, 999)
        if sign == "*" and easy:
            b = rng.randint(2, 9)
            a = rng.randint(2, 12)
        if sign == "-" and a < b:
            a, b = b, a
        return sign, a, b
    _, a, b = draw(rng, split, make)
    return a, b


def arithmetic(rng: random.Random, split: str) -> Example:
    thinks = rng.random() < 0.4
    sign = rng.choice("++--*" if thinks else "++++----*")
    a, b = _numbers(rng, sign, split, easy=not thinks)
    value = _value(a, sign, b)
    answer = f"{a} {sign} {b} = {value}."
    if split == TRAIN and rng.random() < MADE_SHARE:
        question = (plain_question if rng.random() < 0.5 else story_question)(rng, a, sign, b)
    elif rng.random() < 0.7:
        spelled = "x" if sign == "*" and rng.random() < 0.4 else sign
        question = noisy(rng, split, choose(rng, split, PLAIN, NEW_PLAIN)).format(a=a, b=b, s=spelled, w=SIGNS[sign])
    else:
        stories = (NEW_STORY if split == NEW else STORY)[sign]
        question = rng.choice(stories).format(a=a, b=b, p=person(rng, split), t=thing(rng, split))
    steps = ask(question, answer, _work(a, sign, b) if thinks else None)
    return Example("arithmetic", steps, {"kind": "number", "value": value}, thinking=thinks)


FOLLOW = {"+": ("Now add {b} to that.", "And plus {b}?", "Add {b}.", "Make it {b} more.", "Increase that by {b}.", "Now the result plus {b}.", "The result and {b} more?", "Put {b} on top.",
                "Add {b} to the result.", "What if I add {b}?", "Then {b} more, please.", "Raise the result by {b}.", "That and {b}?", "+ {b}",
                "Let it grow by {b}.", "Add another {b}.", "How much with {b} more?", "Increase it by {b}.", "Plus {b}.", "Now {b} more.", "Raise that by {b}."), "-": ("Now subtract {b} from that.", "And minus {b}?", "Take away {b}.", "Make it {b} less.", "Reduce that by {b}.", "Now the result minus {b}.", "The result without {b}?", "Take {b} off.",
                "Subtract {b} from the result.", "What if I subtract {b}?", "Then {b} less, please.", "Lower the result by {b}.", "That less {b}?", "- {b}",
                "Let it shrink by {b}.", "Remove another {b}.", "How much with {b} less?", "Decrease it by {b}.", "Reduce it by {b}.", "Minus {b}.", "Now {b} less.",
                "Lower that by {b}.")}
NEW_FOLLOW = {"+": ("Increase the result by {b}.",), "-": ("Reduce the result by {b}.",)}


UP = ("add", "plus", "more", "raise", "extra", "increased", "higher", "grow", "on top", "+")
DOWN = ("subtract", "minus", "less", "lower", "off", "reduced", "fewer", "shrink", "taken away", "-")


def _made_follow(rng: random.Random, sign: str, b: int) -> str:
    """What happens to the result, in a word or two among others."""
    cue, other = rng.choice(UP if sign == "+" else DOWN), any_word(rng)
    text = rng.choice((f"{cue} {b}", f"{b} {cue}", f"{other} {cue} {b}", f"{other} {b} {cue}", f"{words(rng, 1, 4)} {cue} {words(rng, 0, 2)} {b}",
                       f"{cue} the result by {b}" if cue in ("raise", "lower") else f"the result {cue} {b}", f"that {cue} {b}", f"{cue} {other} {b} {words(rng, 1, 3)}"))
    text = text.replace("  ", " ") + rng.choice((".", "?", "", "!", " please.", " then?"))
    return text[0].upper() + text[1:]


def follow_up(rng: random.Random, split: str) -> Example:
    """A second question that needs the first one's result."""
    first, second = rng.choice("+-"), rng.choice("+-")
    def make() -> tuple[int, int, int]:
        return rng.randint(30, 99), rng.randint(2, 29), rng.randint(2, 29)
    a, b, c = draw(rng, split, make)
    if first == "-" and a < b:
        a, b = b, a
    middle = _value(a, first, b)
    if second == "-" and middle < c:
        second = "+"
    value = _value(middle, second, c)
    question = choose(rng, split, PLAIN, NEW_PLAIN).format(a=a, b=b, s=first, w=SIGNS[first])
    more = rng.choice((NEW_FOLLOW if split == NEW else FOLLOW)[second]).format(b=c)
    if split == TRAIN and rng.random() < MADE_SHARE:
        question, more = plain_question(rng, a, first, b), _made_follow(rng, second, c)
    steps = (*ask(question, f"{a} {first} {b} = {middle}."), *ask(more, f"{middle} {second} {c} = {value}."))
    return Example("multi_turn", steps, {"kind": "number", "value": value})
