"""Arithmetic in questions put together from parts: a few words tell the operation, everything else may be any word; train only."""

from __future__ import annotations

import random

from curriculum.random_words import any_name, any_word, words

EXPRESSIONS = {
    "+": ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a} plus {b}", "{a} plus {b}", "the sum of {a} and {b}", "{a} and {b} together", "{a} increased by {b}", "{b} added to {a}",
          "{a} with {b} added", "{a} and {b} more", "the total of {a} and {b}", "{a} & {b} summed"),
    "-": ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} minus {b}", "the difference of {a} and {b}", "{a} less {b}", "{b} taken from {a}", "{a} without {b}",
          "{a} reduced by {b}", "{b} subtracted from {a}", "the difference between {a} and {b}"),
    "*": ("{a} * {b}", "{a} * {b}", "{a} x {b}", "{a}*{b}", "{a} times {b}", "{a} times {b}", "the product of {a} and {b}", "{a} multiplied by {b}", "{b} times {a}"),
}
ASKS = ("what is ", "compute ", "calculate ", "find ", "how much is ", "tell me ", "work out ", "solve ", "say ", "I want ", "I wonder about ", "do you know ",
        "what does it make: ", "determine ", "figure out ", "show me ", "answer me: ", "let me know ", "what is the result of ", "the answer to ", "")
LEADS = ("", "", "", "Please ", "Hi, ", "Hello! ", "Now ", "So, ", "Can you ", "Next: ", "Well, ", "My friend asks: ", "In my book: ", "Okay. ", "Look: ")
TAILS = ("?", "?", ".", "", "!", " please.", ", please?", " =", "? Thanks.", " for me.", ". How much?", ", how much is it?", " - what comes out?")


def plain_question(rng: random.Random, a: int, sign: str, b: int) -> str:
    """A question with an expression in it."""
    core = rng.choice(EXPRESSIONS[sign]).format(a=a, b=b)
    before = rng.choice(LEADS) + rng.choice(ASKS)
    kind = rng.random()
    if kind < 0.3:
        before = f"{words(rng, 1, 6)}{rng.choice((' ', ' ', ': ', ', '))}"
    elif kind < 0.45:
        before += f"{words(rng, 1, 3)} "
    text = before + core + (rng.choice(TAILS) if rng.random() < 0.7 else f"{rng.choice((' ', ', ', '. ', '? '))}{words(rng, 1, 7)}{rng.choice('.?!')}")
    return text[0].upper() + text[1:] if rng.random() < 0.85 else text


GAINS = ("gets", "buys", "finds", "makes", "receives", "collects", "brings", "adds", "earns", "picks", "bakes", "wins", "orders", "draws", "catches")
LOSSES = ("loses", "sells", "gives away", "eats", "breaks", "drops", "uses", "throws away", "burns", "spends", "hands out", "lends", "misses", "cuts off", "forgets")
MORE = ("more", "another", "in addition", "extra", "as well", "further ones", "on top", "again", "too")
TOTAL = ("How many {t}s are there now", "How many in all", "How many altogether", "How many {t}s in total", "What is the whole number", "How many does that make",
         "How many {t}s does {p} have now", "What do we count", "Together that is", "How many are there", "How many {t}s together", "Give the sum")
LEFT = ("How many are left", "How many {t}s remain", "How many does {p} still have", "What is left", "How many {t}s are still there", "How many stay",
        "How many {t}s are left for {p}", "What remains", "How many are not {w}", "What number is left over")
EACH = ("How many {t}s are there", "How many {t}s in all", "How many {t}s is that", "What is the number of {t}s", "How many {t}s altogether", "How many does that make",
        "How many {t}s are {w}", "Count the {t}s", "How many {t}s does {p} have")
FORMS = {
    "+": ("{p} has {a} {t}s and {gain} {b} {more}. {total}?", "{p} {gain} {a} {t}s and then {b} {more}. {total}?", "{a} {t}s {w} here, {b} {w} there. {total}?",
          "{p} {gain} {a} {t}s, {q} {gain} {b}. {total}?", "there are {a} {w} {t}s and {b} {u} {t}s. {total}?", "in the {w} are {a} {t}s, in the {u} {b}. {total}?",
          "first {a} {t}s, after that {b} {more}. {total}?", "{a} {t}s came on one day and {b} on the next. {total}?", "{p}: {a} {t}s. {q}: {b} {t}s. {total}?",
          "{p} {w}s {a} {t}s and {b} {u}s. {total}?", "with {a} {t}s {w} and {b} {more} {u}, {total}?", "{p} {w} {a} {t}s. {q} {w} {b} {more}. {total}?"),
    "-": ("{p} has {a} {t}s and {loss} {b}. {left}?", "of {a} {t}s, {p} {loss} {b}. {left}?", "{p} {loss} {b} of the {a} {t}s. {left}?", "there were {a} {t}s, but {b} are {w}. {left}?",
          "from {a} {t}s somebody takes {b}. {left}?", "{b} of {a} {t}s are gone. {left}?", "{p} had {a} {t}s. {b} went to {q}. {left}?", "out of {a} {t}s {q} {loss} {b}. {left}?",
          "{a} {t}s were here until {q} took {b}. {left}?", "{p} wants {a} {t}s and owns {b}. How many are missing?", "{a} {t}s {w}, then {b} are lost. {left}?",
          "when {p} {loss} {b} from {a} {t}s, {left}?", "once {b} of {a} {t}s are {w}, {left}?", "{p} {w} {a} {t}s, {b} fewer remain. {left}?"),
    "*": ("there are {a} {u}s with {b} {t}s each. {each}?", "{p} has {a} {u}s of {b} {t}s each. {each}?", "{a} {u}s hold {b} {t}s each. {each}?", "every {u} has {b} {t}s, and there are {a} {u}s. {each}?",
          "{p} {gain} {a} {u}s, each with {b} {t}s. {each}?", "in each of {a} {u}s are {b} {t}s. {each}?", "{b} {t}s per {u}, {a} {u}s. {each}?", "{a} times {p} {gain} {b} {t}s. {each}?",
          "{a} {u}s {w} {b} {t}s apiece. {each}?", "one {u} takes {b} {t}s. {a} {u}s are full. {each}?", "{a} rows of {b} {t}s {w}. {each}?", "each {u} {w}s {b} {t}s; {p} has {a} {u}s. {each}?"),
}


def story_question(rng: random.Random, a: int, sign: str, b: int) -> str:
    """A short story about two numbers."""
    names = {"p": any_name(rng), "q": any_name(rng), "t": any_word(rng).rstrip("s") or "cup", "w": any_word(rng), "u": any_word(rng).rstrip("s") or "box"}
    form = rng.choice(FORMS[sign])
    for part, choices in (("total", TOTAL), ("left", LEFT), ("each", EACH)):
        form = form.replace(f"{{{part}}}", rng.choice(choices))
    gain, loss = (rng.choice(known) if rng.random() < 0.7 else any_word(rng) for known in (GAINS, LOSSES))
    text = form.format(a=a, b=b, gain=gain, loss=loss, more=rng.choice(MORE) if rng.random() < 0.8 else any_word(rng), **names)
    if rng.random() < 0.25:
        text = f"{words(rng, 1, 5)}: {text}"
    return text[0].upper() + text[1:]
