"""Tools of a Responses request: which ones the model is told of, and how a call of it is named to the client.

    declared                       the model sees                      a call goes back as
    function                       the function                        function_call
    custom (free text, apply_patch)  a function of one string, `input`   custom_tool_call, `input` raw
    namespace                      its functions, as NAMESPACE__NAME   function_call with `namespace`
    anything else (web_search...)  nothing; one log line               never

`Tool.wire` is (kind, the client's name, namespace).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from q27app.chat.types import Tool, ToolChoice
from q27app.daemon import fields
from q27app.errors import BadRequest

log = logging.getLogger("q27app.daemon")

INPUT = "input"
MAX_FORMAT_CHARS = 16_384
_KINDS = ("function", "custom")


def tools_of(body: fields.Object) -> tuple[Tool, ...]:
    """The tools that the model is told of. Raises BadRequest for names that are no strings, or ambiguous."""
    found: list[Tool] = []
    skipped: list[str] = []
    _add(fields.declared_tools(body), "tools", "", found, skipped)
    if len(found) > fields.MAX_TOOLS:
        raise BadRequest(f"tools: {len(found)} functions, at most {fields.MAX_TOOLS} are allowed.", param="tools")
    names: set[str] = set()
    for tool in found:
        if tool.name in names:
            raise BadRequest(f"tools: the name {tool.name[:80]!r} is declared more than once.", param="tools")
        names.add(tool.name)
    if skipped:
        log.info("tools of kinds that no local model can use are skipped: %s", ", ".join(skipped[:16]))
    return tuple(found)


def _add(entries: Sequence[Any], where: str, namespace: str, found: list[Tool], skipped: list[str]) -> None:
    for index, raw in enumerate(entries):
        place = f"{where}[{index}]"
        if not isinstance(raw, dict):
            raise BadRequest(f"{place}: expected an object, found {fields.kind_of(raw)}.", param=place)
        kind = _text(raw, "type", place) or "function"
        if kind == "namespace" and not namespace:
            inner = raw.get("tools")
            _add(inner if isinstance(inner, list) else [], f"{place}.tools", _text(raw, "name", place), found, skipped)
        elif kind in _KINDS:
            tool = _tool(kind, raw, place, namespace)
            if tool is not None:
                found.append(tool)
        else:
            skipped.append(kind[:40])


def _text(raw: fields.Object, key: str, place: str) -> str:
    value = raw.get(key)
    if not isinstance(value, (str, type(None))):
        raise BadRequest(f"{place}.{key} must be a string, found {fields.kind_of(value)}.", param=f"{place}.{key}")
    return value or ""


def _tool(kind: str, raw: fields.Object, place: str, namespace: str) -> Tool | None:
    function = fields.mapping(raw, "function") or raw
    name, description = _text(function, "name", place), _text(function, "description", place)
    if not name:
        return None
    if kind == "custom":
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": "The whole input, as plain text."}},
            "required": [INPUT],
        }
        description += _grammar(raw)
    else:
        parameters = dict(fields.mapping(function, "parameters"))
        fields.check_schema(parameters, f"{place}.parameters")
    shown = joined_name(namespace, name)
    declared = {"name": shown, "description": description, "parameters": parameters}
    return Tool(shown, description, parameters, {"type": "function", "function": declared}, (kind, name, namespace))


def _grammar(raw: fields.Object) -> str:
    """What a free-text tool says of its input's form, as a part of its description."""
    form = fields.mapping(raw, "format")
    definition = fields.string(form, "definition")
    if not definition or len(definition) > MAX_FORMAT_CHARS:
        return ""
    return f"\n\nThe input follows this grammar ({fields.string(form, 'syntax') or 'grammar'}):\n{definition}"


def joined_name(namespace: str, name: str) -> str:
    """A namespaced function's name as the model writes it."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}" if namespace else name


def tool_choice_of(body: fields.Object, tools: tuple[Tool, ...]) -> ToolChoice:
    """The choice; one that names a skipped tool is dropped. Raises BadRequest for shapes that nobody sends on purpose."""
    serial = body.get("parallel_tool_calls")
    if not isinstance(serial, (bool, type(None))):
        raise BadRequest("parallel_tool_calls: expected a boolean.", param="parallel_tool_calls")
    parallel = serial is not False
    raw = body.get("tool_choice")
    if raw is None or raw in ("auto", "none", "required"):
        mode = raw or "auto"
        return ToolChoice("none" if mode == "required" and not tools else mode, (), parallel)
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(
            "tool_choice: expected auto, none, required, or an object with a type.", param="tool_choice"
        )
    if kind == "allowed_tools":
        return _allowed(raw, tools, parallel)
    names = _named(raw, tools)
    return ToolChoice("required", names, parallel) if names else ToolChoice("auto", (), parallel)


def _allowed(raw: fields.Object, tools: tuple[Tool, ...], parallel: bool) -> ToolChoice:
    inner = fields.mapping(raw, "allowed_tools") or raw
    entries, mode = inner.get("tools"), inner.get("mode")
    if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
        raise BadRequest(
            "tool_choice: allowed_tools needs a mode (auto or required) and a list of tools.", param="tool_choice"
        )
    names = tuple(name for entry in entries if isinstance(entry, dict) for name in _named(entry, tools))
    return ToolChoice(mode, names, parallel) if names else ToolChoice("none", (), parallel)


def _named(entry: fields.Object, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """The model's names of what an entry {type, name, namespace} means; () for a skipped kind.

    Raises BadRequest for a function or custom tool that was not declared.
    """
    kind = entry.get("type")
    if kind not in _KINDS:
        return ()
    name = fields.string(entry, "name") or fields.string(fields.mapping(entry, "function"), "name") or ""
    namespace = fields.string(entry, "namespace") or ""
    found = tuple(tool.name for tool in tools if tool.wire == (kind, name, namespace))
    if not found:
        raise BadRequest(f"tool_choice: tools declares no {kind} {name[:80]!r}.", param="tool_choice")
    return found
