"""Looking a tool up before it is called: lines of text that a model writes where only a parameter's name tells the tool.

From a parameter to the tool that declares it is a step back that a small model does not learn to take at once (training/README.md). In
lines it is a row of steps forward, each of which it knows: which word of the request is a parameter, the tools with their parameters in
the order of the declarations, and the end of the list where that word comes. Then the tool's name is the last that was written.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from curriculum.example import TRAIN, Example, Step
from curriculum.random_tools import RandomTool, chosen_arguments, random_result, random_tool, request
from curriculum.telling import telling_words
from curriculum.tool_calls import other_tools
from curriculum.tool_pool import WRITTEN, Declaration

ASKS = "Which tool takes"
"""How the lines begin."""
KNOWN = frozenset(tool.name for tool in WRITTEN)
"""Tools whose own wordings are learnt: their requests need no looking up."""
COUNTS = (2, 3, 3, 4, 4, 5, 6, 7)
"""How many tools a drill declares, a few of others aside."""
KEYED = 0.65
"""Of a drill's requests; the rest say words of their tools. With 0.85 tools were looked up that the request told."""


def _place(text: str, name: str) -> int | None:
    """Where the parameter is said, in words or as it is declared."""
    for form in (name, name.replace("_", " ")):
        if found := re.search(rf"(?<![A-Za-z0-9_]){re.escape(form)}(?![A-Za-z0-9_])", text):
            return found.start()
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def looked_up(text: str, tools: Sequence[Declaration], call: Mapping[str, Any]) -> str:
    """The lines before a call that answers the request `text`, or "" where the tool's own words tell it, or nothing does.

    The first parameter said that no other tool has, then each tool down to that one's, names sorted as the template prints them.
    """
    functions = [tool["function"] for tool in tools]
    own = next(function for function in functions if function["name"] == call["name"])
    if len(tools) < 2 or own["name"] in KNOWN or own["name"] in text:
        return ""
    said = telling_words(text) - telling_words(" ".join(_texts(call["arguments"])))
    if said & telling_words(f"{own['name']} {own['description']}"):
        return ""
    shared = {key for function in functions if function is not own for key in function["parameters"]["properties"]}
    places = {key: _place(text, key) for key in call["arguments"] if key not in shared}
    found = sorted((place, key) for key, place in places.items() if place is not None)
    if not found:
        return ""
    key = found[0][1]
    names = [sorted(function["parameters"]["properties"]) for function in functions[:functions.index(own) + 1]]
    names[-1] = names[-1][:names[-1].index(key) + 1]
    told = [f"{function['name']}: {', '.join(keys) or 'nothing'}" for function, keys in zip(functions, names, strict=False)]
    return "\n".join((f"{ASKS} {key}?", *told))


def with_looking_up(steps: Sequence[Step], tools: Sequence[Declaration]) -> tuple[Step, ...]:
    """The steps, with the lines in front of every call that wants them; in the thought where there is one."""
    found = list(steps)
    for index, step in enumerate(found):
        if step.role == "assistant" and len(step.calls) == 1 and index and found[index - 1].role == "user":
            lines = looked_up(found[index - 1].text, tools, step.calls[0])
            if lines and step.reasoning is None:
                found[index] = Step(step.role, lines, None, step.calls)
            elif lines:
                found[index] = Step(step.role, step.text, f"{lines}\n{step.reasoning}", step.calls)
    return tuple(found)


def _tools(rng: random.Random) -> list[RandomTool]:
    """Small tools, so that many fit a short row."""
    found: dict[str, RandomTool] = {}
    count, alike = rng.choice(COUNTS), rng.choice((0.0, 0.0, 0.2))
    while len(found) < count:
        tool = random_tool(rng, next(iter(found.values())) if found and rng.random() < alike else None)
        if len(tool.params) <= 4 and rng.random() < 1.2 - 0.2 * len(tool.params):
            found.setdefault(tool.name, tool)
    return list(found.values())


def lookup_drill(rng: random.Random) -> Example:
    """Requests most of which a parameter's name alone tells, with results between them; without the lines."""
    tools = _tools(rng)
    declared = [tool.declaration for tool in tools]
    if rng.random() < 0.5:
        declared += other_tools(rng, TRAIN, rng.randint(1, 2), {tool.name for tool in tools})
    steps: list[Step] = []
    for tool in rng.choices(tools, k=rng.randint(1, 5)):
        given = chosen_arguments(rng, tool)
        call = {"name": tool.name, "arguments": {param.name: value for param, value in given}}
        result, says = random_result(rng) if rng.random() < 0.5 else ({"status": "ok"}, "The status is ok.")
        steps += [Step("user", request(rng, tool, given, declared, is_keyed=rng.random() < KEYED)), Step("assistant", "", None, (call,)),
                  Step("tool", json.dumps(result)), Step("assistant", says)]
    rng.shuffle(declared)
    if rng.random() < 0.4:  # ends with a call
        return Example("tool_calls", tuple(steps[:-2]), {"kind": "calls", "calls": list(steps[-3].calls)}, tools=tuple(declared))
    return Example("tool_results", tuple(steps), {"kind": "exact", "value": steps[-1].text}, tools=tuple(declared))
