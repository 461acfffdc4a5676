"""The known deviations of tool calls, and how a call without a proper name finds its tool.

A model that drifts writes almost a call. Each row of DRIFTS is one way that is recovered, by a name under which
rescues are counted. What reads them: tool_json.py (what begins with a brace), tool_json_tail.py (broken to the end of
the answer), tool_xml.py (tags), bare_calls.py (where each begins and ends).

What holds for all of them: only an offered tool is called; a name that is written and unknown is never replaced by
another; a wrong tool is worse than a call that is shown as text; nothing half-written runs; what is valid in its own
dialect is never rewritten.

    where                        what may be completed
    wrapper with its closer      the closing brace or tag that is missing before the wrapper's closer
    end of the answer            also the closing braces of a JSON call outside a wrapper, and a missing `</function>`,
                                 after values that have an end of their own; never a value
    a limit ended the answer     nothing
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from q27app.chat.tool_calls import parse_json
from q27app.chat.types import Tool

ALIASES = ("function", "tool", "tool_name")
"""Keys that stand for `name`."""
_SHELLS = ("function", "arguments", "parameters", "input", "tool_call")
_ARGUMENT_KEYS = ("arguments", "parameters", "input")
WRONG_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")

CLOSED, ENDED, CUT = "closed", "ended", "cut"
"""How a stretch of text ended: something else follows; the model ended; a limit ended it."""


@dataclass(frozen=True)
class Drift:
    """name: what rescues are counted under. example: what a model writes for a tool ReadFile(path) or Shell(cmd)."""

    name: str
    example: str
    repair: str


DRIFTS: dict[str, Drift] = {
    drift.name: drift
    for drift in (
        Drift(
            "bare_json", '{"name": "Shell", "arguments": {"cmd": "ls"}}',
            "the wrapper is missing: read as it stands",
        ),
        Drift(
            "cut_json", '{"name": "Shell", "arguments": {"cmd": "ls"',
            "the braces are put in, at the answer's end",
        ),
        Drift(
            "content_tags", '{"name": "Shell", "arguments": {"cmd": <content>a "b"</content>}}',
            "the value is quoted",
        ),
        Drift(
            "keyed_wrapper", '{"tool_call": {"name": "Shell", "arguments": {"cmd": "ls"}}',
            "the inner object is the call",
        ),
        Drift(
            "raw_controls", '{"name": "Shell", "arguments": {"cmd": "a\nb"}}',
            "line breaks and tabs in strings are read",
        ),
        Drift("no_name", '{"name": {"cmd": "ls"}}', "the tool is told by its keys"),
        Drift(
            "no_name_shelled", '{"name": {"arguments": {"cmd": "ls"}}}',
            "shells are peeled, the tool is told by its keys",
        ),
        Drift("alias_key", '{"function": "Shell", "arguments": {"cmd": "ls"}}', "the other key is the name"),
        Drift("flat", '{"name": "Shell", "cmd": "ls"}', "the other keys are the arguments"),
        Drift("unquoted_key", '{"name": "Shell", arguments": {"cmd": "ls"}}', "the quote is put in"),
        Drift("no_head", 'Shell", "cmd": "ls"}', "the head is put back"),
        Drift("raw_quotes", '{"name": "Shell", "arguments": {"cmd": "a "b" c"}}', "inner quotes are escaped"),
        Drift("unquoted_name", '{"name": Shell, "arguments": {"cmd": "ls"}}', "the quotes are put in"),
        Drift("tag_key", '{"name": "Shell", "arguments>\n{"cmd": "ls"}}', "the key's end is put right"),
        Drift("xml_closers", '{"name": "Shell", "arguments": {"cmd": "ls"}\n</function>', "the braces are put in"),
        Drift("tool_name", "<tool_name>Shell</tool_name>\n<parameter=cmd>ls</parameter>", "the tag is the name"),
        Drift("pseudo_tag", '<name>Shell, "arguments": {"cmd":"ls"}}', "the head is put back"),
        Drift(
            "json_in_function", '<function>{"name": "Shell", "arguments": {"cmd": "ls"}}</function>',
            "the object is the call",
        ),
        Drift("bare_function", "<function=Shell>\n<parameter=cmd>\nls\n</parameter>\n</function>", "read as it stands"),
        Drift("json_head", '{"name": "Shell",\n<parameter=cmd>\nls\n</parameter>', "the object is the head"),
        Drift("name_tag", "<name>Shell\n<parameter=cmd>\nls\n</parameter>\n</function>", "the tag is the head"),
        Drift(
            "spelling", '<function name="Shell"><parameter name="cmd">ls</parameter></function>',
            "attributes are read",
        ),
        Drift(
            "nameless", "<tool_name>\n<parameter=cmd>\nls\n</parameter>\n</function>",
            "the tool is told by its keys",
        ),
        Drift("no_opener", "<parameter=cmd>\nls\n</parameter>\n</function>", "the tool is told by its keys"),
        Drift("fused_head", '{"function=Shell>\n<parameter=cmd>\nls\n</parameter>\n</function>', "the name is read"),
        Drift(
            "name_parameter", "<parameter=Shell>\n<parameter=cmd>\nls\n</parameter>\n</function>",
            "the first tag is the name",
        ),
        Drift("open_value", "<function=Shell>\n<parameter=cmd>\nls\n</function>", "the value ends with the function"),
        Drift(
            "open_function", "<function=Shell>\n<parameter=cmd>\nls\n</parameter>",
            "the function ends with the wrapper",
        ),
    )
}


def properties_of(tool: Tool) -> Mapping[str, Any]:
    """The declared parameters: name -> schema."""
    properties = tool.parameters.get("properties") if isinstance(tool.parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def required_of(tool: Tool) -> frozenset[str]:
    """Names of the parameters that a call must have."""
    required = tool.parameters.get("required") if isinstance(tool.parameters, dict) else None
    return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()


def infer_tool(keys: Iterable[str], tools: Mapping[str, Tool]) -> Tool | None:
    """The tool that arguments with these keys are for, or None if that is not certain.

    The first tool whose required parameters are exactly the keys; else the best by 2 * known - unknown keys. Of equals,
    those whose required parameters are all there; still more than one is a refusal.
    """
    given = frozenset(keys)
    if not given:
        return None
    best: list[Tool] = []
    best_score = 0
    for tool in tools.values():
        if required_of(tool) == given:
            return tool
        known = len(given & properties_of(tool).keys())
        score = 2 * known - (len(given) - known)
        if known and score > 0 and score >= best_score:
            best = [tool] if score > best_score else [*best, tool]
            best_score = score
    if len(best) > 1:
        best = [tool for tool in best if required_of(tool) <= given]
    return best[0] if len(best) == 1 else None


def declared_name(written: str, tools: Mapping[str, Tool]) -> str | None:
    """The offered tool that a written name means: without stray quotes, and in any case if only one tool fits."""
    name = written.strip().strip("\"'").strip()
    if name in tools:
        return name
    fitting = [known for known in tools if known.lower() == name.lower()]
    return fitting[0] if len(fitting) == 1 else None


def loose_json(text: str) -> tuple[Any, bool]:
    """(value, whether line breaks or tabs stand raw in its strings); (None, False) if it is no JSON."""
    try:
        return parse_json(text), False
    except ValueError:
        pass
    if WRONG_CONTROLS.search(text):
        return None, False
    try:
        return parse_json(text, strict=False), True
    except ValueError:
        return None, False


def call_of(value: Any, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any], str] | None:
    """(tool, arguments, drift) of an object, drift "" for the proper form."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if isinstance(name, str) and name in tools:
        return _named_call(name, {key: inner for key, inner in value.items() if key != "name"}, tools[name])
    if isinstance(name, dict) and len(value) == 1:
        return call_of(name, tools) or _inferred_call(name, tools)
    if name is None and isinstance(value.get("tool_call"), dict) and len(value) == 1:
        inner = call_of(value["tool_call"], tools)
        return (inner[0], inner[1], "keyed_wrapper") if inner else None
    for key in ALIASES:
        if name is None and isinstance(value.get(key), str) and value[key] in tools:
            found = _named_call(value[key], {other: value[other] for other in value if other != key}, tools[value[key]])
            return (found[0], found[1], "alias_key") if found else None
    return None


def _named_call(name: str, rest: dict[str, Any], tool: Tool) -> tuple[str, dict[str, Any], str] | None:
    for key in _ARGUMENT_KEYS:
        if key not in rest or (key in properties_of(tool) and key != "arguments"):
            continue
        arguments = rest[key]
        if isinstance(arguments, str):
            arguments = loose_json(arguments)[0]
        if isinstance(arguments, dict):
            return name, arguments, "" if key == "arguments" else "alias_key"
        return None
    extra = {key: value for key, value in rest.items() if key in properties_of(tool) or key not in ("id", "type")}
    if not extra and required_of(tool):
        return None
    return name, extra, "flat" if extra else ""


def _inferred_call(value: dict[str, Any], tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any], str] | None:
    drift = "no_name"
    for _ in range(4):
        tool = infer_tool(value, tools)
        if tool is not None:
            return tool.name, value, drift
        inner = next(iter(value.values())) if len(value) == 1 and next(iter(value)) in _SHELLS else None
        if not isinstance(inner, dict):
            return None
        value, drift = inner, "no_name_shelled"
    return None
