"""Questions about q27app in many wordings, with the short true answers of facts_general and facts_tables."""

from __future__ import annotations

import random
from functools import cache

from curriculum.example import NEW, TRAIN, Example, ask, is_held_out
from curriculum.facts_general import GENERAL, Fact
from curriculum.facts_tables import table_facts

LEADS = ("", "", "", "", "", "Can you tell me: ", "Could you explain: ", "I would like to know: ", "Do you know: ", "Tell me, ", "Well, ",
         "Excuse me, ", "I wonder: ", "My question: ", "Hi! ", "Hello, ", "Quick question: ", "Please tell me: ", "One more thing. ", "Okay. ", "I have a question. ", "So, ")
NEW_LEADS = ("", "", "Sorry to bother you. ", "Just curious: ")
TAILS = ("", "", "", "", "", " Thanks.", " Please.", " Answer shortly.", " I am new here.")
WEIGHT_OF_GENERAL = 0.5


@cache
def all_facts() -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """(general, of tables)."""
    return GENERAL, tuple(table_facts())


def wordings(fact: Fact, split: str) -> list[str]:
    """A fact's questions: of the general kind, one in ten of the train wordings is held out with each lead and tail."""
    return list(fact[3] if split == NEW else fact[2])


OPENERS = ("What does ", "What is ", "What are ", "Which ", "How do I ", "How can I ", "Where is ", "Explain ", "Tell me about ", "What ")
INDIRECT = ("Please tell me ", "I want to know ", "Can you tell me ", "I wonder ", "Say ", "Do you know ", "Could you tell me ", "I need to know ",
            "I am asking ", "I would like to hear ")
SMALL = frozenset("a an the is of in on to do does what which how i it my can me for with that this are there".split())


def _rewrite(rng: random.Random, question: str) -> str:
    """Another wording by rule: an indirect question, small words lost, words alone, halves turned around."""
    kind = rng.random()
    words = question.rstrip("?.! ").split()
    if kind < 0.2 and question.startswith(OPENERS):
        return rng.choice(INDIRECT) + question[0].lower() + question[1:].rstrip("?") + rng.choice((".", "?", ""))
    if kind < 0.34 and len(words) > 3:
        kept = [word for word in words if word.lower() not in SMALL or rng.random() < 0.5]
        return " ".join(kept) if kept else question
    if kind < 0.4 and len(words) > 4:
        return " ".join(word for word in words if word.lower() not in SMALL)
    if kind < 0.46 and len(words) > 5:
        cut = rng.randint(2, len(words) - 2)
        return " ".join([*words[cut:], *words[:cut]])
    if kind < 0.52 and len(words) > 4:
        words.insert(rng.randint(1, len(words)), rng.choice(("please", "exactly", "really", "now", "here", "again", "then", "actually")))
        return " ".join(words) + rng.choice(("?", ".", ""))
    return question


def _vary(rng: random.Random, question: str, split: str) -> str:
    lead = rng.choice(NEW_LEADS if split == NEW else LEADS)
    if lead.endswith((": ", ", ")) and not question.startswith(("I ", "q27app", "Q27APP", "C", "G", "/", "-")) and question[1:2].islower():
        question = question[0].lower() + question[1:] if rng.random() < 0.5 else question
    if split == TRAIN:
        question = _rewrite(rng, question)
    tail = rng.choice(TAILS)
    kind = rng.random()
    if kind < 0.12:
        question = question.rstrip("?.!")
    elif kind < 0.2:
        question = question.lower() if not any(mark in question for mark in ("_", "--", "Q27APP", "HOME", "CONFIG")) else question
    if tail and not question.endswith(("?", ".", "!")):
        tail = "." + tail
    return lead + question + tail


def facts(rng: random.Random, split: str) -> Example:
    general, tables = all_facts()
    fact = rng.choice(general if rng.random() < WEIGHT_OF_GENERAL else tables)
    while True:
        question = rng.choice(wordings(fact, split))
        if rng.random() < (0.7 if split == TRAIN else 0.5):
            question = _vary(rng, question, split)
        elif split == "held":
            question = _vary(rng, question, split)
        if split == NEW or is_held_out(question) == (split != TRAIN):
            break
        if rng.random() < 0.05:
            fact = rng.choice(general if rng.random() < WEIGHT_OF_GENERAL else tables)
    return Example("facts", ask(question, fact[0]), {"kind": "contains", "values": list(fact[1])})
