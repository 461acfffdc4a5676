"""Words, values and texts that nobody can know: what a conversation holds of them must be read from it.

Only the split "train" is made of these. A word of the split "new" is never made.
"""

from __future__ import annotations

import json
import random
from typing import Any

from curriculum.pools import DAYS, MONTHS, WORDS, code, excerpt, real_words, reserved_words

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES: list[str] = []
"""Pieces of letters of the tokenizer in use, see `know_pieces`."""
ENDINGS = ("s", "ing", "ed", "er", "ion", "ity", "ly", "al", "ness", "able", "y")


def know_pieces(pieces: list[str]) -> None:
    """Have `any_word` join these too, so that every id of the tokenizer is part of some word: an id that was never read tells
    nothing about itself, and confuses what stands next to it."""
    PIECES[:] = [piece for piece in pieces if 2 <= len(piece) <= 9 and piece.isascii() and piece.isalpha() and piece.islower()]


def any_word(rng: random.Random) -> str:
    """A lower-case word: an English one, one joined from the parts of two, of syllables, of letters, or of the tokenizer's pieces."""
    while True:
        kind = rng.random()
        if PIECES and rng.random() < 0.2:
            found = rng.choice(PIECES) + rng.choice(("", "", rng.choice(PIECES), rng.choice(PIECES)[:3], rng.choice(ENDINGS)))
        elif kind < 0.22:
            found = rng.choice(WORDS)
        elif kind < 0.5:
            found = rng.choice(real_words())
        elif kind < 0.8:
            found = rng.choice(real_words())[:rng.randint(1, 6)] + rng.choice(real_words())[-rng.randint(2, 6):]
        elif kind < 0.93:
            found = "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice(("a", "e", "i", "o", "u", "ar", "en", "il", "on", "us"))
                            for _ in range(rng.randint(1, 4)))
        else:
            found = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 8)))
        if found not in reserved_words():
            return found


def any_name(rng: random.Random) -> str:
    """A word with a capital, as people, cities and titles have."""
    return any_word(rng).capitalize()


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(low, high)))


def digits(rng: random.Random, longest: int = 5) -> str:
    return str(rng.randint(0, 10 ** rng.randint(1, longest) - 1))


def said_sentence(rng: random.Random, low: int = 3, high: int = 9) -> str:
    """Words with a capital and an end, now and then a comma or a number."""
    found = [digits(rng) if rng.random() < 0.06 else any_name(rng) if rng.random() < 0.08 else any_word(rng)
             for _ in range(rng.randint(low, high))]
    text = "".join(word + (", " if rng.random() < 0.08 else " ") for word in found).strip(", ")
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?"))


def identifier(rng: random.Random, parts: list[str]) -> str:
    """Words as one name, in a style that programs use."""
    style = rng.random()
    if style < 0.5 or len(parts) == 1 and style < 0.8:
        return "_".join(parts)
    if style < 0.7:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style < 0.82:
        return "".join(part.capitalize() for part in parts)
    return ("-" if style < 0.94 else ".").join(parts)


def any_id(rng: random.Random) -> str:
    """A string that is no word: code, number, name with digits, path, address, version, date."""
    kind = rng.randrange(11)
    if kind <= 2:
        return code(rng, rng.randint(2, 9))
    if kind == 3:
        return f"{any_word(rng)}{rng.choice('-_.#/')}{digits(rng, 4)}"
    if kind == 4:
        return f"{any_word(rng)}{rng.randint(1, 99)}@{any_word(rng)}.{rng.choice(('com', 'org', 'net', 'io'))}"
    if kind == 5:
        folders = "/".join(any_word(rng) for _ in range(rng.randint(0, 2)))
        return f"{rng.choice(('', '/', './', '~/'))}{folders}{'/' if folders else ''}{any_word(rng)}.{any_word(rng)[:4]}"
    if kind == 6:
        return f"{rng.randint(2000, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if kind == 7:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    if kind == 8:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 12)))
    if kind == 9:
        return identifier(rng, [any_word(rng) for _ in range(rng.randint(2, 3))])
    return ".".join(str(rng.randint(0, 30)) for _ in range(rng.randint(2, 4)))


def short_value(rng: random.Random) -> str:
    """What a fact or a field can hold, as text."""
    kind = rng.random()
    if kind < 0.3:
        return any_name(rng)
    if kind < 0.5:
        return any_word(rng)
    if kind < 0.62:
        return digits(rng)
    if kind < 0.8:
        return any_id(rng)
    if kind < 0.9:
        return f"{any_name(rng)} {any_name(rng)}"
    return rng.choice((words(rng, 2, 4), rng.choice(DAYS), rng.choice(MONTHS)))


def json_value(rng: random.Random) -> Any:
    """A text, a number or a flag; no text that reads like a number, since nothing says which of both it is."""
    kind = rng.random()
    found = short_value(rng) if kind < 0.6 else rng.randint(0, 99999) if kind < 0.85 else rng.random() < 0.5
    return int(found) if isinstance(found, str) and found.isdigit() and str(int(found)) == found else found


def any_record(rng: random.Random, low: int = 1, high: int = 5) -> dict[str, Any]:
    keys = [any_word(rng) if rng.random() < 0.8 else identifier(rng, [any_word(rng), any_word(rng)]) for _ in range(rng.randint(low, high))]
    return {key: json_value(rng) for key in dict.fromkeys(keys)}


def any_code(rng: random.Random) -> str:
    """Lines that look like a program in some language; every name is made."""
    a, b, c, d = (any_word(rng) for _ in range(4))
    n, m = digits(rng, 3), digits(rng, 2)
    forms = (
        f"def {a}_{b}({c}, {d}={n}):\n    return {c} {rng.choice('+-*/')} {d}", f"{a} = [{n}, {m}]\nfor {b} in {a}:\n    {c}({b}, {m})",
        f"if {a}.{b} > {n}:\n    {c}(\"{d}\")\nelse:\n    {c}({m})", f"const {a} = {b}({n});\nlet {c} = {a}.{d};", f"{a}.{b}({c}={n}, {d}={m})",
        f"SELECT {a}, {b} FROM {c} WHERE {d} = {n};", f"{a} --{b} {n} | {c} -{d[0]} {m}", f"<{a} {b}=\"{n}\">{c} {d}</{a}>",
        f"class {a.capitalize()}:\n    {b} = {n}\n    {c}: {d} = {m}", f"while {a} < {n}:\n    {a} += {m}\n    {b}.{c}({a}, \"{d}\")",
        f"int {a}(int {b}) {{\n  return {b} * {n} + {c}({m});\n}}", f"{a}:\n  - {b}: {n}\n  - {c}: {d}", f"import {a}.{b} as {c}\nprint({c}.{d}({n}))",
    )
    return rng.choice(forms)


def _again(rng: random.Random) -> str:
    """Few words that come again and again, so that what follows a word depends on where it stands."""
    pool = [any_word(rng) for _ in range(rng.randint(2, 8))]
    said = [rng.choice(pool) for _ in range(rng.randint(5, 20))]
    if rng.random() < 0.4:
        return " ".join(said)
    found, size = [], 0
    while size < len(said):
        step = rng.randint(3, 8)
        found.append(" ".join(said[size:size + step]).capitalize() + rng.choice((".", ".", "!", "?")))
        size += step
    if rng.random() < 0.3:
        found.append(rng.choice(found))
    return " ".join(found)


def any_text(rng: random.Random) -> str:
    """Something to copy, edit or quote: of every kind and up to some dozens of words."""
    kind = rng.random()
    if rng.random() < 0.2:
        return _again(rng)
    if kind < 0.16:
        return words(rng, 1, 14)
    if kind < 0.32:
        return " ".join(said_sentence(rng) for _ in range(rng.randint(1, 4)))
    if kind < 0.44:
        return "\n".join(any_code(rng) for _ in range(rng.randint(1, 2)))
    if kind < 0.52:
        return rng.choice((" ", ", ", "\n", "; ")).join(any_id(rng) for _ in range(rng.randint(1, 6)))
    if kind < 0.6:
        return rng.choice((" ", ", ", "\n")).join(digits(rng) for _ in range(rng.randint(2, 10)))
    if kind < 0.7:
        mark = rng.choice(("- ", "* ", "", "{} ", "{}. ", "{}) "))
        return "\n".join(mark.format(index + 1) + rng.choice((f"{any_word(rng)} {any_word(rng)}: {digits(rng, 3)}", words(rng, 1, 5)))
                         for index in range(rng.randint(2, 6)))
    if kind < 0.76:
        return json.dumps(any_record(rng), indent=rng.choice((None, None, 2)))
    if kind < 0.84:
        return "\n".join(line for line in excerpt(rng, rng.randint(1, 6)).splitlines() if line.strip()).strip() or any_word(rng)
    if kind < 0.9:
        return "".join(rng.choice(LETTERS + "ABCDEFGH0123456789 .,;:!?()[]{}<>/|_-+*=#%&@'\"") for _ in range(rng.randint(3, 30))).strip() or "x"
    return " ".join(rng.choice((any_word, any_name, any_id, digits))(rng) for _ in range(rng.randint(2, 16)))


def inflected(rng: random.Random, word: str) -> str:
    """The word with another ending, as a request may have it."""
    stem = word[:-1] if word.endswith(("e", "y", "s")) and len(word) > 4 else word
    found = stem + rng.choice(ENDINGS)
    return word if found in reserved_words() else found
