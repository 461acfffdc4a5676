"""JSON calls that are broken up to the end of the answer: values with raw quotes, closing braces that are missing.

Tried in this order, only for a call that names an offered tool:

    content tag    "key": "..</content>, ..}    the tag ends the value          unless a limit ended the answer
    open braces    "key": "value"               the braces are put in           only if the model ended by itself
    raw quotes     "key": "a "b" c", ..}        inner quotes are escaped        only if the model ended by itself

What results must have the tool's required parameters and only declared ones. A value that has no end of its own is never
given one: half a value would be run as if it were whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from q27app.chat.tool_calls import FoundCall, parse_json_at, schema_types
from q27app.chat.tool_json import JsonHead
from q27app.chat.tool_repair import CUT, ENDED, WRONG_CONTROLS, call_of, properties_of, required_of
from q27app.chat.types import Tool

MAX_WORK = 4 << 20
"""Characters that are looked at for raw quotes, over all attempts."""

_CONTENT_END = re.compile(r"</content>(?=\s*[,}])")
_FILE_END = re.compile(r"</file>\s*\Z")
_QUOTE_END = re.compile(r'"(?=\s*[,}])')
_STRUCTURE = re.compile(r'\\[\s\S]?|["{}\[\]]')
_LONE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|"|[\x00-\x1f]')
_OPENERS = {"{": "}", "[": "]"}
_NEAR_END = 6
"""Characters of the longest thing that a cut leaves without an end, beside strings: an escape."""


def read_tail(head: JsonHead, source: str, tools: Mapping[str, Tool], how: str) -> tuple[FoundCall, int] | None:
    """(call, where it ends in the source); None if nothing certain comes of it."""
    if head.tool not in tools or how == CUT:
        return None
    tool, text = tools[head.tool], head.prefix + source[head.begin :]
    if WRONG_CONTROLS.search(text):
        return None
    shift = head.begin - len(head.prefix)
    attempts = [_content_tag]
    if how == ENDED:
        attempts = [_closed_at_end] if head.kind != "call" else [_content_tag, _closed_at_end, _raw_quotes]
    for attempt in attempts:
        found = attempt(text, tool, tools)
        if found is not None:
            arguments, end, drift = found
            end = min(len(source), end + shift)
            return FoundCall(tool.name, arguments, source[:end], drift=head.drift or drift), end
    return None


_Found = tuple[dict[str, Any], int, str]


def _checked(text: str, tool: Tool, tools: Mapping[str, Tool]) -> tuple[dict[str, Any], int] | None:
    """(arguments, end) of the object at the start of `text`, if it calls `tool` and fits its declaration."""
    try:
        value, end = parse_json_at(text, 0)
    except ValueError:
        return None
    call = call_of(value, tools)
    if call is None or call[0] != tool.name or not isinstance(value.get("arguments", {}), dict):
        return None
    arguments = call[1]
    if not required_of(tool) <= arguments.keys() or not arguments.keys() <= properties_of(tool).keys():
        return None
    return arguments, end


def _string_values(text: str, tool: Tool) -> Iterator[int]:
    """Where the values of the tool's string parameters begin, after their quote."""
    for key, schema in list(properties_of(tool).items())[:64]:
        if schema_types(schema, tool.parameters) - {"string"}:
            continue
        for match in re.finditer(re.escape(json.dumps(key)) + r'\s*:\s*"', text):
            yield match.end()
            break


def _content_tag(text: str, tool: Tool, tools: Mapping[str, Tool]) -> _Found | None:
    ends = list(_CONTENT_END.finditer(text))
    if not ends:
        return None
    last = ends[-1]
    for start in sorted(_string_values(text[: last.start()], tool), reverse=True):
        value = json.dumps(text[start : last.start()], ensure_ascii=False)
        found = _checked(text[: start - 1] + value + text[last.end() :], tool, tools)
        if found is not None:
            return found[0], found[1] - len(value) + last.end() - start + 1, "content_tags"
    return None


def _closed_at_end(text: str, tool: Tool, tools: Mapping[str, Tool]) -> _Found | None:
    """Only the braces of the arguments and of the call may be missing, right after a value that has an end of its own."""
    body = _FILE_END.sub("", text).rstrip()
    if not body.endswith(('"', "}", "]")):
        return None
    frames: list[str] = []
    in_string = False
    for match in _STRUCTURE.finditer(body):
        char = match.group()
        if char == '"':
            in_string = not in_string
        elif in_string or len(char) > 1 or char == "\\":
            continue
        elif char in _OPENERS:
            frames.append(_OPENERS[char])
        elif not frames or frames.pop() != char:
            return None
    if in_string or not 1 <= len(frames) <= 2 or "]" in frames:
        return None
    found = _checked(body + "".join(reversed(frames)), tool, tools)
    return (found[0], len(text), "cut_json") if found else None


def is_cut_json(text: str) -> bool:
    """Whether a text would be JSON if only it went on: nothing in it is wrong before its end."""
    try:
        json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip()) - _NEAR_END or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _raw_quotes(text: str, tool: Tool, tools: Mapping[str, Tool]) -> _Found | None:
    work = 0
    for start in _string_values(text, tool):
        for match in _QUOTE_END.finditer(text, start):
            work += len(text)
            if work > MAX_WORK:
                return None
            body = _LONE.sub(_escaped, text[start : match.start()])
            found = _checked(text[:start] + body + text[match.start() :], tool, tools)
            if found is not None:
                return found[0], found[1] - (len(body) - (match.start() - start)), "raw_quotes"
    return None


def _escaped(match: re.Match[str]) -> str:
    """A valid escape stays; a bare quote, backslash or control character is written as JSON writes it."""
    word = match.group()
    return word if len(word) > 1 else json.dumps(word)[1:-1]
