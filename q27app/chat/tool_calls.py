"""The body of a tool call -> calls, for the well-formed shapes of both dialects. Nothing is repaired here.

    json   {"name": "N", "arguments": {..}}, also several in a row; arguments may be absent, or a string of JSON
    xml    <function=N> with <parameter=K> blocks </function>, also several in a row

A body that is none of these gives None. bare_calls.py, with tool_repair.py's known deviations, takes over there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from q27app.chat.tool_body import BodyScanner
from q27app.chat.types import Tool

MAX_DEPTH = 256


@dataclass(frozen=True)
class FoundCall:
    """A call in a body. raw: its source text. is_typed: False if all arguments are strings as written (xml).

    drift: the deviation (tool_repair.py) that it was read by, "" for a well-formed one in its wrapper.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    is_typed: bool = True
    has_arguments: bool = True
    drift: str = ""


def parse_body(body: str, is_closed: bool = True) -> list[FoundCall | str] | None:
    """Calls in order, and what else stands between and after them as text; None if the body is no call.

    is_closed: False if the generation ended before the closer. Whole calls count then as well, a started one is left
    as text.
    """
    head = body.lstrip()
    if head.startswith("{"):
        return parse_json_calls(body)
    if head.startswith("<function="):
        return parse_xml_calls(body, is_closed)
    return None


# ---------------------------------------------------------------------- json


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LOOSE_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def parse_json(text: str, strict: bool = True) -> Any:
    """A JSON value within bounds. strict: no control characters in strings. Raises ValueError for anything else."""
    value, end = _decode(text, len(text) - len(text.lstrip(" \t\r\n")), _DECODER if strict else _LOOSE_DECODER)
    if text[end:].strip():
        raise ValueError("text after the value")
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """(value, its end) at `start`; line breaks in strings are read. Raises ValueError."""
    return _decode(text, start, _LOOSE_DECODER)


def _decode(text: str, start: int, decoder: json.JSONDecoder = _DECODER) -> tuple[Any, int]:
    try:
        value, end = decoder.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _depth_over(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value, end


def _depth_over(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner for outer in level if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def parse_json_calls(body: str) -> list[FoundCall | str] | None:
    """Objects with a name, one after the other; text after the last one stays text."""
    found: list[FoundCall | str] = []
    position = 0
    while True:
        position += len(body[position:]) - len(body[position:].lstrip())
        if not body.startswith("{", position):
            break
        try:
            value, end = _decode(body, position)
            call = _json_call(value, body[position:end])
        except ValueError:
            break
        found.append(call)
        position = end
    if not found:
        return None
    if body[position:].strip():
        found.append(body[position:])
    return found


def _json_call(value: Any, raw: str) -> FoundCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return FoundCall(name, arguments, raw, has_arguments="arguments" in value)


# ---------------------------------------------------------------------- xml


def parse_xml_calls(body: str, is_closed: bool = True) -> list[FoundCall | str] | None:
    """Function blocks, one after the other; text between and after them stays text."""
    scanner = BodyScanner()
    scanner.feed(body)
    if scanner.kind != "xml" or scanner.is_malformed or (is_closed and not scanner.is_complete):
        return None
    found: list[FoundCall | str] = []
    position = 0
    for function in scanner.functions:
        if function.end < 0:
            break
        if body[position : function.start].strip():
            found.append(body[position : function.start])
        arguments = {key.strip(): unwrapped_value(body[start:end]) for key, start, end in function.values}
        raw = body[function.start : function.end]
        found.append(FoundCall(function.name.strip(), arguments, raw, is_typed=False))
        position = function.end
    if not found:
        return None
    if body[position:].strip():
        found.append(body[position:])
    return found


def unwrapped_value(text: str) -> str:
    """A value without the line break after its opener and the one before its closer."""
    if text.startswith("\r\n"):
        text = text[2:]
    elif text.startswith("\n"):
        text = text[1:]
    if text.endswith("\r\n"):
        return text[:-2]
    return text[:-1] if text.endswith("\n") else text


def typed_arguments(arguments: Mapping[str, str], tool: Tool) -> dict[str, Any]:
    """Values as the tool's schema types them: a string stays the string it is."""
    properties = tool.parameters.get("properties") if isinstance(tool.parameters, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    return {key: typed_value(text, properties.get(key), tool.parameters) for key, text in arguments.items()}


def typed_value(text: str, schema: Any, root: Any) -> Any:
    """One value. Without a type in the schema: what the text is as JSON, unless that is a string; else the text."""
    kinds = schema_types(schema, root)
    if kinds and kinds <= {"string"}:
        return text
    word = text.strip()
    if "boolean" in kinds and word in ("True", "False"):
        return word == "True"
    if "null" in kinds and word == "None":
        return None
    try:
        value = parse_json(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text if "string" in kinds or not kinds else value
    if kinds and not _fits(value, kinds):
        return text if "string" in kinds else value
    return value


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    names = {int: {"integer", "number"}, float: {"number", "integer"}, dict: {"object"}, list: {"array"}}
    return bool(kinds & names.get(type(value), {"null"}))


def schema_types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows, as far as it says; empty if it does not. Follows references inside `root`."""
    if not isinstance(schema, dict) or depth > 16:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for name in reference[2:].split("/"):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return schema_types(target, root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset([kinds])
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            found = [schema_types(option, root, depth + 1) for option in options[:64]]
            return frozenset().union(*found) if all(found) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(["string"])
    return frozenset()
