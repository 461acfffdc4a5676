"""From a parameter's name to its tool and back, asked again and again about the same few declarations; train only.

A request that no word of a tool tells, only a parameter next to its value, wants the name that was declared before that parameter.
Among tools that are known that is found without: by leaving out those. Among tools of words that mean nothing it has to be learnt.
"""

from __future__ import annotations

import json
import random

from curriculum.example import Example, Step
from curriculum.random_tools import Param, RandomTool, chosen_arguments, others, random_result, random_tool, request
from curriculum.random_words import said_sentence

WHOSE_ASK = (
    "Which tool takes {k}?", "What tool has {k}?", "Whose parameter is {k}?", "{k}?", "Which of them takes {k}?", "Name the tool with {k}.",
    "{k} is for which tool?", "Which tool knows {k}?", "Tool with {k}", "The parameter {k}: which tool has it?", "Which one wants {k}?",
    "{k}: whose?", "I have {k}. Which tool is it for?", "Tell me which function takes {k}.", "Of all tools, which one needs {k}?",
)
TAKES_ASK = (
    "What does {t} take?", "Which parameters has {t}?", "What can I give {t}?", "Parameters of {t}?", "List what {t} takes.", "{t} takes what?",
    "Tell me the parameters of {t}.", "What does {t} want to know?", "The tool {t}: which parameters has it?",
)
"""No form of either has words next to a parameter that could be its value: that would be a call."""
SHORT = 0.75
"""Of the drills: few small tools and little to ask, so that they fit the short conversations too, whose most are too long."""
SMALL_TOOLS = (2, 2, 3, 3, 4)
"""How many: where they are two, half is found without looking."""


def _tools(rng: random.Random, is_short: bool, most: int) -> list[RandomTool]:
    """Two tools to `most` with different names, seldom alike; few, and none with many parameters, where they are to be short."""
    found, alike = {}, rng.choice((0.0, 0.0, 0.3))
    count = rng.choice(SMALL_TOOLS) if is_short else rng.randint(2, most)
    while len(found) < count:
        tool = random_tool(rng, next(iter(found.values())) if found and rng.random() < alike else None)
        if not is_short or len(tool.params) <= (3 if count == 2 else 2):
            found.setdefault(tool.name, tool)
    return list(found.values())


def _own(tools: list[RandomTool]) -> list[tuple[RandomTool, Param]]:
    """The parameters whose name only one tool has."""
    names = [param.name for tool in tools for param in tool.params]
    return [(tool, param) for tool in tools for param in tool.params if names.count(param.name) == 1]


def _filled(rng: random.Random, form: str, **values: str) -> str:
    text = form.format(**values)
    return f"{said_sentence(rng)} {text}" if rng.random() < 0.08 else text


def whose(rng: random.Random) -> Example:
    """Questions about the declarations themselves: whose a parameter is, what a tool takes. Nothing is called."""
    is_short = rng.random() < SHORT
    tools = _tools(rng, is_short, 6)
    known = _own(tools)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 4) if is_short else rng.randint(4, 4 + 2 * len(tools))):
        if known and rng.random() < 0.8:
            tool, param = rng.choice(known)
            key = f'"{param.name}"' if rng.random() < 0.15 else param.name
            steps += [Step("user", _filled(rng, rng.choice(WHOSE_ASK), k=key)), Step("assistant", f"It is {tool.name}.")]
        else:
            tool = rng.choice(tools)
            names = sorted(param.name for param in tool.params)
            told = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
            steps += [Step("user", _filled(rng, rng.choice(TAKES_ASK), t=tool.name)), Step("assistant", f"{tool.name} takes {told}.")]
    declared = [tool.declaration for tool in tools]
    rng.shuffle(declared)
    return Example("tool_results", tuple(steps), {"kind": "exact", "value": steps[-1].text}, tools=tuple(declared), alone=True)


def keyed_drill(rng: random.Random) -> Example:
    """Several requests, each told by a parameter's name alone."""
    is_short = rng.random() < SHORT
    tools = _tools(rng, is_short, 5)
    declared = [tool.declaration for tool in tools]
    if not is_short and rng.random() < 0.3:
        declared += others(rng, rng.randint(1, 2), {tool.name for tool in tools})
    steps: list[Step] = []
    for tool in rng.choices(tools, k=rng.randint(1, 2) if is_short else rng.randint(3, 3 + len(tools))):
        given = chosen_arguments(rng, tool)
        call = {"name": tool.name, "arguments": {param.name: value for param, value in given}}
        result, says = random_result(rng)
        steps += [Step("user", request(rng, tool, given, declared, is_keyed=True)), Step("assistant", "", None, (call,)),
                  Step("tool", json.dumps(result)), Step("assistant", says)]
    rng.shuffle(declared)
    if is_short and rng.random() < 0.7:  # ends with a call
        return Example("tool_calls", tuple(steps[:-2]), {"kind": "calls", "calls": list(steps[-3].calls)}, tools=tuple(declared))
    return Example("tool_results", tuple(steps), {"kind": "exact", "value": steps[-1].text}, tools=tuple(declared))
