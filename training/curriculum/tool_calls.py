"""Requests that need a tool: the right call, its result fed back, and refusals where no tool can do it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from curriculum.example import NEW, TRAIN, Example, Step, choose
from curriculum.phrases import noisy
from curriculum.pools import invented, sentence
from curriculum.random_tools import RandomTool, chosen_arguments, identifier_like, others, participle, random_result, random_tool
from curriculum.random_tools import request as random_request
from curriculum.random_words import any_word, said_sentence, short_value, words
from curriculum.tool_drills import keyed_drill, whose
from curriculum.tool_pool import (
    KINDS, NEW_PARAMS, NEW_WRITTEN, PARAMS, WRITTEN, Declaration, Written, declare, made_name, make_value, shown,
)

RANDOM_SHARE = 0.78
"""Of the training examples: tools and requests of `random_tools`."""
KEYED_DRILLS, WHOSE = 0.34, 0.13
"""Of the sessions with made tools: those where parameters' names tell every tool, and those that ask whose a parameter is."""
COUNTS = (0, 1, 2, 3, 4, 6)
"""How many other tools may be declared."""
MADE_ASK = (
    "{V} the {n} with {p}.", "Please {v} the {n}: {p}.", "{V} a {n}, {p}.", "Can you {v} the {n} with {p}?", "I want to {v} the {n}. {P}.",
    "Use {t} with {p}.", "Call {t}: {p}.", "{v} {n} ({p})", "Could you {v} a {n} for me? {P}.", "{V} this {n}; {p}.", "Let us {v} the {n}. {P}.",
    "{P}. {V} the {n}.", "I need you to {v} the {n} with {p}.", "Given {p}, {v} the {n}.", "Now {v} my {n} where {p}.",
    "Someone should {v} the {n}: {p}.", "{V} {n}! {P}.", "Do this: {v} {n}, {p}.", "Time to {v} the {n} with {p}.",
    "We have to {v} one {n}, with {p}.", "For the {n}: {v} it, {p}.",
)
NEW_ASK = ("It is time to {v} that {n}, and here is what I know: {p}.", "Would you kindly {v} one {n} for me, given {p}?")
PAIR = ("{k} {x}", "{k} is {x}", "{k} = {x}", "{k}: {x}", "{k} set to {x}", "{x} as {k}", "{x} for the {k}", "the {k} {x}", "{k} of {x}",
        "{k} should be {x}", "{x} is the {k}", "a {k} that is {x}")
NEW_PAIR = ("{k} being {x}",)
IMPLICIT = ("{V} {n} {p}.", "{V} the {n} {p}", "{v} a {n} for {p}.", "Can you {v} {n} {p}?", "{V} at {p}.", "{V} {p}.", "{P}: {v} the {n}.",
            "Use {t}: {p}.", "What {n} has {p}?", "How is the {n} of {p}?", "{V} \"{p}\".", "{t} {p}", "Please {v} {p} in the {n}.")
JOINTS = (" at ", " for ", " with ", " to ", " on ", " into ", ", ", ": ", " in ", " by ", " and ", " as ", " is ", " from ", " until ", " ")
PREFACE = ("", "", "", "", "I will look that up.", "One moment.")


def _written(rng: random.Random, split: str) -> tuple[Declaration, str, dict[str, Any], dict[str, Any], str]:
    """(declaration, request, arguments, result, what to say about the result)."""
    tool: Written = rng.choice(NEW_WRITTEN if split == NEW else WRITTEN)
    arguments = {key: make_value(rng, kind, split) for key, kind in tool.params}
    result = {key: make_value(rng, kind, split) for key, kind in tool.returns}
    spoken = {key: shown(value) for key, value in (arguments | result).items()}
    return (declare(tool.name, tool.description, tool.params), rng.choice(tool.asks).format(**spoken), arguments, result,
            tool.says.format(**spoken))


def _made(rng: random.Random, split: str) -> tuple[Declaration, str, dict[str, Any], dict[str, Any], str]:
    name, verb, noun = made_name(rng, split)
    names = rng.sample(PARAMS, rng.randint(1, 4))
    if split == NEW:
        names[:2] = rng.sample(NEW_PARAMS, min(2, len(names)))
    if split == "train":
        names = [invented(rng) if rng.random() < 0.45 else key for key in names]
        names = list(dict.fromkeys(names))
    params = tuple((key, rng.choice(KINDS)) for key in names)
    is_implicit = split == TRAIN and rng.random() < 0.3
    required = len(params) if is_implicit else rng.randint(1, len(params))
    given = params[:rng.randint(required, len(params))]
    arguments = {key: make_value(rng, kind, split) for key, kind in given}
    pair = choose(rng, split, PAIR, NEW_PAIR)
    if split == TRAIN and rng.random() < 0.45:
        pair = f"{{k}} {participle(rng) if rng.random() < 0.6 else invented(rng)} {{x}}"
    told = [noisy(rng, split, pair).format(k=key, x=shown(value)) if split == TRAIN and rng.random() < 0.3
            else pair.format(k=key, x=shown(value)) for key, value in arguments.items()]
    listed = (", ".join(told[:-1]) + " and " if len(told) > 1 else "") + told[-1]
    forms = NEW_ASK if split == NEW else ORDER if rng.random() < 0.3 and split == "train" and not name.endswith("_") else MADE_ASK
    form = rng.choice(forms if forms is not ORDER else [form for form in ORDER if "{p}" in form])
    if is_implicit:
        form, listed = rng.choice(IMPLICIT), _implied(rng, [shown(value) for value in arguments.values()])
    request = noisy(rng, split, form).format(
        V=verb.capitalize(), v=verb, n=noun, p=listed, P=listed[0].upper() + listed[1:], t=name)
    about = f"{verb.capitalize()}s {rng.choice(('a', 'the', 'one'))} {noun}"
    key = rng.choice(("result", "status", "value", "total", "answer", "id"))
    result = {key: make_value(rng, rng.choice(("number", "word", "code")), split)}
    return declare(name, about, params, required), request, arguments, result, f"The {key} is {shown(result[key])}."


def _implied(rng: random.Random, values: list[str]) -> str:
    """Values without their names, in the order in which the declaration requires them."""
    text = values[0]
    for value in values[1:]:
        text += rng.choice(JOINTS) + value + (f" {invented(rng)}" if rng.random() < 0.2 else "")
    return text


def other_tools(rng: random.Random, split: str, count: int, taken: set[str], like: RandomTool | None = None) -> list[Declaration]:
    """More tools, none of which does the same."""
    found: list[Declaration] = []
    if split == TRAIN:
        found = others(rng, sum(rng.random() < RANDOM_SHARE for _ in range(count)), taken, like)
    while len(found) < count:
        if rng.random() < 0.5:
            tool = rng.choice(NEW_WRITTEN if split == NEW and rng.random() < 0.5 else WRITTEN)
            entry = declare(tool.name, tool.description, tool.params)
        else:
            name, verb, noun = made_name(rng, split)
            params = tuple((key, rng.choice(KINDS)) for key in rng.sample(PARAMS, rng.randint(1, 4)))
            entry = declare(name, f"{verb.capitalize()}s the {noun}", params, rng.randint(1, len(params)))
        if entry["function"]["name"] not in taken:
            taken.add(entry["function"]["name"])
            found.append(entry)
    return found


def _random(rng: random.Random, tool: RandomTool, declared: Sequence[Declaration]) -> tuple[Declaration, str, dict[str, Any], dict[str, Any], str]:
    given = chosen_arguments(rng, tool)
    return tool.declaration, random_request(rng, tool, given, declared), {param.name: value for param, value in given}, *random_result(rng)


def _choice(rng: random.Random, split: str) -> tuple[Declaration, str, dict[str, Any], dict[str, Any], str]:
    if split == TRAIN and rng.random() < RANDOM_SHARE:
        return _random(rng, random_tool(rng), ())
    return _written(rng, split) if rng.random() < 0.45 else _made(rng, split)


def tool_call(rng: random.Random, split: str) -> Example:
    """One or several tools, a request, the call; half of the time also the result and the answer from it."""
    if split == TRAIN and rng.random() < RANDOM_SHARE:
        tool, count = random_tool(rng), rng.choice(COUNTS)
        more = other_tools(rng, split, count, {tool.name}, tool)
        made = _random(rng, tool, more)
    else:
        made = _choice(rng, split)
        more = other_tools(rng, split, rng.choice(COUNTS), {made[0]["function"]["name"]})
    declaration, request, arguments, result, says = made
    name = declaration["function"]["name"]
    tools = [declaration, *more]
    rng.shuffle(tools)
    call = {"name": name, "arguments": arguments}
    thinks = rng.random() < 0.25
    reasoning = f"I need {name} for this." if thinks else None
    steps = [Step("user", request), Step("assistant", rng.choice(PREFACE) if split == TRAIN and rng.random() < 0.1 else "", reasoning, (call,))]
    check: Mapping[str, Any] = {"kind": "calls", "calls": [call]}
    task = "tool_calls"
    if rng.random() < (0.35 if split == "train" else 0.25):
        steps += [Step("tool", json.dumps(result)), Step("assistant", says, "I have the result." if thinks else None)]
        check, task = {"kind": "exact", "value": says}, "tool_results"
    return Example(task, tuple(steps), check, tools=tuple(tools), thinking=thinks)


def _drill(rng: random.Random) -> Example:
    """More requests than tools, all of them made, so that much is called for few declarations."""
    first = random_tool(rng)
    tools, alike = {first.name: first}, rng.choice((0.1, 0.4, 0.8))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 2, 3, 4))):
        tool = random_tool(rng, first if rng.random() < alike else None)
        tools.setdefault(tool.name, tool)
    declared = [tool.declaration for tool in tools.values()] + other_tools(rng, TRAIN, rng.choice((0, 0, 0, 1)), set(tools), first)
    asked = [*tools.values(), *rng.choices(list(tools.values()), k=rng.randint(1, 2 * len(tools) + 1))]
    rng.shuffle(asked)
    steps: list[Step] = []
    for tool in asked:
        _, request, arguments, result, says = _random(rng, tool, declared)
        steps += [Step("user", request), Step("assistant", "", None, ({"name": tool.name, "arguments": arguments},)),
                  Step("tool", json.dumps(result)), Step("assistant", says)]
    rng.shuffle(declared)
    return Example("tool_results", tuple(steps), {"kind": "exact", "value": steps[-1].text}, tools=tuple(declared))


def tool_session(rng: random.Random, split: str) -> Example:
    """Several requests over one set of tools, with results and plain sentences between them."""
    if split == TRAIN and rng.random() < RANDOM_SHARE:
        kind = rng.random()
        return keyed_drill(rng) if kind < KEYED_DRILLS else whose(rng) if kind < KEYED_DRILLS + WHOSE else _drill(rng)
    made = [_choice(rng, split) for _ in range(rng.randint(2, 4))]
    by_name = {declaration["function"]["name"]: declaration for declaration, *_ in made}
    made = [item for item in made if by_name[item[0]["function"]["name"]] is item[0]]
    tools = [*by_name.values(), *other_tools(rng, split, rng.choice((0, 1, 3)), set(by_name))]
    rng.shuffle(tools)
    steps: list[Step] = []
    for declaration, request, arguments, result, says in made:
        call = {"name": declaration["function"]["name"], "arguments": arguments}
        steps += [Step("user", request), Step("assistant", "", None, (call,)),
                  Step("tool", json.dumps(result)), Step("assistant", says)]
    check = {"kind": "exact", "value": steps[-1].text}
    return Example("tool_results", tuple(steps), check, tools=tuple(tools))


ORDER = ("Use the tool {t}.", "Call {t} with {p}.", "Please call the {t} tool.", "Run {t} now.", "Use {t}: {p}.", "I want you to call {t}.",
         "{t} with {p}, please.", "Next, {t}.", "Now {t}: {p}.", "Do {t}.", "It is time for {t} with {p}.", "Go on with {t}, {p}.", "Execute {t}.",
         "Execute {t} with {p}.", "The next thing to do is {t}.", "Apply {t}, {p}.", "Would you call {t}?", "Launch {t} for me, {p}.", "Trigger {t} with {p}.",
         "I ask you to use {t} with {p}.", "You need {t}. {p}.", "Perform {t} ({p}).", "Please do {t} with {p} for me.", "{t}!", "{t}: {p}", "Can you use {t}?", "Start {t}.", "Make a call to {t} with {p}.", "Do {t} now, {p}.", "Try {t}.",
         "Let {t} do this: {p}.", "Now use {t} for me.", "The tool {t} should run with {p}.")
NEW_ORDER = ("Your next step is {t}. Do it.", "Invoke {t} for me, with {p}.")


def _random_refusal(rng: random.Random) -> Example:
    """A request that names a tool by its name, which is not among those declared."""
    tool = random_tool(rng)
    name = tool.name if rng.random() < 0.7 else identifier_like(rng)
    tools = other_tools(rng, TRAIN, rng.choice((0, 0, 1, 1, 2, 3, 4)), {name}, tool)
    told = rng.choice(("", "", f"{any_word(rng)} {short_value(rng)}", short_value(rng), f"{any_word(rng)}: {short_value(rng)}"))
    asked = rng.choice(ORDER) if rng.random() < 0.3 else rng.choice(ORDERED)
    if "{p}" not in asked and told and rng.random() < 0.5:
        asked = asked.rstrip(".!?") + rng.choice((" with {p}.", ": {p}", ", {p}", " ({p})."))
    while "{w}" in asked:
        asked = asked.replace("{w}", any_word(rng) if rng.random() < 0.7 else words(rng, 1, 4), 1)
    asked = asked.format(t=name, p=told or any_word(rng))
    if rng.random() < 0.1:
        asked = f"{said_sentence(rng)} {asked}"
    answer = f"There is no tool named {name} here, so I cannot call it."
    return Example("refusals", (Step("user", asked[0].upper() + asked[1:] if not asked.startswith(name) else asked), Step("assistant", answer)),
                   {"kind": "contains", "values": ["no tool", name]}, tools=tuple(tools), alone=bool(tools))


ORDERED = ("Use {t}.", "Call {t}.", "Run {t}.", "{w} {t}.", "{w} the tool {t}.", "{w} {t} with {p}.", "{w} {w} {t}: {p}", "Please {w} {t}, {w} {p}.", "{t} {w} {p}.",
           "The {w} {w} {t}.", "I {w} {t} {w}.", "Let {t} {w}.", "With {t}, {w} {p}.", "{w} {w} {w} {t}.", "Can you {w} {t}?", "{w}: {t}", "Now {w} {t} {w} {p}.")


def refusal(rng: random.Random, split: str) -> Example:
    """The request names a tool that is not declared, with others declared or none at all."""
    if split == TRAIN and rng.random() < RANDOM_SHARE:
        return _random_refusal(rng)
    missing, request, *_ = _choice(rng, split)
    name = missing["function"]["name"]
    is_named = name in request and split != NEW
    tools = other_tools(rng, split, rng.choice((0, 0, 1, 2, 3)), {name})
    key = next(iter(missing["function"]["parameters"]["properties"]))
    told = f"{key} {shown(make_value(rng, 'word', split))}"
    if not is_named or rng.random() < 0.4:
        request = noisy(rng, split, choose(rng, split, ORDER, NEW_ORDER)).format(t=name, p=told)
    answer = f"There is no tool named {name} here, so I cannot call it."
    return Example("refusals", (Step("user", request), Step("assistant", answer)),
                   {"kind": "contains", "values": ["no tool", name]}, tools=tuple(tools), alone=bool(tools))


def idle_tools(rng: random.Random, split: str, plain: Example) -> Example:
    """An exchange that needs no tool, with tools declared."""
    tools = other_tools(rng, split, rng.randint(1, 8), set())
    return Example(plain.task, plain.steps, plain.check, plain.system, tuple(tools), plain.alone, plain.thinking)


def long_tools(rng: random.Random, split: str, count: int) -> tuple[Declaration, ...]:
    """Many declarations with long descriptions, as agents send them."""
    found = []
    for entry in other_tools(rng, split, count, set()):
        function = entry["function"] | {"description": " ".join(rng.choice((sentence, said_sentence))(rng) for _ in range(rng.randint(1, 5)))}
        found.append({"type": "function", "function": function})
    return tuple(found)
