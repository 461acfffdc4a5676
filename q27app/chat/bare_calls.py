"""One thing in an answer's text that may be a call without its wrapper: held from its first character until it is a
call, or is known to be none.

What begins one (positions that are only shown are left out by the splitter):

    {           whose first key names a call, an offered tool or an object that may be one
    <function   with a name or JSON; <tool_name>; <name> and <parameter= at the start of a line; <tool_calls>, <tool>
    SHELL", "   an offered tool's name as if its head had been lost

Where it ends depends on the text alone, not on how it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from q27app.chat.tool_calls import FoundCall
from q27app.chat.tool_json import BrokenJson, JsonHead, JsonUnit, NeedsMore, json_head, read_json
from q27app.chat.tool_json_tail import is_cut_json, read_tail
from q27app.chat.tool_repair import CLOSED, CUT, ENDED
from q27app.chat.tool_xml import XmlHead, XmlUnit, read_xml, xml_head
from q27app.chat.types import Tool

MAX_HEAD = 512
NO_HEAD = "no_head"
INFERRED = frozenset(["no_name", "no_name_shelled", "nameless", "no_opener"])
"""Drifts whose tool is told by its keys."""


@dataclass(frozen=True)
class Outcome:
    """source: what the unit is made of; rest: what came after it and is text to look at.

    call: None if it is no call. is_started: it looked like one, so that it is recorded. names_unknown: it names a tool
    that is not offered. is_half: the text ended inside it.
    """

    source: str
    rest: str
    call: FoundCall | None = None
    is_started: bool = False
    names_unknown: bool = False
    is_half: bool = False


class BareUnit:
    """One candidate, from its first character on. tool: its name, where that is the beginning. is_wrapped: it stands
    in the body of a wrapper, which says that a call is meant."""

    def __init__(self, tools: Mapping[str, Tool], is_line_start: bool, is_wrapped: bool, tool: str = "") -> None:
        self.tool = tool
        self._tools = tools
        self._is_line_start = is_line_start
        self._is_wrapped = is_wrapped
        self._parts: list[str] = []
        self._unit: JsonUnit | XmlUnit | None = None

    def feed(self, text: str) -> Outcome | None:
        """More text; the outcome as soon as it is known."""
        self._parts.append(text)
        if self._unit is not None:
            self._unit.feed(text)
        else:
            source = "".join(self._parts)
            self._parts = [source]
            try:
                head = self._head(source[:MAX_HEAD])
            except NeedsMore:
                return None if len(source) < MAX_HEAD else Outcome(source[:1], source[1:])
            if head is None:
                return Outcome(source[:1], source[1:])
            self._unit = JsonUnit(head) if isinstance(head, JsonHead) else XmlUnit(head)
            self._unit.feed(source[head.begin :])
        return self._ended() if self._unit.end is not None else None

    def finish(self, how: str) -> Outcome:
        """The text ends here. how: CLOSED, ENDED or CUT."""
        source, unit = "".join(self._parts), self._unit
        if unit is None:
            return Outcome(source[:1], source[1:])
        if isinstance(unit, XmlUnit):
            return self._xml(unit, source, how)
        unit.finish()
        if unit.status == "inner":
            return self._json(unit, source, is_allowed=how != CUT or unit.head.kind == "wrapper")
        how = CLOSED if self._is_wrapped and how == ENDED else how
        found = read_tail(unit.head, source, self._tools, how)
        if found is None:
            text = unit.head.prefix + source[unit.head.begin :]
            return Outcome(source, "", is_started=bool(unit.head.tool), is_half=bool(unit.head.tool) and is_cut_json(text))
        call, end = found
        return Outcome(source[:end], source[end:], call, is_started=True)

    def _head(self, text: str) -> JsonHead | XmlHead | None:
        if self.tool:
            return JsonHead("headless", len(self.tool) + 3, f'{{"name": "{self.tool}", ', 1, self.tool, NO_HEAD)
        head = json_head(text, self._tools) if text[0] == "{" else xml_head(text, self._tools, self._is_line_start)
        if isinstance(head, JsonHead) and head.kind == "xml":
            return XmlHead("json", head.begin, head.tool, drift=head.drift)
        return head

    def _ended(self) -> Outcome | None:
        source, unit = "".join(self._parts), self._unit
        self._parts = [source]
        if isinstance(unit, XmlUnit):
            return self._xml(unit, source, CLOSED)
        assert unit is not None
        try:
            return self._json(unit, source)
        except BrokenJson:
            assert unit.end is not None
            if unit.head.kind != "call" or unit.is_deferred:
                return Outcome(source[: unit.end], source[unit.end :], is_started=bool(unit.head.tool))
        unit.defer()
        return self._ended() if unit.end is not None else None

    def _json(self, unit: JsonUnit, source: str, is_allowed: bool = True) -> Outcome:
        assert unit.end is not None
        text, rest = source[: unit.end], source[unit.end :]
        call = None
        if unit.status != "refused" and is_allowed:
            try:
                call = read_json(unit, text, self._tools)
            except BrokenJson:
                if unit.status == "balanced":
                    raise
        return Outcome(text, rest, call, is_started=bool(unit.head.tool))

    def _xml(self, unit: XmlUnit, source: str, how: str) -> Outcome:
        limit = len(source) if unit.end is None else unit.end
        unit.finish(source[:limit], how)
        call = read_xml(unit, source, self._tools, how, self._is_wrapped)
        end = unit.end if call is not None and unit.end is not None else limit
        is_half = how != CLOSED and unit.is_half and bool(unit.head.name)
        has_parts = unit.is_closed or bool(unit.values) or unit.phase != "head"
        is_started = has_parts and (unit.head.kind in ("function", "json") or unit.is_closed or is_half)
        return Outcome(source[:end], source[end:], call, is_started, not unit.head.is_known, is_half)
