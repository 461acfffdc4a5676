"""Calls in tags outside the one proper form: where one ends, found while it arrives, and what it says.

    opener                                   the tool is
    <function=N>, <function name="N">        N; a placeholder takes the next line
    <tool_name>N</tool_name>, <name>N        N
    <tool_name> without a name               told by the keys
    <parameter=N> before another opener      N
    <parameter=key>, closed by </function>   told by the keys
    {"name": "N", <parameter=..>, {"function=N>   N

Values may hold anything. A value ends at a `</parameter>` after which only tags come; calls and parameters that begin
a line inside it are counted, so that it may quote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from q27app.chat.tool_calls import FoundCall, parse_json, schema_types, typed_value, unwrapped_value
from q27app.chat.tool_json import MAX_LOOSE_UNIT, MAX_UNIT, JsonHead, NeedsMore, json_head
from q27app.chat.tool_repair import CLOSED, CUT, declared_name, infer_tool, properties_of, required_of
from q27app.chat.types import Tool

_PLACEHOLDERS = ("name", "tool_name", "function")
_WRAPPER = re.compile(r"(?:<tool_calls>|<tool>)[ \t\r\n]*")
_FUNCTION = re.compile(r"<function(?:[ \t]+name)?[ \t]*=[ \t]*([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"<parameter(?:[ \t]+name)?[ \t]*=[ \t]*([^<>\n]{0,256})>")
_PROPER = re.compile(r"<function=[^<>\n\"'\s]+>")
_PSEUDO_JSON = re.compile(r"""<name(?:>|=)\s*"?([^"<>,\n]{1,256})"?\s*,\s*"arguments"\s*:\s*(?=\{)""")
_PSEUDO_START = re.compile(r"""<name(?:>|=)\s*"?[^"<>,\n]{0,256}"?\s*(?:,[^<>{]{0,64})?""")
_WORDS = "tool_calls?|tools?|tool_name|function|parameter|name|result|output"
_TAG = re.compile(rf"<(?P<close>/)?(?P<word>{_WORDS})(?:[ \t=][^<>\n]{{0,256}})?>|\n")
_TAG_START = re.compile(r"</?[a-z_]{0,10}(?:[ \t=][^<>\n]{0,256})?")
_CLOSERS = ("</function>", "</tool_call>")


@dataclass(frozen=True)
class XmlHead:
    """kind: "function" | "tool_name" | "name" | "parameter" | "json". name: "" if none is written. begin: where the
    scan starts. is_known: False if the written name is no offered tool."""

    kind: str
    begin: int
    name: str = ""
    is_known: bool = True
    drift: str = ""


def xml_head(text: str, tools: Mapping[str, Tool], is_line_start: bool) -> XmlHead | JsonHead | None:
    """The head at the start of `text`, where a tag stands; None if there is none. Raises NeedsMore."""
    at = 0
    for _ in range(2):
        wrapper = _WRAPPER.match(text, at)
        at = wrapper.end() if wrapper else at
    if at and at == len(text):
        raise NeedsMore
    if text.startswith("<name", at):
        return _name_head(text, at, tools) if is_line_start else None
    if text[at : at + 1] != "<":
        return None
    end = text.find(">", at)
    if end < 0:
        if "\n" in text[at:] or len(text) - at > 300 or not _TAG_START.fullmatch(text, at):
            return None
        raise NeedsMore
    tag, after = text[at : end + 1], end + 1
    if tag == "<function>":
        return _function_json(text, after, tools)
    if tag == "<tool_name>":
        return _tool_name_head(text, after, tools)
    function = _FUNCTION.fullmatch(tag)
    if function:
        drift = "bare_function" if _PROPER.fullmatch(tag) else "spelling"
        return _function_head(text, after, function[1], drift, tools)
    if _PARAMETER.fullmatch(tag) and (is_line_start or at):
        return XmlHead("parameter", at, drift="no_opener")
    return None


def _blanks(text: str, at: int) -> int:
    end = len(text) - len(text[at:].lstrip())
    if end >= len(text):
        raise NeedsMore
    return end


def _function_json(text: str, at: int, tools: Mapping[str, Tool]) -> JsonHead | None:
    at = _blanks(text, at)
    head = json_head(text, tools, at) if text[at] == "{" else None
    if head is None or head.kind == "xml":
        return None
    return JsonHead(head.kind, head.begin, head.prefix, head.depth, head.tool, head.drift or "json_in_function")


def _function_head(text: str, at: int, written: str, drift: str, tools: Mapping[str, Tool]) -> XmlHead:
    name = declared_name(written, tools)
    if name is None and written.strip().strip("\"'").lower() in _PLACEHOLDERS:
        start = _blanks(text, at)
        line = re.compile(r"[^\n<]{1,256}").match(text, start)
        if line and line.end() == len(text):
            raise NeedsMore
        name = declared_name(line.group(), tools) if line else None
        at = line.end() if line and name else at
    return XmlHead("function", at, name or "", name is not None, drift)


def _tool_name_head(text: str, at: int, tools: Mapping[str, Tool]) -> XmlHead | None:
    end = text.find("<", at)
    if end < 0:
        raise NeedsMore
    written = text[at:end].strip()
    closer = "</tool_name>"
    if len(text) - end < len(closer) and closer.startswith(text[end:]):
        raise NeedsMore
    end += len(closer) if text.startswith(closer, end) else 0
    if not written:
        return XmlHead("tool_name", end, drift="nameless")
    name = declared_name(written, tools)
    return XmlHead("tool_name", end, name or "", name is not None, "tool_name")


def _name_head(text: str, at: int, tools: Mapping[str, Tool]) -> XmlHead | JsonHead | None:
    pseudo = _PSEUDO_JSON.match(text, at)
    if pseudo:
        name = declared_name(pseudo[1], tools)
        prefix = f'{{"name": "{name}", "arguments": '
        return JsonHead("call", pseudo.end(), prefix, 1, name, "pseudo_tag") if name else None
    if _PSEUDO_START.fullmatch(text, at):
        raise NeedsMore
    if not text.startswith("<name>", at):
        return None
    start = _blanks(text, at + 6)
    line = re.compile(r"[^\n<]{1,256}").match(text, start)
    if line is None:
        return None
    if line.end() == len(text):
        raise NeedsMore
    end, name = line.end(), declared_name(line.group(), tools)
    if text[end] == "<" and "</name>".startswith(text[end : end + 7]):
        if len(text) - end < 7:
            raise NeedsMore
        end += 7
    return XmlHead("name", end, name, drift="name_tag") if name else None


@dataclass(frozen=True)
class Value:
    """Offsets into the source, between the tags. is_closed: it has its own `</parameter>`."""

    key: str
    start: int
    end: int
    is_closed: bool = True


class XmlUnit:
    """Scans one call from its head on. `end`: where it ends in the source, or None so far.

    is_closed: its `</function>` came. is_half: the text ended in a value, or in a tag that would have begun one.
    phase: "head" | "value" | "after" a value.
    """

    def __init__(self, head: XmlHead) -> None:
        self.head = head
        self.end: int | None = None
        self.is_closed = self.is_malformed = self.is_half = self.has_result = self.is_too_long = False
        self.phase = "head"
        self.values: list[Value] = []
        self.lead: str | None = None
        self.open: tuple[str, int] = ("", 0)
        self.function_end = -1
        self.nested_keys: list[str] = []
        self.base = head.begin
        self._window = ""
        self._value_end = self._value_after = -1
        self._wraps = self._functions = self._parameters = 0
        self._gap_blank, self._line_blank = True, False
        self._last = ""
        self._max = MAX_UNIT if head.name and head.is_known else MAX_LOOSE_UNIT

    def feed(self, text: str) -> None:
        """More of the source, from the head's `begin` on."""
        self._window += text
        position = 0
        for match in _TAG.finditer(self._window):
            if self.base + match.end() > self._max:
                break
            start, end = self.base + match.start(), self.base + match.end()
            if self._gap(position, match.start()) or self._tag(match, start, end):
                return
            position = match.end()
        if self.base + len(self._window) >= self._max:
            self.end, self.is_too_long = self._max, True
            return
        start = self._window.rfind("<", max(position, len(self._window) - 280))
        hold = start if start >= 0 and _TAG_START.fullmatch(self._window, start) else len(self._window)
        if not self._gap(position, hold):
            self.base += hold
            self._window = self._window[hold:]

    def _gap(self, start: int, end: int) -> bool:
        if not self._window[start:end].strip():
            return False
        self._gap_blank = self._line_blank = False
        if self.phase == "after":
            if self._last == "blank line" and self.head.kind != "function":
                return self._ends(self._value_after)
            self.phase = "value"
        elif self.phase == "head" and self.head.kind != "tool_name":
            self.is_malformed = True
        return False

    def _ends(self, end: int) -> bool:
        self.end = end
        return True

    def _tag(self, match: re.Match[str], start: int, end: int) -> bool:
        if match.group() == "\n":
            is_blank, self._line_blank = self._line_blank, True
            if is_blank and self.phase == "after":
                self._last = "blank line"
            return is_blank and self.phase == "head" and self.is_malformed and self._ends(start)
        word, is_close = match["word"], bool(match["close"])
        self.has_result = self.has_result or word in ("result", "output")
        step = self._in_value if self.phase == "value" else self._outside
        if step(word, is_close, match.group(), start, end):
            return True
        self._gap_blank, self._line_blank = True, False
        self._last = match.group()
        return False

    def _outside(self, word: str, is_close: bool, tag: str, start: int, end: int) -> bool:
        """A tag before the first value or between values."""
        if word == "parameter" and not is_close:
            key = _PARAMETER.fullmatch(tag)
            self._end_value()
            self.phase, self.open = "value", (key[1].strip().strip("\"'").strip() if key else "", end)
            self._value_end = self._value_after = self.function_end = -1
            self._wraps = self._functions = self._parameters = 0
        elif word == "parameter":
            if self.phase == "after":
                self._value_end, self._value_after = start, end
        elif word == "function" and is_close:
            self._end_value()
            self.phase, self.is_closed = "head", True
            return self._ends(end)
        elif word not in ("result", "output", "name") or (word == "name" and not is_close):
            return self._ends(start)
        return False

    def _end_value(self) -> None:
        if self.phase == "after":
            self.values.append(Value(*self.open, self._value_end))

    def _in_value(self, word: str, is_close: bool, tag: str, start: int, end: int) -> bool:
        is_first = self.head.kind == "parameter" and not self.values and self.lead is None
        is_first = is_first and self._gap_blank and self._last.startswith("<parameter")
        if word == "parameter" and not is_close and is_first:
            self.lead, self.phase = self.open[0], "head"
            return self._outside(word, is_close, tag, start, end)
        if word == "tool_call":
            if not is_close:
                self._wraps += self._line_blank
            elif self._wraps:
                self._wraps -= 1
            elif self._last == "</function>" and self._gap_blank:
                return self._ends(start)
        elif self._wraps:
            pass
        elif word == "parameter" and not is_close:
            if self._line_blank:
                key = _PARAMETER.fullmatch(tag)
                self.nested_keys += [key[1].strip().strip("\"'")] if key and len(self.nested_keys) < 64 else []
                self._parameters += 1
        elif word == "parameter":
            if self._parameters:
                self._parameters -= 1
            else:
                self.phase, self._value_end, self._value_after = "after", start, end
        elif word == "function" and not is_close and self._line_blank:
            if self.function_end >= 0:
                return self._ends(start)
            self._functions += 1
        elif word == "function" and is_close:
            if self._functions:
                self._functions -= 1
            else:
                self.function_end = end
        elif word == "tool_name" and not is_close and self._line_blank and self.head.kind == "tool_name":
            return self._ends(start)
        return False

    def finish(self, source: str, how: str) -> None:
        """The text ends at the unit's end (known by now or not): settles the last value."""
        end = self.end if self.end is not None else len(source)
        self.end = end
        if self.phase == "after":
            self._end_value()
            rest, self.end = source[self._value_after : end].strip(), self._value_after
            is_closer = len(rest) > 1 and any(closer.startswith(rest) for closer in _CLOSERS)
            self.is_half = not is_closer and _TAG_START.fullmatch(rest) is not None
            self.is_malformed = self.is_malformed or self.is_half
        if self.phase != "value":
            return
        body = source[: self.function_end] if self.function_end >= 0 else source[:end]
        if self._value_end >= 0 and source[self._value_after : self._value_after + 2].lstrip("\r").startswith("\n"):
            self.is_malformed = self.is_malformed or self.head.kind == "function"
            self.values.append(Value(*self.open, self._value_end))
            self.end = self._value_after
        elif self.function_end >= 0:
            value_end = body.rfind("</function>")
            self.values.append(Value(*self.open, value_end, is_closed=False))
            self.end, self.is_closed = self.function_end, True
        elif self.head.kind == "tool_name":
            self.values.append(Value(*self.open, end, is_closed=False))
            self.is_half = how != CLOSED
        else:
            self.is_malformed = self.is_half = True


# ---------------------------------------------------------------------- what it says


def read_xml(unit: XmlUnit, source: str, tools: Mapping[str, Tool], how: str, is_wrapped: bool) -> FoundCall | None:
    """The call in a finished unit. how: as what the text after it began, or why there is none. None: it is none."""
    head = unit.head
    is_suspect = unit.has_result and not (is_wrapped and head.kind == "function")
    if unit.is_malformed or unit.is_too_long or is_suspect or not head.is_known or (how == CUT and not unit.is_closed):
        return None
    if not all(value.key for value in unit.values):
        return None
    texts = {value.key: unwrapped_value(source[value.start : value.end]) for value in unit.values}
    tool, drift = _tool(unit, texts, tools)
    if tool is None:
        return None
    arguments = _arguments(texts, tool, unit, is_trimmed=head.kind == "tool_name")
    if arguments is None:
        return None
    is_open = bool(unit.values) and not unit.values[-1].is_closed
    if is_open:
        nested = set(unit.nested_keys) & properties_of(tool).keys()
        whole = "arguments" in texts and head.kind == "tool_name"
        if nested or not required_of(tool) <= arguments.keys() or not (whole or unit.is_closed or how == CLOSED):
            return None
        drift = "open_value" if head.kind == "function" else drift
    elif head.kind == "function" and not unit.is_closed:
        drift = "open_function"
    return FoundCall(tool.name, arguments, source[: unit.end], drift=drift)


def _tool(unit: XmlUnit, texts: dict[str, str], tools: Mapping[str, Tool]) -> tuple[Tool | None, str]:
    head = unit.head
    if head.kind == "parameter" and unit.lead is not None:
        name = declared_name(unit.lead, tools)
        return (tools[name], "name_parameter") if name and texts else (None, "")
    if head.name:
        has_evidence = bool(texts) or (unit.is_closed and head.kind != "tool_name")
        return (tools[head.name], head.drift) if has_evidence else (None, "")
    if head.kind == "parameter" and not unit.is_closed:
        return None, ""
    declared = {key for tool in tools.values() for key in properties_of(tool)}
    if "name" in texts and ("name" not in declared or declared_name(texts["name"], tools)):
        spoken = declared_name(texts.pop("name"), tools)
        return (tools[spoken] if spoken else None), head.drift
    return infer_tool(texts, tools), head.drift


def _arguments(texts: dict[str, str], tool: Tool, unit: XmlUnit, is_trimmed: bool) -> dict[str, object] | None:
    """Values by their schema; an object under `arguments` is merged in. None if that object is broken."""
    result: dict[str, object] = {}
    for key, text in texts.items():
        schema = properties_of(tool).get(key)
        if key == "arguments" and schema is None:
            inner = _object(text)
            if inner is None:
                return None
            result.update(inner)
            continue
        text = text.strip() if is_trimmed else text
        value = typed_value(text, schema, tool.parameters)
        kinds = schema_types(schema, tool.parameters)
        if value is text and kinds and "string" not in kinds and text.rstrip().endswith("}"):
            value = typed_value(text.rstrip()[:-1], schema, tool.parameters)
        result[key] = value
    return result


def _object(text: str) -> dict[str, object] | None:
    """The JSON object in a text, which may have up to four braces too many."""
    text = text.strip()
    for _ in range(5):
        try:
            value = parse_json(text, strict=False)
            return value if isinstance(value, dict) else None
        except ValueError:
            text = text.removesuffix("}").rstrip()
    return None
