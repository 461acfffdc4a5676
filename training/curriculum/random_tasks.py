"""Copying, editing, recall and extraction with values and wordings made at random; train only.

What decides a task is never a whole sentence: a word or two tell it, among words that mean nothing.
"""

from __future__ import annotations

import json
import random

from curriculum.example import Example, Step, ask, is_held_out
from curriculum.phrases import COPY, JSON, PULL, RECALL, SAME, THIS, copy_request
from curriculum.pools import code, excerpt, paragraph
from curriculum.random_words import any_code, any_id, any_name, any_record, any_text, any_word, digits, short_value, words

LEADS = ("", "", "", "", "Please ", "Can you ", "Could you ", "I want you to ", "Now ", "Your task: ", "Next: ", "Let us ", "Okay, ", "I need you to ",
         "For me: ", "Just ", "Go and ", "You have to ", "I would like you to ")


def capital(rng: random.Random, text: str) -> str:
    return text[0].upper() + text[1:] if rng.random() < 0.85 else text


def sprinkled(rng: random.Random, text: str, kept: set[str], share: float) -> str:
    """The text with some of its words replaced, lost or joined by others; `kept` words stay."""
    found = []
    for word in text.split(" "):
        bare = word.strip(".,:;!?\"'()")
        if bare in kept or rng.random() >= share:
            found.append(word)
        elif rng.random() < 0.6:
            found.append(any_word(rng) + (word[-1] if word[-1:] in ".,:;!?" else ""))
        if rng.random() < share / 2:
            found.append(any_word(rng))
    return " ".join(found) or text


def layout(rng: random.Random, wish: str, body: str, is_marked: bool = False) -> str:
    """A wish and what it is about, in one of the ways that people write. is_marked: in one that shows where the body begins."""
    kind = rng.random() * (0.88 if is_marked else 1.0)
    if kind < 0.24:
        return f"{wish}:\n{body}"
    if kind < 0.36:
        return f"{wish}:\n\n{body}"
    if kind < 0.56:
        return f"{wish}: {body}"
    if kind < 0.62:
        return f"{wish}.\n{rng.choice(('', chr(10)))}{body}"
    if kind < 0.68:
        return f"{wish}\n{body}"
    if kind < 0.74:
        return f"{body}\n\n{wish}."
    if kind < 0.78:
        return f"{body}\n{wish}"
    if kind < 0.84:
        mark = rng.choice(('"', "'", "`", "```\n"))
        return f"{wish}: {mark}{body}{mark[:3] if mark[0] != '`' or len(mark) == 1 else chr(10) + '```'}"
    if kind < 0.88:
        tag = any_word(rng)
        return f"{wish} in the tags:\n<{tag}>\n{body}\n</{tag}>"
    return f"{wish}{rng.choice(('? ', '! ', ' - ', ', ', ' => ', ' ', '; '))}{rng.choice(('', chr(10)))}{body}"


def trailed(rng: random.Random, wish: str) -> str:
    """The wish with what people add to it: half of the time words behind a comma or not, one of which may come twice."""
    if rng.random() < 0.5:
        return wish
    twice = any_word(rng)
    again = f"{twice} {rng.choice(('and', 'for', 'by', 'after', 'or', any_word(rng), any_word(rng), any_word(rng)))} {twice}"
    more = rng.choice((again, again, again, f"{words(rng, 1, 3)} {again}", f"{again} {words(rng, 1, 2)}", words(rng, 1, 5), f"{twice} {words(rng, 1, 3)}, {twice}"))
    return f"{wish}{rng.choice((', ', ', ', ', ', ' ', ' - ', '; ', ' (', ', and '))}{more}".replace(f"({more}", f"({more})")


def random_copying(rng: random.Random) -> Example:
    text = any_text(rng)
    while is_held_out(text):
        text = any_text(rng)
    kind = rng.random()
    if kind < 0.25:
        question = copy_request(rng, text)
    else:
        if kind < 0.7:
            verb, rest = rng.choice(COPY), f"{rng.choice(THIS)}{rng.choice(SAME)}"
            wish = sprinkled(rng, f"{rng.choice(LEADS)}{verb} {rest}", set(verb.split()), 0.3)
        elif kind < 0.82:
            wish = f"{any_name(rng)} {words(rng, 0, 2)} {rng.choice(THIS)}{rng.choice(SAME)}".replace("  ", " ")
        else:
            wish = f"{rng.choice(LEADS)}{words(rng, 1, 9)}"
        wish = wish.strip()
        more = trailed(rng, wish)
        question = layout(rng, capital(rng, more), text, more != wish)
    return Example("copying", ask(question, text), {"kind": "exact", "value": text})


SWAP = (("replace", "with"), ("replace", "by"), ("change", "to"), ("change", "into"), ("rename", "to"), ("turn", "into"), ("exchange", "for"),
        ("substitute", "with"), ("rewrite", "as"), ("switch", "to"), ("convert", "into"), ("edit", "to"), ("write", "as"), ("make", "into"))
INSTEAD = ("{b} instead of {a}", "{b} in place of {a}", "{b} for each {a}", "{b} and not {a}", "{b} where there was {a}", "{b} rather than {a}")


def random_editing(rng: random.Random) -> Example:
    pool = [any_word(rng) for _ in range(rng.randint(3, 12))]
    if rng.random() < 0.4:
        text = any_code(rng)
        names = sorted({part for part in "".join(char if char.isalpha() else " " for char in text).split() if len(part) > 2 and part.islower()})
        old = rng.choice(names or ["x"])
    else:
        text, old = " ".join(rng.choice(pool) for _ in range(rng.randint(4, 16))), rng.choice(pool)
    new = any_word(rng) if rng.random() < 0.8 else any_id(rng)
    import re
    answer = re.sub(rf"(?<![A-Za-z]){re.escape(old)}(?![A-Za-z])", lambda _: new, text)
    mark = rng.choice(('"', '"', "", "", "'", "`"))
    a, b = f"{mark}{old}{mark}", f"{mark}{new}{mark}"
    if rng.random() < 0.6:
        verb, link = rng.choice(SWAP)
        core = f"{verb} {rng.choice(('', '', 'the word ', 'each ', 'all ', 'the name ', any_word(rng) + ' '))}{a} {link} {b}"
    else:
        core = f"{rng.choice(('write', 'put', 'use', 'say', 'take', 'I want', 'set', any_word(rng)))} {rng.choice(INSTEAD).format(a=a, b=b)}"
    wish = f"{rng.choice(LEADS)}{core} {rng.choice(('', 'in this text', 'in this code', 'here', 'below', words(rng, 1, 3)))}".strip()
    return Example("editing", ask(layout(rng, capital(rng, wish), text), answer), {"kind": "exact", "value": answer})


SAID = ("the {k} of {o} is {v}", "{o} has the {k} {v}", "{v} is the {k} of {o}", "{o}: {k} {v}", "{o}'s {k} is {v}", "{o} {w} the {k} {v}", "{k} {v} {w} {o}",
        "the {k} for {o} is {v}", "{o} {w} {v} as {k}", "{k} of {o}: {v}", "{o} {w} {k} {v}", "for {o} the {k} {w} {v}", "{v} {w} the {k} of {o}",
        "{o} ({k} {v})", "{o}, {k} {v}", "the {k} {v} {w} {o}", "{w} {o} the {k} {v}", "{k} for {o} = {v}", "{o} | {k} | {v}", "{o} {w} {w} {v} for {k}",
        "we {w} {o} the {k} {v}", "{o} got {w} {k} {v}", "{o} is {w} the {k} {v}", "in {o} the {k} is {v}", "{o} with {k} {v}",
)
SAID_LATE = ("{v} is the {k} of {o}",) * 5 + (
    "{v} is the {k} for {o}", "{v} as {k} of {o}", "{v}: {k} of {o}", "{v} is what {o} has as {k}", "{v} {w} {o} as {k}", "{v} for {o}, {w} {k}",
    "{v} {w} the {k} of {o}", "the {k} {v} {w} {o}", "{v} {w} {k} of {o}", "{v} was {w} {o} as {k}", "{v} is {w} the {k} of {o}", "{v}, the {k} of {o}",
    "{v}, {k} of {o}", "{v}, {k} of {o}", "{v}, {k} for {o}", "{v} - {k} of {o}", "{v} ({k} of {o})", "{v}, {w} {k} of {o}", "{v}, {k} {w} {o}")
"""The value stands before its owner: whose it is must be carried along or looked up backwards."""
ASKED = ("the {k} of {o}", "the {k} for {o}", "{o}'s {k}", "which {k} {o} has", "{k} of {o}", "{o}: {k}", "what {k} {w} {o}", "{o}, {k}", "{o} {w} which {k}",
         "the {k} that {o} {w}", "{k} {w} {o}", "{o} and the {k}", "the {k} of {o} is {w}", "{o}'s {k} is {w}", "the {k} of {o} {w} {w}", "which {k} {w} {o}", "the {k} {w} {w} {o}", "{o} {w} {w} the {k}", "for {o} the {k}")


def _owner(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return any_name(rng)
    if kind == 1:
        return f"{any_name(rng)} {any_name(rng)}"
    if kind == 2:
        return f"the {any_word(rng)} {any_word(rng)}"
    if kind == 3:
        return f"{any_word(rng)} {rng.randint(1, 999)}"
    return f"the {any_word(rng)}" if kind == 4 else any_id(rng)


def _alike(rng: random.Random, count: int) -> list[str]:
    """Owners that share words, so that only all of a name tells whose a value is."""
    size = 2 + count // 4
    firsts, seconds, titled = [any_word(rng) for _ in range(size)], [any_word(rng) for _ in range(size)], rng.random() < 0.5
    if rng.random() < 0.35:
        seconds = [digits(rng, 3) for _ in range(3 * size)]
    the = "the " if rng.random() < 0.3 else ""
    found = [f"{the}{rng.choice(firsts)} {rng.choice(seconds)}" for _ in range(count)]
    return [owner.title() for owner in found] if titled and not the else found


def _number(rng: random.Random) -> str:
    return str(rng.randint(10, 99999))


def _filled(rng: random.Random, form: str, **values: str) -> str:
    while "{w}" in form:
        form = form.replace("{w}", any_word(rng), 1)
    return form.format(**values)


def _wrapped(rng: random.Random, core: str) -> str:
    """The statement with something said around it."""
    before = rng.choice(("", "", "", f"{words(rng, 1, 4)}: ", f"{words(rng, 1, 5)}, ", f"{words(rng, 1, 4)} that ", "Note that ", "Remember that "))
    after = rng.choice(("", "", "", "", f", {words(rng, 1, 4)}", f" {words(rng, 1, 3)}"))
    return before + core + after + rng.choice((".", ".", ".", "", "!"))


def _facts(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    kinds = [any_word(rng) for _ in range(rng.choice((1, 1, 2, 3, 6)))]
    owners = [_owner(rng) for _ in range(max(1, count if rng.random() < 0.6 else count // 2))]
    if rng.random() < 0.5:
        owners = _alike(rng, len(owners))
    make = rng.choice((short_value, short_value, any_word, code, _number, _number, _number))
    found = {(rng.choice(owners), rng.choice(kinds) if rng.random() < 0.9 else any_word(rng)): make(rng) for _ in range(count)}
    return [(owner, kind, value) for (owner, kind), value in found.items()]


def _filler(rng: random.Random, num_chars: int) -> list[str]:
    lines, size, style = [], 0, rng.random()
    while size < num_chars:
        if style < 0.35 and rng.random() < 0.6:
            line = excerpt(rng, rng.randint(1, 8))
        elif style < 0.55:
            line = words(rng, 6, 40)
        else:
            line = paragraph(rng, rng.randint(1, 5))
        lines.append(line)
        size += len(line) + 1
    return lines


MENTIONED = ("{o} {w} {w} {w}", "{w} {w} {o} {w}", "{w} and {o} {w} the {w}", "it was {n} when {w} {w} {o} {w} {w}", "the {w} of {o} is {w}", "{o} {w} {n} {w}",
             "{w} {w} {n} for {o}", "nobody {w} why {o} {w} {w}", "{o}, {w} {w} and {n}", "a {k} {w} {n} {w}", "{w} {w} the {k} {w} {v}", "the {k} is {v}, {w} {w}",
             "{w} {k} and {w} {k}", "{v} {w} {w}, not the {k} of {o}")
"""What is said of an owner without the kind, or of a kind without the owner: no answer is in it."""


def _mentions(rng: random.Random, facts: list[tuple[str, str, str]], count: int) -> list[str]:
    """Lines with the facts' owners and kinds that tell none of the facts."""
    found = []
    for _ in range(count):
        owner, kind, value = rng.choice(facts)
        other = short_value(rng) if rng.random() < 0.5 else _number(rng) if value.isdigit() else any_word(rng)
        found.append(_wrapped(rng, _filled(rng, rng.choice(MENTIONED), o=owner, k=kind, v=other, n=digits(rng, 4))))
    return found


def random_recall(rng: random.Random, num_chars: int, num_facts: int, num_questions: int) -> Example:
    """As `recall.make_recall`, with owners, kinds, values and wordings that are all made."""
    facts = _facts(rng, num_facts)
    mentions = min(rng.randint(1, 2 * len(facts)), num_chars // 120) if rng.random() < 0.5 else 0
    lines, late = _filler(rng, num_chars - 50 * mentions), rng.choice((0.0, 0.3, 1.0, 1.0))
    form = rng.choice(SAID_LATE if rng.random() < late else SAID)
    for owner, kind, value in facts:
        if rng.random() < 0.4:
            form = rng.choice(SAID_LATE if rng.random() < late else SAID)
        said = _wrapped(rng, _filled(rng, form, o=owner, k=kind, v=value))
        lines.insert(rng.randint(0, len(lines)), said if said.lower().startswith((value.lower(), owner.lower())) else capital(rng, said))
    for line in _mentions(rng, facts, mentions):
        lines.insert(rng.randint(0, len(lines)), capital(rng, line))
    text = rng.choice(("", "", f"{words(rng, 1, 6).capitalize()}:\n\n", "Text:\n\n", f"{words(rng, 3, 12).capitalize()}.\n\n")) \
        + ("\n" if rng.random() < 0.6 else " ").join(lines)
    steps: list[Step] = []
    for index, (owner, kind, value) in enumerate(rng.sample(facts, min(num_questions, len(facts)))):
        core = _filled(rng, rng.choice(ASKED), o=owner, k=kind)
        before = rng.choice(("", "", f"{rng.choice(RECALL)} ", f"{rng.choice(RECALL)} ", f"{rng.choice(LEADS)}{any_word(rng)} ", f"{words(rng, 1, 6)} ",
                             f"{words(rng, 1, 5)}, "))
        after = rng.choice(("", "", "", f" {words(rng, 1, 4)}", f", {words(rng, 1, 5)}", " in the text", f" and {words(rng, 1, 4)}"))
        question = capital(rng, before + core + after + rng.choice(("?", ".", "", "?", "!")))
        gap = rng.choice(("\n\n", "\n\n", "\n\n", "\n"))
        steps.append(Step("user", f"{text}{gap}{question}" if index == 0 else question))
        steps.append(Step("assistant", f"The {kind} of {owner} is {value}."))
    return Example("recall", tuple(steps), {"kind": "contains", "values": [steps[-1].text]}, alone=True)


def short_recall(rng: random.Random) -> Example:
    return random_recall(rng, rng.choice((0, 0, 100, 300)), rng.randint(1, 9), rng.randint(1, 4))


def random_extraction(rng: random.Random) -> Example:
    """Keys and values in any shape; the answer is JSON with the keys that are asked for, in their order."""
    record = any_record(rng, 1, 6)
    while is_held_out(record):
        record = any_record(rng, 1, 6)
    shape = rng.choice(("the {k} is {v}", "{k}: {v}", "{k} {v}", "{v} is the {k}", "with {k} {v}", "{k} = {v}", "{v} ({k})", "{v} as {k}", "{k} {w} {v}",
                        "{w} {k} {v}", "{v} {w} {k}", "{v} {k}", "{w} {v} {w} {k}"))
    bare = rng.choice(list(record)) if rng.random() < 0.3 else None  # one value without its key: what is left for it is it
    told = [_filled(rng, "{v}" if key == bare else shape, k=key, v=value if isinstance(value, str) else json.dumps(value))
            for key, value in rng.sample(list(record.items()), len(record))]
    if bare is not None and rng.random() < 0.5:  # it comes first, as the title of the rest
        title = record[bare] if isinstance(record[bare], str) else json.dumps(record[bare])
        told = [text for text in told if text != title]
        told = [f"{title}{rng.choice((': ', ': ', ', ', ' - ', ' ', ', '))}{rng.choice(('', any_word(rng) + ' '))}{told[0]}", *told[1:]] if told else [title]
    joint = rng.choice((", ", "; ", ". ", "\n", " and ", f" {any_word(rng)} "))
    before = capital(rng, rng.choice((f"{words(rng, 1, 5)} ", f"{words(rng, 1, 3)}: "))) if rng.random() < 0.5 else ""
    body = before + joint.join(told) + rng.choice((".", "", f" {words(rng, 1, 5)}."))
    keys = list(record)
    rng.shuffle(keys)
    keys = keys[:rng.randint(1, len(keys))]
    names = ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]
    verb = rng.choice(PULL) if rng.random() < 0.6 else any_word(rng)
    wish = rng.choice((f"{verb} {names}{rng.choice(JSON)}", f"{verb}{rng.choice(JSON)} {words(rng, 0, 2)} {names}", f"JSON {any_word(rng)} {names}",
                       f"{words(rng, 0, 3)} {names} {words(rng, 0, 3)}{rng.choice(JSON)}")).replace("  ", " ").strip()
    value = {key: record[key] for key in keys}
    return Example("json", ask(layout(rng, capital(rng, rng.choice(LEADS) + wish), body), json.dumps(value, ensure_ascii=False)), {"kind": "json", "value": value})
