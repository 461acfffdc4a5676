"""Generated records: as JSON, as a sentence, and turned into each other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from curriculum.example import NEW, TRAIN, Example, ask, choose, is_held_out
from curriculum.phrases import extract_request, noisy, summary_request
from curriculum.pools import COLORS, DAYS, FRUITS, MONTHS, NEW_COLORS, NEW_FRUITS, city, code, full_name, invented, person, sentence, thing, word
from curriculum.random_tasks import random_extraction
from curriculum.random_words import words as any_words

Record = Mapping[str, Any]
KEYS = """name id title size color status kind owner date day hour count level mode path note reason start end width height weight
price amount language group user target source subject address country zone key value""".split()


def _one_of(rng: random.Random, split: str, own: Sequence[str], new: Sequence[str]) -> str:
    """One of a list, in training often a word that no list holds."""
    return invented(rng) if split == TRAIN and rng.random() < 0.4 else choose(rng, split, own, new)


def _order(rng: random.Random, split: str) -> Record:
    return {"customer": full_name(rng, split), "item": thing(rng, split), "quantity": rng.randint(2, 90), "city": city(rng, split)}


def _meeting(rng: random.Random, split: str) -> Record:
    return {"title": f"{thing(rng, split)} review", "day": rng.choice(DAYS), "hour": rng.randint(7, 19), "host": person(rng, split)}


def _contact(rng: random.Random, split: str) -> Record:
    first = person(rng, split)
    return {"name": first, "age": rng.randint(18, 90), "city": city(rng, split), "email": f"{first.lower()}{rng.randint(1, 99)}@example.com"}


def _trip(rng: random.Random, split: str) -> Record:
    return {"from": city(rng, split), "to": city(rng, split), "month": rng.choice(MONTHS), "passengers": rng.randint(1, 9)}


def _stock(rng: random.Random, split: str) -> Record:
    return {"fruit": _one_of(rng, split, FRUITS, NEW_FRUITS), "count": rng.randint(2, 999), "price": rng.randint(1, 60),
            "organic": rng.random() < 0.5}


def _ticket(rng: random.Random, split: str) -> Record:
    return {"id": code(rng, 6), "owner": person(rng, split), "priority": rng.choice(("low", "medium", "high")),
            "open": rng.random() < 0.5}


def _pet(rng: random.Random, split: str) -> Record:
    return {"owner": full_name(rng, split), "pet": person(rng, split), "color": _one_of(rng, split, COLORS, NEW_COLORS),
            "years": rng.randint(1, 19)}


def _yes(flag: bool, yes: str, no: str) -> str:
    return yes if flag else no


FORMS: tuple[tuple[Callable[[random.Random, str], Record], Callable[[Record], str], tuple[Callable[[Record], str], ...]], ...] = (
    (_order, lambda r: f"{r['customer']} from {r['city']} ordered {r['quantity']} {r['item']}s.", (
        lambda r: f"{r['customer']} in {r['city']} would like {r['quantity']} pieces of our {r['item']}.",
        lambda r: f"Order of {r['quantity']} {r['item']}s, to be sent to {r['customer']}, {r['city']}.")),
    (_meeting, lambda r: f"{r['host']} hosts the {r['title']} on {r['day']} at {r['hour']}:00.", (
        lambda r: f"On {r['day']} at {r['hour']}:00 there is the {r['title']}, and {r['host']} is the host.",
        lambda r: f"{r['title']}: {r['day']}, {r['hour']}:00, host {r['host']}.")),
    (_contact, lambda r: f"{r['name']} is {r['age']} years old, lives in {r['city']} and reads {r['email']}.", (
        lambda r: f"Write to {r['name']} at {r['email']}; age {r['age']}, home in {r['city']}.",
        lambda r: f"My name is {r['name']}, I am {r['age']} and live in {r['city']}. My email is {r['email']}.")),
    (_trip, lambda r: f"{r['passengers']} passengers travel from {r['from']} to {r['to']} in {r['month']}.", (
        lambda r: f"In {r['month']} we go to {r['to']} from {r['from']} with {r['passengers']} passengers.",
        lambda r: f"Trip {r['from']} to {r['to']}, {r['month']}, {r['passengers']} passengers.")),
    (_stock, lambda r: f"There are {r['count']} {_yes(r['organic'], 'organic', 'ordinary')} {r['fruit']}s at {r['price']} euros each.", (
        lambda r: f"We have {r['count']} {r['fruit']}s for {r['price']} euros each, {_yes(r['organic'], 'organic', 'not organic')}.",
        lambda r: f"{r['fruit']}: {r['count']} in stock, price {r['price']}, {_yes(r['organic'], 'organic', 'not organic')}.")),
    (_ticket, lambda r: f"Ticket {r['id']} of {r['owner']} has {r['priority']} priority and is {_yes(r['open'], 'open', 'closed')}.", (
        lambda r: f"{r['owner']} owns ticket {r['id']}, priority {r['priority']}, now {_yes(r['open'], 'open', 'closed')}.",
        lambda r: f"{_yes(r['open'], 'Open', 'Closed')} ticket {r['id']}: owner {r['owner']}, priority {r['priority']}.")),
    (_pet, lambda r: f"{r['owner']} has a {r['color']} pet called {r['pet']} that is {r['years']} years old.", (
        lambda r: f"{r['pet']} is {r['color']}, {r['years']} years old and belongs to {r['owner']}.",
        lambda r: f"The {r['color']} pet {r['pet']}, {r['years']} years, owner {r['owner']}.")),
)
"""(record, the sentence that a summary says, other sentences that say the same)."""

SUMMARY = ("Summarize this record in one sentence:\n{x}", "Write one sentence about this:\n{x}", "Summarize:\n{x}",
           "{x}\n\nSay this in one sentence.", "Put this into one sentence:\n{x}", "Tell me in a sentence what this says:\n{x}",
           "What is this about?\n{x}", "Make a sentence from this data:\n{x}", "One sentence, please:\n{x}", "Explain this record: {x}", "Describe this record in a sentence.\n\n{x}", "Turn this record into a sentence:\n{x}")
NEW_SUMMARY = ("What does this data tell us, in a single sentence?\n{x}", "Put the following into words:\n\n{x}")
EXTRACT = ("Extract {k} as JSON:\n{x}", "Extract the fields {k} from this text as JSON.\n\n{x}", "Give me JSON with the keys {k}: {x}",
           "{x}\n\nReturn a JSON object with {k}.", "Read this and answer in JSON with {k}:\n{x}", "Make JSON with {k} from this: {x}",
           "I need {k} as JSON from:\n{x}", "Fill a JSON object with {k}.\n{x}", "Which {k} are in this text? Answer in JSON.\n{x}",
           "JSON with {k}, please:\n{x}", "Find {k} in this message and write JSON:\n{x}", "As JSON ({k}): {x}", "Convert this to JSON with {k}:\n{x}", "Parse this into JSON ({k}):\n{x}")
NEW_EXTRACT = ("I want an object in JSON with {k} out of this message:\n{x}", "Read the sentence and fill in {k}, in JSON.\n{x}")


def _record(rng: random.Random, split: str) -> tuple[int, Record]:
    while True:
        index = rng.randrange(len(FORMS))
        record = FORMS[index][0](rng, split)
        if is_held_out(record) == (split != TRAIN):
            return index, record


def _shown(rng: random.Random, record: Record) -> str:
    """A record as a person might paste it."""
    kind = rng.randrange(3)
    if kind == 0:
        return json.dumps(record)
    if kind == 1:
        return json.dumps(record, indent=2)
    return "\n".join(f"{key}: {json.dumps(value) if isinstance(value, bool) else value}" for key, value in record.items())


def summary(rng: random.Random, split: str) -> Example:
    index, record = _record(rng, split)
    keys = list(record)
    if split != NEW:
        rng.shuffle(keys)
    shown = _shown(rng, {key: record[key] for key in keys})
    answer = FORMS[index][1](record)
    if split == TRAIN and rng.random() < 0.6:
        question = summary_request(rng, shown)
    else:
        question = noisy(rng, split, choose(rng, split, SUMMARY, NEW_SUMMARY)).format(x=shown)
    return Example("summaries", ask(question, answer), {"kind": "exact", "value": answer})


def _told(rng: random.Random, record: Record) -> str:
    """A record in whatever order and wording."""
    shapes = ("the {k} is {v}", "{k}: {v}", "{k} {v}", "{v} is the {k}", "with {k} {v}", "{k} = {v}", "{v} ({k})", "as {k} we have {v}")
    shape, pairs = rng.choice(shapes), []
    for key, value in rng.sample(list(record.items()), len(record)):
        shown = json.dumps(value) if isinstance(value, bool) else str(value)
        pairs.append((rng.choice(shapes) if rng.random() < 0.3 else shape).format(k=key, v=shown))
    text = rng.choice((", ", "; ", ". ", "\n", " and ")).join(pairs)
    return rng.choice(("", "", "Note: ", "Here: ", f"{sentence(rng)} ")) + text + rng.choice((".", "", f". {sentence(rng)}"))


def _any_record(rng: random.Random) -> Record:
    """Keys and values of any kind: what is found must be read."""
    keys = rng.sample((*KEYS, invented(rng), invented(rng), invented(rng)), rng.randint(1, 5))
    return {key: rng.choice((rng.randint(0, 9999), word(rng, TRAIN), person(rng, TRAIN), code(rng), rng.random() < 0.5)) for key in keys}


def _parts(rng: random.Random, record: Record) -> list[str]:
    """What a sentence about the record must hold; each part tells by its form or a word what it is."""
    r = record
    if "customer" in r:
        return [rng.choice((f"{r['quantity']} {r['item']}s", f"{r['quantity']} pieces of {r['item']}", f"{r['item']}s: {r['quantity']}")), r["customer"], r["city"]]
    if "title" in r:
        return [r["title"], r["day"], f"{r['hour']}:00", rng.choice((r["host"], f"{r['host']} is the host", f"host is {r['host']}", f"hosted by {r['host']}"))]
    if "email" in r:
        return [r["name"], rng.choice((f"{r['age']}", f"{r['age']} years", f"aged {r['age']}", f"{r['age']} years old")), r["city"], r["email"]]
    if "month" in r:
        return [rng.choice((f"from {r['from']} to {r['to']}", f"{r['from']} to {r['to']}", f"to {r['to']} from {r['from']}", f"{r['from']} - {r['to']}")),
                r["month"], rng.choice((f"{r['passengers']} passengers", f"passengers: {r['passengers']}"))]
    if "fruit" in r:
        return [rng.choice((f"{r['count']} {r['fruit']}s", f"{r['fruit']}: {r['count']}", f"{r['fruit']}s, {r['count']} of them")),
                rng.choice((f"{r['price']} euros", f"priced {r['price']}", f"a price of {r['price']}")),
                rng.choice(("organic", "all organic") if r["organic"] else ("ordinary", "not organic", "ordinary ones"))]
    if "priority" in r:
        state = rng.choice(("open", "Open", "still open") if r["open"] else ("closed", "Closed", "not open", "already closed"))
        return [rng.choice((r["id"], f"ticket {r['id']}")), rng.choice((r["owner"], f"{r['owner']} is the owner", f"owned by {r['owner']}")),
                rng.choice((f"{r['priority']} priority", f"priority {r['priority']}")), state]
    return [rng.choice((r["color"], f"{r['color']} pet")), rng.choice((r["pet"], f"called {r['pet']}")), f"{r['years']} years",
            rng.choice((r["owner"], f"{r['owner']} is the owner", f"belongs to {r['owner']}"))]


def _framed(rng: random.Random, record: Record) -> str:
    """The record's parts in any order among words that mean nothing."""
    parts = _parts(rng, record)
    if rng.random() < 0.6:
        rng.shuffle(parts)
    joint = rng.choice((", ", ", ", " ", "; ", " and ", ". "))
    told = [f"{any_words(rng, 1, 3)} {part}" if rng.random() < 0.45 else part for part in parts]
    text = rng.choice(("", "", f"{any_words(rng, 1, 3)} ", f"{any_words(rng, 1, 2)}: ")) + joint.join(told) + rng.choice((".", ".", "", f" {any_words(rng, 1, 4)}.", f". {any_words(rng, 2, 5)}."))
    return text if rng.random() < 0.2 else text[0].upper() + text[1:]


def extraction(rng: random.Random, split: str) -> Example:
    """A sentence and the keys to find; the answer is a JSON object with these keys in this order."""
    if split == TRAIN and rng.random() < 0.35:
        return random_extraction(rng)
    if split == TRAIN and rng.random() < 0.25:
        record = _any_record(rng) if rng.random() < 0.7 else _record(rng, split)[1]
        return _extract(rng, split, record, _told(rng, record))
    index, record = _record(rng, split)
    _, plain, others = FORMS[index]
    if split == TRAIN and rng.random() < 0.7:
        return _extract(rng, split, record, _framed(rng, record))
    say = others[-1] if split == NEW else rng.choice((plain, *others[:-1]))
    return _extract(rng, split, record, say(record))


def _extract(rng: random.Random, split: str, record: Record, told: str) -> Example:
    keys = list(record)
    if rng.random() < 0.5:
        rng.shuffle(keys)
    if rng.random() < 0.4:
        keys = keys[:rng.randint(1, len(keys))]
    value = {key: record[key] for key in keys}
    names = ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]
    if split == TRAIN and rng.random() < 0.6:
        question = extract_request(rng, names, told)
    else:
        question = noisy(rng, split, choose(rng, split, EXTRACT, NEW_EXTRACT)).format(k=names, x=told)
    return Example("json", ask(question, json.dumps(value, ensure_ascii=False)), {"kind": "json", "value": value})


def listing(rng: random.Random, split: str) -> Example:
    """Several records of one form; the question asks for one field of one, or for a JSON array of one field."""
    index = rng.randrange(len(FORMS))
    records = [FORMS[index][0](rng, split) for _ in range(rng.randint(2, 5))]
    key = rng.choice(list(records[0]))
    shown = "\n".join(json.dumps(record) for record in records)
    asked = choose(rng, split, ("List every {k} as a JSON array:\n{x}", "{x}\n\nCollect the {k} of each line in a JSON array.",
                                  "Write a JSON array of each {k}:\n{x}", "JSON array with every {k}:\n{x}", "Put all values of {k} into an array in JSON.\n{x}",
                                  "Which values has {k}? Answer with a JSON array.\n{x}", "Give me an array of the {k} values in JSON:\n{x}",
                                  "{x}\n\nMake a JSON array of {k}.", "Array in JSON, {k} only:\n{x}", "Gather each {k} below in an array (JSON):\n{x}"),
                   ("Make an array in JSON from each {k} below.\n{x}",))
    value = [record[key] for record in records]
    return Example("json", ask(noisy(rng, split, asked).format(k=key, x=shown), json.dumps(value)), {"kind": "json", "value": value})
