"""Questions about q27app in many wordings, with the short true answers of facts_general and facts_tables."""

from __future__ import annotations

import random
from functools import cache

from curriculum.example import NEW, TRAIN, Example, ask, is_held_out
from curriculum.facts_general import GENERAL, Fact
from curriculum.facts_tables import table_facts
from curriculum.random_words import any_word, said_sentence
from curriculum.random_words import words as any_words

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


TOLD = frozenset("""default environment variable exit code flag option command setting means mean what which where how why do does use set get config
license port size install remove""".split())
"""Words that tell questions apart and are kept while others are replaced."""
SYNONYMS = {
    "which": ("what",), "folder": ("directory",), "start": ("launch", "begin"), "show": ("display", "print"), "run": ("execute", "start"), "explain": ("describe", "clarify"),
    "largest": ("biggest",), "smallest": ("tiniest", "most little"), "remove": ("delete", "take away"), "find": ("locate", "discover"), "need": ("require", "want"),
    "put": ("place", "store"), "without": ("with no",), "use": ("take", "apply", "employ"), "list": ("enumerate", "give"), "does": ("would", "will"), "can": ("could", "may"),
    "see": ("view", "look at", "learn"), "tell": ("let me know", "inform"), "there": ("available",), "how": ("in what way", "by what means"), "works": ("functions",),
    "made": ("built", "created"), "big": ("large",), "file": ("data file",), "about": ("regarding", "on"), "many": ("great a number of",), "answers": ("replies",),
    "do": ("would", "should"), "is": ("is", "could be", "was"), "are": ("are", "might be"), "stop": ("end", "halt"), "make": ("create", "produce"), "new": ("fresh",),
    "change": ("modify", "alter", "adjust"), "set": ("define", "choose", "fix"), "model": ("model", "network"), "server": ("daemon", "service"), "daemon": ("server", "service"),
}
FRAMES = ("{w}: {q}", "{s} {q}", "{w}, {q}", "{q} {s}", "I would love to hear {q}", "Somebody asked me {q}", "A friend wants to know {q}", "Not sure about this. {q}",
          "In the manual I did not find this: {q}", "It is unclear to me {q}", "Here is something I do not understand: {q}", "Help me with this: {q}", "{q} That is my question.",
          "We talked about it: {q}", "Before I begin: {q}", "For the record, {q}", "{q} I need it for {w}.", "Answer this, please: {q}", "What I am after: {q}",
          "Once more: {q}", "There is one thing left: {q}", "Explain to a beginner: {q}", "{q} Tell me in short.", "If I may ask: {q}", "Let me put it this way: {q}")


def _is_told(word: str) -> bool:
    bare = word.strip(".,:;!?\"'()")
    return not bare.isalpha() or not bare[1:].islower() or bare.lower() in TOLD


def _disturbed(rng: random.Random, question: str) -> str:
    """Some words replaced by others of the same meaning, some by any, some lost, some added; one frame in two around it."""
    share, found = rng.choice((0.0, 0.1, 0.2, 0.3)), []
    for word in question.split():
        bare = word.strip(".,:;!?").lower()
        if bare in SYNONYMS and rng.random() < 0.35:
            other = rng.choice(SYNONYMS[bare])
            found.append((other.capitalize() if word[0].isupper() else other) + (word[-1] if word[-1] in ".,:;!?" else ""))
        elif _is_told(word) or rng.random() >= share * (1.4 if bare in SMALL else 0.8):
            found.append(word)
        elif rng.random() < 0.5:
            found.append(any_word(rng))
        if rng.random() < share / 3:
            found.append(any_word(rng))
    text = " ".join(found) or question
    if rng.random() < 0.5:
        return text
    text = text[0].lower() + text[1:] if text[1:2].islower() and rng.random() < 0.7 else text
    text = rng.choice(FRAMES).format(q=text, w=any_words(rng, 1, 4), s=said_sentence(rng))
    return text[0].upper() + text[1:]


def _rewrite(rng: random.Random, question: str) -> str:
    """Another wording by rule: an indirect question, small words lost, words alone, halves turned around."""
    if rng.random() < 0.5:
        return _disturbed(rng, question)
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
