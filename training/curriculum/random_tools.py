"""Tools made at random: names, descriptions and schemas in every shape, and requests that call them; train only.

A request says its values in one of three ways: with the tool's name, with words of it, or as a person would, with values alone.
Then a value belongs to the parameter whose type fits it, in the order of `required`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from curriculum.pools import ANIMALS, CITIES, COLORS, DAYS, FRUITS, MONTHS, PEOPLE, real_words, reserved_words
from curriculum.random_words import (
    any_id, any_name, any_record, any_word, digits, identifier, inflected, said_sentence, short_value, words,
)
from curriculum.telling import tells, tool_words
from curriculum.tool_pool import NOUNS, PARAMS, VERBS, Declaration


@dataclass(frozen=True)
class Param:
    """kind: string, integer, number, boolean, enum, strings, integers or object."""

    name: str
    kind: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class RandomTool:
    """A declaration with the words that its name is made of. required: how many of the params must be given."""

    declaration: Declaration
    verb: str
    noun: str
    params: tuple[Param, ...]
    required: int

    @property
    def name(self) -> str:
        return self.declaration["function"]["name"]


LANGUAGES = "English French Spanish German Italian Dutch Greek Turkish Danish Swedish Hindi Arabic Latin Finnish".split()
TYPICAL = {"language": LANGUAGES, "city": CITIES, "day": DAYS, "date": DAYS, "month": MONTHS, "color": COLORS, "user": PEOPLE, "owner": PEOPLE,
           "animal": ANIMALS, "fruit": FRUITS, "person": PEOPLE, "country": "Norway Spain France Italy Japan Chile Egypt India Kenya Peru".split()}
"""What a parameter of that name is mostly given, so that the value alone tells whose it is."""
KINDS = ("string",) * 15 + ("integer",) * 6 + ("boolean",) * 4 + ("number", "enum", "enum", "strings", "integers", "object")


def _param(rng: random.Random) -> Param:
    kind = rng.choice(KINDS)
    if kind == "string" and rng.random() < 0.15:
        name = rng.choice(list(TYPICAL))
    elif rng.random() < 0.35:
        name = rng.choice(PARAMS)
    else:
        name = identifier(rng, [any_word(rng) for _ in range(rng.choice((1, 1, 1, 1, 2)))]).replace(".", "_")
    schema: dict[str, Any] = {"type": {"enum": "string", "strings": "array", "integers": "array"}.get(kind, kind)}
    if kind == "enum":
        schema["enum"] = [any_word(rng) for _ in range(rng.randint(2, 5))]
    if kind in ("strings", "integers"):
        schema["items"] = {"type": "string" if kind == "strings" else "integer"}
    if rng.random() < 0.3:
        schema["description"] = rng.choice((words(rng, 1, 6), f"The {name.replace('_', ' ')}", f"{any_name(rng)} of the {any_word(rng)}"))
    if kind == "integer" and rng.random() < 0.1:
        schema["minimum"] = rng.randint(0, 3)
    return Param(name, kind, schema)


def random_tool(rng: random.Random, like: RandomTool | None = None) -> RandomTool:
    """A tool; `like`: one that shares a word with it, and now and then parameters."""
    verb = rng.choice(VERBS) if rng.random() < 0.4 else any_word(rng)
    noun = rng.choice(NOUNS) if rng.random() < 0.3 else any_word(rng)
    if like is not None:
        verb, noun = rng.choice(((like.verb, noun), (verb, like.noun)))
    shape = rng.random()
    parts = [verb, noun] if shape < 0.52 else [noun, verb] if shape < 0.72 else [verb] if shape < 0.84 else [verb, noun, any_word(rng)] \
        if shape < 0.94 else [any_word(rng), verb, noun]
    name = identifier(rng, parts)
    about = rng.choice((
        f"{verb.capitalize()}s {rng.choice(('a', 'the', 'one', 'any'))} {noun}", f"{verb.capitalize()} {noun}s", f"{any_name(rng)}s {any_word(rng)} {noun}",
        words(rng, 2, 7).capitalize(), said_sentence(rng), f"{verb.capitalize()} the {noun} of {rng.choice(('a', 'the'))} {any_word(rng)}",
        f"{inflected(rng, verb).capitalize()} {any_word(rng)} {noun}s.", f"Tool for the {noun}. {said_sentence(rng)}"))
    made = [_param(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 4, 5)))]
    if like is not None and rng.random() < 0.4:
        made[-rng.randint(1, 2):] = rng.sample(like.params, min(len(like.params), rng.randint(1, 2)))
    if rng.random() < 0.15:
        made[0] = Param(noun, made[0].kind, made[0].schema)
    if rng.random() < 0.1:
        made[-1] = Param(inflected(rng, verb), "boolean", {"type": "boolean"})
    params = tuple({param.name: param for param in made}.values())
    required = len(params) if rng.random() < 0.6 else rng.randint(0, len(params))
    schema: dict[str, Any] = {"type": "object", "properties": {param.name: dict(param.schema) for param in params}}
    if required or rng.random() < 0.5:
        schema["required"] = [param.name for param in params[:required]]
    if rng.random() < 0.12:
        schema["additionalProperties"] = False
    return RandomTool({"type": "function", "function": {"name": name, "description": about, "parameters": schema}},
                      verb, noun, params, required)


def others(rng: random.Random, count: int, taken: set[str], like: RandomTool | None = None) -> list[Declaration]:
    """Declarations of other tools, some of which look like the one that is asked for."""
    found, alike = [], rng.choice((0.1, 0.3, 0.5, 0.8))
    while len(found) < count:
        tool = random_tool(rng, like if rng.random() < alike else None)
        if tool.name not in taken:
            taken.add(tool.name)
            found.append(tool.declaration)
    return found


def make_value(rng: random.Random, param: Param) -> Any:
    kind = param.kind
    if kind == "integer":
        return int(digits(rng, 4))
    if kind == "number":
        return rng.choice((int(digits(rng, 3)), rng.randint(0, 999) / 10, rng.randint(0, 999) / 100))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "enum":
        return rng.choice(param.schema["enum"])
    if kind == "strings":
        return [any_word(rng) for _ in range(rng.randint(1, 4))]
    if kind == "integers":
        return [int(digits(rng, 3)) for _ in range(rng.randint(1, 4))]
    if kind == "object":
        return any_record(rng, 1, 2)
    if param.name in TYPICAL and rng.random() < 0.75:
        return rng.choice(TYPICAL[param.name])
    shape = rng.random()
    if shape < 0.12:
        return said_sentence(rng, 2, 7)
    return words(rng, 2, 4) if shape < 0.27 else rng.choice((*DAYS, *MONTHS)) if shape < 0.3 else short_value(rng)


def said(rng: random.Random, param: Param, value: Any, is_marked: bool) -> str:
    """A value as a request says it. is_marked: texts of several words have quotes around them."""
    if isinstance(value, str):
        if " " in value and (is_marked or value[-1] in ".!?") and rng.random() < 0.97:
            mark = rng.choice(('"', '"', '"', "'", "`"))
            return f"{mark}{value}{mark}"
        return f'"{value}"' if rng.random() < 0.08 else value
    if isinstance(value, list) and rng.random() < 0.7:
        texts = [str(entry) for entry in value]
        return ", ".join(texts[:-1]) + (" and " if len(texts) > 1 else "") + texts[-1]
    return json.dumps(value)


JOIN = ("is", "=", ":", "as", "of", "to", "at", "equal to", "set to", "should be", "will be", "must be", "->", "with", "was", "to be")


VALUE_FIRST = ("as", "for the", "is the", "as the", "for")


def _pair(rng: random.Random, key: str, value: str, shape: int, link: str = "") -> str:
    """Key and value next to each other, in one of many shapes. link: what stands between them, if there is one. A value stands
    before its key only where a known word says so: whatever else is between the two, the key comes first."""
    key = key.replace("_", " ") if rng.random() < 0.08 else key
    if link in VALUE_FIRST:
        return f"{value} {link} {key}"
    if link:
        return f"{key} {link} {value}"
    if shape == 0:
        return f"{key} {value}"
    if shape == 1:
        return f"{key}: {value}"
    if shape == 2:
        return f"{key}={value}"
    if shape == 3:
        return f"{value} {rng.choice(VALUE_FIRST)} {key}"
    if shape == 4:
        return f"{rng.choice(('the', 'a', 'my', 'this', any_word(rng)))} {key} {rng.choice((*JOIN, any_word(rng)))} {value}"
    if shape == 5:
        return f"{value} ({key})"
    return f"{key} {any_word(rng) if shape == 6 else rng.choice(JOIN)} {value}"


def pairs(rng: random.Random, given: list[tuple[Param, Any]]) -> str:
    """All arguments with their names. Half of the time one link, a word or two of any meaning, stands in all of them. Now and then
    their order is turned, and that of `given` with it: a call follows the request."""
    shape = rng.randrange(8)
    link = ""
    if rng.random() < 0.6:
        kind = rng.random()
        link = rng.choice(VALUE_FIRST) if kind < 0.12 else rng.choice(JOIN) if kind < 0.22 else participle(rng) if kind < 0.5 \
            else words(rng, 1, rng.choice((1, 1, 1, 1, 2)))
    is_marked = rng.random() < 0.4 or " " in link or (not link and shape in (0, 6))  # else nobody knows where a value of words begins
    if rng.random() < 0.35:
        rng.shuffle(given)
    told = [_pair(rng, param.name, said(rng, param, value, is_marked), rng.randrange(8) if rng.random() < 0.08 else shape, link)
            for param, value in given]
    if len(told) == 1:
        return told[0]
    joint, last = rng.choice(((", ", " and "), (", ", " and "), (", ", ", "), ("; ", "; "), (" and ", " and "), (", ", " plus "),
                              ("\n", "\n"), (" ", " "), (", ", ", and ")))
    return joint.join(told[:-1]) + last + told[-1]


@cache
def participles() -> tuple[str, ...]:
    return tuple(word for word in real_words() if word.endswith(("ing", "ed")) and len(word) > 4)


def participle(rng: random.Random) -> str:
    """What may stand between key and value: a word that cannot be known, often of the form of those that do."""
    if rng.random() < 0.5:
        return rng.choice(participles())
    word = any_word(rng)
    found = word + rng.choice(("ing", "ing", "ed", ""))
    return word if found in reserved_words() else found


SMALL = """is what I for the as of to a this it here and with be you my has was in on at by now that these so we if when which are not there do
me all from or can will who how first then about""".split()
"""Words that stand between key and value elsewhere: what they say in a clause of their own, they say of no value."""


def clause(rng: random.Random) -> str:
    """Words before the arguments that are none of them, many of which look as if they told one."""
    found = [rng.choice(SMALL) if rng.random() < 0.6 else any_word(rng) for _ in range(rng.randint(2, 8))]
    return f"{rng.choice(('', '', 'and ', 'so ', 'but '))}{' '.join(found)}"


LINKS = ("in", "at", "for", "on", "to", "from", "with", "into", "by", "of", "and", "as", "about", "until", "near", "under", "the", "a", "is", "my", "over")


def spoken(rng: random.Random, given: list[tuple[Param, Any]], has_key: bool = False) -> str:
    """The values in the order of the parameters, between words that mean nothing, some or all next to a word of their parameter; at
    least one if has_key."""
    found, is_marked, keyed = [], rng.random() < 0.95, rng.randrange(len(given)) if has_key and given else -1
    share = rng.choice((0.2, 0.2, 0.35, 1.0))
    for index, (param, value) in enumerate(given):
        text = said(rng, param, value, is_marked)
        if isinstance(value, bool) or rng.random() < share or index == keyed:
            key = param.name.replace("_", " ")
            text = rng.choice((f"{text} {key}", f"{text} {key}", f"the {text} {key}", f"{key} {text}", f"{key} is {text}", f"the {key} {text}"))
        link = rng.choice(LINKS) if rng.random() < 0.7 else any_word(rng) if rng.random() < 0.6 else ""
        if index or rng.random() < 0.5:
            text = f"{link} {text}".strip()
        found.append(text)
    told = rng.choice((" ", " ", " ", ", ", ": ")).join(found)
    if share == 1.0 and rng.random() < 0.5:  # words of the kind that values are, but next to no parameter's name
        told = f"{rng.choice(('the ', 'a ', '', any_word(rng) + ' '))}{any_word(rng)} {rng.choice(LINKS)} {told}"
    return told


CALL = ("use", "call", "run", "execute", "apply", "try", "start", "take", "employ", "do", "launch", "perform", "make a call to", "go with")
LEADS = ("", "", "", "", "Please ", "Can you ", "Could you ", "I want you to ", "I need to ", "Now ", "Let us ", "Time to ", "Help me ", "You should ",
         "We must ", "Next, ", "First ", "It would be good to ", "I have to ", "Would you please ", "Go and ", "I ask you to ", "My wish: ", "Task: ")
TAILS = (".", ".", "", "?", "!", " please.", ", please.", " now.", " for me.", ", thanks.", " today.", " again?")
DETERMINERS = ("the", "the", "a", "my", "this", "our", "some", "one", "that", "every", "")


KEYED_SHARE = 0.22
"""Of the requests among several tools: those that only a parameter's name tells."""


def _noise(rng: random.Random, chance: float) -> str:
    return f"{words(rng, 1, 3)} " if rng.random() < chance else ""


def _described(rng: random.Random, tool: RandomTool) -> str:
    """Some words of the tool's description, in their order."""
    about = tool.declaration["function"]["description"].rstrip(".!?").lower().split()
    begin = rng.randrange(len(about))
    return " ".join(about[begin:begin + rng.randint(2, 4)]) if len(about) - begin > 1 else " ".join(about[-2:])


def request(rng: random.Random, tool: RandomTool, given: list[tuple[Param, Any]], declared: Sequence[Declaration], is_keyed: bool = False) -> str:
    """A user's words for a call with these arguments, told apart from the other tools that are declared wherever words can do it.
    is_keyed: by a parameter's name alone, where one is no other tool's."""
    own, rest = tool_words(tool.declaration), [tool_words(entry) for entry in declared if entry is not tool.declaration]
    keys = {key for entry in declared if entry is not tool.declaration for key in entry["function"]["parameters"]["properties"]}
    if is_keyed and rng.random() < 0.5 and any(param.name not in keys and param.name not in PARAMS for param, _ in given):
        keys |= set(PARAMS)  # names that tools of the rest of the conversation may have too
    for _ in range(6):
        text = _request(rng, tool, given, not rest, keys, is_keyed)
        if tells(text, [value for _, value in given], own, rest):
            break
    return text


def _request(rng: random.Random, tool: RandomTool, given: list[tuple[Param, Any]], is_alone: bool, shared: set[str], is_keyed: bool) -> str:
    """One try. is_alone: no other tool is declared, so nothing need tell them apart. shared: names of the others' parameters."""
    kind, lead, tail = 0.0 if is_keyed else rng.random(), rng.choice(LEADS), rng.choice(TAILS)
    verb = tool.verb if rng.random() < 0.88 else inflected(rng, tool.verb)
    noun = tool.noun if rng.random() < 0.88 else inflected(rng, tool.noun)
    named = f"{rng.choice(CALL) if rng.random() < 0.7 else any_word(rng)} {rng.choice(('', '', 'the tool ', 'the function '))}{tool.name}"
    worded = f"{verb} {rng.choice(DETERMINERS) if rng.random() < 0.8 else any_word(rng)} {noun}".replace("  ", " ")
    sure = [index for index, (param, _) in enumerate(given) if param.name not in shared]
    if kind < (0.18 if is_alone else KEYED_SHARE) and sure:
        counted = [index for index in sure if given[index][0].kind == "integer"]
        text = lead + _keyed(rng, given, rng.choice(counted if counted and rng.random() < 0.4 else sure)) + tail
    elif kind < 0.72:
        what = named if rng.random() < 0.35 else worded if rng.random() < 0.85 else rng.choice((noun, verb, _described(rng, tool), words(rng, 2, 5)))
        told = pairs(rng, given) if given else ""
        joint = rng.choice((" with ", ": ", ", ", " (", ". ", " using ", "; ", " where ", " - ", f" {any_word(rng)} ", f" {words(rng, 2, 6)} ", f", {words(rng, 2, 7)}: ", f", {words(rng, 1, 5)} ",
                            f". {words(rng, 1, 4).capitalize()}: "))
        if rng.random() < 0.25:
            joint = f"{rng.choice((', ', ', ', '. ', '; ', ' - '))}{clause(rng)}{rng.choice((': ', ': ', ', ', '; '))}"
        if not told:
            text = lead + what + tail
        elif rng.random() < 0.15:
            before = f"{clause(rng)}{rng.choice((': ', ', '))}" if rng.random() < 0.3 else _noise(rng, 0.3)
            text = f"{before}{told}{rng.choice(('. ', ': ', ', ', '; '))}{lead}{what}{tail}"
        else:
            text = lead + _noise(rng, 0.2) + what + _noise(rng, 0.0) + joint + told + (")" if joint == " (" else "") + tail
    else:
        is_vague = rng.random() < (0.3 if is_alone else 0.12)
        told = spoken(rng, given, is_vague and not is_alone)
        if is_vague:
            begin = words(rng, 1, 4)
        else:
            begin = rng.choice((worded, worded, f"{verb}", f"{noun}", f"what {noun}", f"how {inflected(rng, tool.noun)} is it", f"{any_word(rng)} {noun}", _described(rng, tool),
                                f"{verb} {any_word(rng)} {rng.choice(DETERMINERS)} {noun}", named))
        text = f"{lead}{_noise(rng, 0.15)}{begin}{rng.choice((' ', ' ', ' ', ': ', ', '))}{told}{tail}" if rng.random() < 0.85 \
            else f"{told}{rng.choice((', ', ': ', ' '))}{begin}{tail}"
    return text[0].upper() + text[1:] if rng.random() < 0.85 else text


def _keyed(rng: random.Random, given: list[tuple[Param, Any]], sure: int) -> str:
    """No word of the tool: which one is meant is told by the name of parameter `sure` next to its value, and by what fits."""
    verb, link = any_word(rng), rng.choice(LINKS)
    told = []
    for index, (param, value) in enumerate(given):
        text, key = said(rng, param, value, True), param.name.replace("_", " ")
        is_typical = value in TYPICAL.get(param.name, ())
        if index == sure and not (is_typical and rng.random() < 0.6) or isinstance(value, bool) or rng.random() < 0.15:
            text = f"{text} {key}" if param.kind == "integer" and rng.random() < 0.4 \
                else rng.choice((f"{text} {key}", f"{text} {key}", f"the {text} {key}", f"{key} {text}", f"{key} is {text}"))
        told.append(text)
    first, rest = told[0], rng.choice((", ", ", ", " on ", " and ", f" {rng.choice(LINKS)} ", " ")).join(told[1:])
    begin = rng.choice((verb, verb, f"{verb} {link}", f"{verb} {link}", f"{verb} {rng.choice(DETERMINERS)} {any_word(rng)} {link}", words(rng, 1, 4),
                        clause(rng))).replace("  ", " ")
    text = f"{begin} {first}" + (rng.choice((": ", ": ", ", ", " for ", f" {rng.choice(LINKS)} ")) + rest if rest else "")
    return f"{text}{rng.choice((' ', ', ', '; '))}{words(rng, 1, 4)}" if rng.random() < 0.12 else text


def chosen_arguments(rng: random.Random, tool: RandomTool) -> list[tuple[Param, Any]]:
    """(parameter, value) of those that a request gives, in the order of the declaration."""
    count = rng.randint(tool.required, len(tool.params)) if tool.required else rng.randint(1, len(tool.params))
    optional = list(tool.params[tool.required:])
    picked = set(rng.sample(range(len(optional)), count - tool.required)) if count > tool.required else set()
    kept = [*tool.params[:tool.required], *(param for index, param in enumerate(optional) if index in picked)]
    given = [(param, make_value(rng, param)) for param in kept]
    return _akin(rng, tool, given) if rng.random() < 0.2 else given


def _akin(rng: random.Random, tool: RandomTool, given: list[tuple[Param, Any]]) -> list[tuple[Param, Any]]:
    """Values that look like something else: like another value, a parameter's name, a word of the tool or of the request."""
    texts = [value for param, value in given if isinstance(value, str)]
    found = []
    for param, value in given:
        if param.kind == "string" and rng.random() < 0.6:
            first = rng.choice((*(text.split()[0] for text in texts), rng.choice(SMALL), rng.choice(tool.params).name, tool.noun, tool.verb))
            value = first if rng.random() < 0.5 else f"{first} {any_word(rng)}" if rng.random() < 0.6 else f"{any_word(rng)} {first}"
            texts.append(value)
        found.append((param, value))
    return found


def random_result(rng: random.Random) -> tuple[dict[str, Any], str]:
    """(a tool's result, the sentence that tells it)."""
    record = any_record(rng, 1, 3)
    if rng.random() < 0.5:
        record = {rng.choice(("result", "status", "value", "total", "answer", "id", "error", any_word(rng))): next(iter(record.values()))}
    told = [f"the {key} is {value if isinstance(value, str) else json.dumps(value)}" for key, value in record.items()]
    text = ", ".join(told[:-1]) + (" and " if len(told) > 1 else "") + told[-1]
    return record, text[0].upper() + text[1:] + "."


def identifier_like(rng: random.Random) -> str:
    """A tool's name that is declared nowhere."""
    return identifier(rng, [any_word(rng) for _ in range(rng.randint(1, 3))]) if rng.random() < 0.8 else any_id(rng)
