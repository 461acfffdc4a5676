"""Requests put together from parts, so that no wording is rare enough to be learnt by heart; train only."""

from __future__ import annotations

import random

from curriculum.example import TRAIN
from curriculum.pools import WORDS, invented

ASK = ("", "Please ", "Can you ", "Could you ", "I want you to ", "I need you to ", "Now ", "You should ", "Would you ", "Let us ", "Next, ",
       "Your task: ", "Task: ", "Try to ", "I would like you to ", "Be so kind and ", "For me, ", "Here is what to do: ", "Your job is to ")
END = ("", "", ".", ":", " now.", " for me.", ", please.", " please:", " here.", "!", "?", " at once.", " today:", ", thanks.", " exactly.")
THIS = ("this", "the text below", "the following", "this text", "what follows", "these words", "the next lines", "this message", "the lines below",
        "this part", "that", "what I send", "the words after this", "this piece", "everything below", "my text")
COPY = ("copy", "repeat", "write again", "say again", "print", "echo", "return", "write down", "give back", "send back", "type", "output",
        "quote", "show", "write out", "put down", "answer with", "respond with", "reply with", "double", "retype", "recite", "restate", "tell me")
SAME = ("", "", " exactly", " word for word", " without changes", " as it is", " unchanged", " character for character", " just the same",
        " and nothing else", " with no change", " one more time", " once more", " in the same form", " to the last sign")
SUM = ("summarize", "describe", "explain", "say", "put into words", "express", "tell", "report", "render", "rewrite", "shorten", "write up",
       "turn into words", "state", "sum up", "read out", "present", "phrase")
ONE = ("", " in one sentence", " in a sentence", " as a sentence", " in a single line", " with one sentence", " shortly", " in words",
       " in plain words", " as one statement", " in plain English", " briefly")
DATA = ("this record", "this data", "these fields", "this entry", "the record", "the data", "this", "the following", "these values", "this row",
        "the fields below", "the entry below", "this item", "this information", "what it says here")
PULL = ("extract", "find", "get", "collect", "pull out", "read", "take", "list", "give me", "return", "write", "fill in", "note", "pick",
        "look for", "put", "gather", "deliver", "output", "show", "determine", "save", "state", "name")
JSON = (" as JSON", " in JSON", " as a JSON object", " in a JSON object", " with JSON", " into JSON", ", in JSON", " (JSON)", " using JSON",
        " as an object in JSON", " and answer in JSON", ": JSON only", " in the form of JSON")
FROM = (" from this", " out of this", " from the text", " of the following", " in this message", " from this sentence", " based on this", "",
        " that this mentions", " in the text below", " according to this", " given here", " from what follows", " out of the message")
RECALL = ("tell me", "say", "give me", "find", "look up", "what is", "which is", "name", "remember", "repeat", "search for", "show me", "write",
          "I need", "I want", "do you know", "can you see", "report", "what about", "I forgot", "help me with", "state", "read me", "get")
WHERE = ("", "", "", " in the text", " above", " from the notes", " in the document", ", please", " again", " for me", " as it was written",
         " that was given", " according to the notes", " that you read")


def noisy(rng: random.Random, split: str, template: str) -> str:
    """A template with a few of its own words replaced, added or lost, so that its places are found whatever stands around
    them. Never outside train, and only for templates whose words do not decide what is asked."""
    if split != TRAIN or rng.random() < 0.4:
        return template
    words = template.split(" ")
    for _ in range(rng.choice((1, 1, 2, 3))):
        free = [index for index, word in enumerate(words) if word and "{" not in word and "\n" not in word]
        index = rng.choice(free) if free else rng.randint(0, len(words))
        kind = rng.random()
        fresh = invented(rng) if rng.random() < 0.5 else rng.choice(WORDS)
        if kind < 0.45 and free:
            words[index] = fresh.capitalize() if words[index][0].isupper() else fresh
        elif kind < 0.85 or len(free) < 2:
            words.insert(index, fresh.capitalize() if index == 0 and rng.random() < 0.7 else fresh)
        else:
            del words[index]
    return " ".join(words)


def _clean(rng: random.Random, text: str) -> str:
    text = text if rng.random() < 0.12 else text[0].upper() + text[1:]
    return text


def _laid_out(rng: random.Random, request: str, body: str) -> str:
    """Request and material in either order."""
    gap = rng.choice(("\n", "\n", "\n\n", " "))
    if rng.random() < 0.2:
        return f"{body}{rng.choice((chr(10), chr(10) * 2))}{request}"
    return f"{request}{gap}{body}"


def copy_request(rng: random.Random, body: str) -> str:
    request = rng.choice(ASK) + f"{rng.choice(COPY)} {rng.choice(THIS)}{rng.choice(SAME)}" + rng.choice(END)
    return _laid_out(rng, _clean(rng, request), body)


def summary_request(rng: random.Random, body: str) -> str:
    return _laid_out(rng, _clean(rng, rng.choice(ASK) + f"{rng.choice(SUM)} {rng.choice(DATA)}{rng.choice(ONE)}" + rng.choice(END)), body)


def extract_request(rng: random.Random, names: str, body: str) -> str:
    keys = rng.choice(("", "", "", "the ", "the keys ", "the fields ", "the values of ", "the words for ")) + names
    middle = f"{keys}{rng.choice(FROM)}{rng.choice(JSON)}" if rng.random() < 0.6 else f"{keys}{rng.choice(JSON)}{rng.choice(FROM)}"
    return _laid_out(rng, _clean(rng, rng.choice(ASK) + f"{rng.choice(PULL)} {middle}" + rng.choice(END)), body)


def recall_question(rng: random.Random, kind: str, owner: str) -> str:
    what = rng.choice((f"the {kind} of {owner}", f"the {kind} for {owner}", f"{owner}, the {kind}", f"{owner} and the {kind}",
                       f"which {kind} {owner} has", f"what {kind} {owner} got", f"the {kind} that {owner} has", f"{kind} of {owner}",
                       f"{owner}: {kind}", f"the {kind} that belongs to {owner}"))
    return _clean(rng, rng.choice(("", "", *ASK)) + f"{rng.choice(RECALL)} {what}{rng.choice(WHERE)}" + rng.choice((".", "?", "", "!", "?")))


LEADS = ("", "", "", "", "", "Hi. ", "Hello! ", "Okay. ", "Good. ", "Thanks. ", "Next: ", "One more: ", "Another one. ", "I have a task for you. ",
         "Listen. ", "Well then. ", "Quick: ", "Let me ask you something. ", "Now something else. ", "Here is the next one. ", "Right. ",
         "As I said. ", "First things first. ", "This is important. ", "A small job. ", "I am in a hurry. ", "No rush. ", "Sure. ")


def led(rng: random.Random, request: str) -> str:
    """A request with something said before it."""
    return rng.choice(LEADS) + request
