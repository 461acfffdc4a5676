"""Calls that begin with a brace, almost well-formed: where one ends, found while it arrives, and what it says.

A head is what tells a call from any other object: `{"name": "SHELL", ..` of an offered tool, `{"function": "SHELL"`,
`{"name": {`, `{"tool_call": {`. What has no such head is let go at the character that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from q27app.chat.tool_calls import FoundCall
from q27app.chat.tool_repair import ALIASES, call_of, loose_json, properties_of
from q27app.chat.types import Tool

MAX_UNIT = 4 << 20
MAX_LOOSE_UNIT = 64 << 10
"""Characters of a call that names its tool, and of one that does not."""

_KEYS = ("name", "tool_call", "arguments", *ALIASES)
_BARE_WORD = re.compile(r"[A-Za-z_][\w.:/-]{0,255}")
_TOKEN = re.compile(r'\\[\s\S]|["{}\[\]\n]|</?(?:parameter|function|tool_calls?|content)\b[^<>\n"{}\[\]\\]{0,64}>')
_TAG_START = re.compile(r'</?[a-z_]{0,12}[^<>\n"{}\[\]\\]{0,64}')


class NeedsMore(Exception):
    """The text so far may become a head."""


class BrokenJson(ValueError):
    """A unit that balances is no JSON."""


@dataclass(frozen=True)
class JsonHead:
    """prefix replaces the first `begin` characters of the source. depth: braces that are open there.

    kind: "call" of `tool` | "alias" | "dangling" `{"name": {` | "wrapper" `{"tool_call": {` | "arguments" first |
    "xml" (parameter tags follow). drift: what the head itself deviates by.
    """

    kind: str
    begin: int
    prefix: str
    depth: int
    tool: str = ""
    drift: str = ""


class _Cursor:
    """Reads a head that may still be incomplete: raises NeedsMore at its end."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def peek(self) -> str:
        """The next character that is no blank."""
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1
        if self.at >= len(self.text):
            raise NeedsMore
        return self.text[self.at]

    def takes(self, word: str) -> bool:
        """Consumes `word` if it comes next."""
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        if word.startswith(self.text[self.at :]):
            raise NeedsMore
        return False

    def one_of(self, words: Mapping[str, Any] | tuple[str, ...], after: str) -> str | None:
        """Consumes the word, directly followed by a character of `after`; None if none of `words` can be it."""
        rest = self.text[self.at : self.at + 300]
        for word in words:
            if rest.startswith(word) and len(rest) > len(word) and rest[len(word)] in after:
                self.at += len(word)
                return word
        if any(word.startswith(rest) for word in words):
            raise NeedsMore
        return None


def json_head(text: str, tools: Mapping[str, Tool], start: int = 0) -> JsonHead | None:
    """The head at `start`, where a `{` stands; None if there is none. Raises NeedsMore."""
    cursor = _Cursor(text, start + 1)
    if cursor.peek() != '"':
        return None
    cursor.at += 1
    if cursor.takes("function="):
        name = cursor.one_of(tools, ">")
        return JsonHead("xml", cursor.at + 1, "", 0, name, "fused_head") if name else None
    key = cursor.one_of(_KEYS, '"')
    if key is None:
        return None
    cursor.at += 1
    if cursor.peek() != ":":
        return None
    cursor.at += 1
    char = cursor.peek()
    if char == "{":
        kind = {"name": "dangling", "tool_call": "wrapper", "arguments": "arguments"}.get(key)
        return JsonHead(kind, cursor.at, f'{{"{key}": ', 1) if kind else None
    if key in ("tool_call", "arguments"):
        return None
    if char != '"':
        return _unquoted_head(cursor, tools) if key == "name" else None
    cursor.at += 1
    name = cursor.one_of(tools, '"')
    if name is None:
        return None
    cursor.at += 1
    if cursor.peek() not in ",}":
        return None
    if key != "name":
        return JsonHead("alias", cursor.at, f'{{"{key}": {json.dumps(name)}', 1, name)
    return _after_name(cursor, name, "")


def _unquoted_head(cursor: _Cursor, tools: Mapping[str, Tool]) -> JsonHead | None:
    name = cursor.one_of(tools, '", \t\r\n')
    if name is None or not _BARE_WORD.fullmatch(name):
        return None
    if cursor.text[cursor.at] == '"':
        cursor.at += 1
    return _after_name(cursor, name, "unquoted_name") if cursor.peek() == "," else None


def _after_name(cursor: _Cursor, name: str, drift: str) -> JsonHead | None:
    """`{"name": "SHELL"` has been read, `,` or `}` follows."""
    prefix = f'{{"name": {json.dumps(name)}'
    if cursor.peek() == "}":
        return JsonHead("call", cursor.at, prefix, 1, name, drift)
    cursor.at += 1
    char = cursor.peek()
    if char == "<":
        return JsonHead("xml", cursor.at, "", 0, name, "json_head") if _begins(cursor, "<parameter") else None
    if char == '"':
        start = cursor.at
        if cursor.takes('"arguments>'):
            is_object = cursor.peek() == "{"
            return JsonHead("call", cursor.at, f'{prefix}, "arguments": ', 1, name, "tag_key") if is_object else None
        return JsonHead("call", start, prefix + ", ", 1, name, drift)
    if cursor.takes('arguments"'):
        return JsonHead("call", cursor.at, f'{prefix}, "arguments"', 1, name, "unquoted_key")
    return None


def _begins(cursor: _Cursor, word: str) -> bool:
    at = cursor.at
    found = cursor.takes(word)
    cursor.at = at
    return found


class JsonUnit:
    """Scans one call from its head on. `end`: where it ends in the source, or None so far.

    status: "balanced" | "residue" (tags follow where braces should) | "inner" (the outer brace is missing) | "open" |
    "refused".
    """

    def __init__(self, head: JsonHead) -> None:
        self.head = head
        self.end: int | None = None
        self.status = "open"
        self.contents: list[tuple[int, int]] = []
        self.is_deferred = False
        self._base = head.begin
        self._window = ""
        self._depth = head.depth
        self._in_string = False
        self._content = -1
        self._content_end = -1
        self._inner_end = -1
        self._last = ""
        self._gap_blank = True
        self._line_blank = False
        self._max = MAX_UNIT if head.tool else MAX_LOOSE_UNIT

    @property
    def depth(self) -> int:
        """Braces that are open."""
        return self._depth

    def feed(self, text: str) -> None:
        """More of the source, from the head's `begin` on."""
        self._window += text
        position = 0
        for match in _TOKEN.finditer(self._window):
            if self._base + match.end() > self._max:
                break
            if self._gap(position, match.start()) or self._token(match.group(), self._base + match.start()):
                return
            position = match.end()
        if self._base + len(self._window) >= self._max:
            return self._finish(self._max, "refused")
        hold = self._hold(position)
        if not self._gap(position, hold):
            self._base += hold
            self._window = self._window[hold:]

    def _hold(self, position: int) -> int:
        """Where a token may begin that the window's end cuts."""
        window = self._window
        if window.endswith("\\") and position < len(window):
            return len(window) - 1
        start = window.rfind("<", max(position, len(window) - 80))
        return start if start >= 0 and _TAG_START.fullmatch(window, start) else len(window)

    def _finish(self, end: int, status: str) -> bool:
        self.end, self.status = end, status
        return True

    def _gap(self, start: int, end: int) -> bool:
        """Notes what stands between two tokens. True if the call ended there."""
        gap = self._window[start:end]
        body = gap.strip()
        if body:
            at = self._base + start + len(gap) - len(gap.lstrip())
            if self._sees(body[0] if body[0] != "<" else "", at):
                return True
            self._gap_blank = self._line_blank = False
            if not self._in_string:
                self._last = body[-1]
        return False

    def _sees(self, char: str, at: int) -> bool:
        """The next character that is no blank, where it decides how an object or a tagged value went on. A `<` is
        one that begins a tag of the dialect."""
        if self._content_end >= 0:
            if char in (",", "}"):
                self.contents.append((self._content, self._content_end))
                self._content = self._content_end = -1
                self._last = '"'
            else:
                self._content_end = -1
        if self._inner_end < 0:
            return False
        if char == "}":
            return self._finish(at + 1, "balanced")
        if char in ("{", "<") or (char != "," and self.head.kind == "wrapper"):
            return self._finish(self._inner_end, "inner")
        return self._finish(self._inner_end, "refused")

    def _token(self, word: str, at: int) -> bool:
        if word == "\n":
            is_blank, self._line_blank = self._line_blank, True
            waits = self._in_string or self.is_deferred or self._content >= 0 or self._inner_end >= 0
            return False if waits or not is_blank else self._fail(at)
        if self._sees(word[0], at):
            return True
        line_blank, self._line_blank = self._line_blank, False
        gap_blank, self._gap_blank = self._gap_blank, True
        if word == "<tool_call>" and line_blank and self._content < 0:
            ended = self._last == "}" and not self._in_string and not self.is_deferred
            return self._finish(at, "residue" if ended and gap_blank and self._depth == 1 else "refused")
        if self.is_deferred:
            return False
        if self._content >= 0:
            if word == "</content>":
                self._content_end = at
            return False
        if self._in_string:
            self._in_string = word != '"'
            self._last = word
            return False
        return self._outside(word, at, gap_blank)

    def _outside(self, word: str, at: int, gap_blank: bool) -> bool:
        """A token outside strings."""
        last, self._last = self._last, word[-1]
        if word == '"':
            self._in_string = True
        elif word in "{[":
            self._depth += 1
        elif word in "}]":
            self._depth -= 1
            if self._depth <= 0:
                return self._finish(at + 1, "balanced")
            if self._depth == 1 and word == "}" and self.head.kind in ("dangling", "wrapper"):
                self._inner_end = at + 1
        elif word == "<content>" and last == ":":
            self._content = at
        elif word.startswith("</") and word != "</content>" and last == "}" and gap_blank and self._depth <= 2:
            return self._finish(at, "residue")
        else:
            return self._fail(at)
        return False

    def _fail(self, at: int) -> bool:
        """This is no JSON. A call of an offered tool may still be read when everything is there."""
        if self.head.kind == "call":
            self.is_deferred = True
            return False
        return self._finish(at, "refused")

    def defer(self) -> None:
        """What balanced is no JSON: its strings are not what they seem. Wait for the end of the text."""
        assert self.end is not None
        self._window = self._window[self.end - self._base :]
        self._base, self.end, self.status, self.is_deferred = self.end, None, "open", True
        self.feed("")

    def finish(self) -> None:
        """The stretch of text ends here."""
        if self._inner_end >= 0:
            self._finish(self._inner_end, "inner")
        else:
            self._finish(self._base + len(self._window), "open")


# ---------------------------------------------------------------------- what it says


def read_json(unit: JsonUnit, source: str, tools: Mapping[str, Tool]) -> FoundCall | None:
    """The call in a unit that ended by itself. source: its text. None: it is none. Raises BrokenJson."""
    head = unit.head
    text = source[head.begin :]
    for start, end in reversed(unit.contents):
        start, end = start - head.begin, end - head.begin
        text = text[:start] + json.dumps(text[start + len("<content>") : end]) + text[end + len("</content>") :]
    drift = head.drift or ("content_tags" if unit.contents else "")
    if unit.status in ("residue", "inner"):
        text = text.rstrip() + "}" * unit.depth
        drift = drift or ("xml_closers" if unit.status == "residue" else "")
    value, is_raw = loose_json(head.prefix + text)
    if value is None:
        raise BrokenJson(source[:80])
    found = call_of(value, tools)
    if found is None:
        return None
    name, arguments, inner = found
    drift = drift or inner or ("raw_controls" if is_raw else "bare_json")
    if unit.contents and not arguments.keys() <= properties_of(tools[name]).keys():
        return None
    return FoundCall(name, arguments, source, drift=drift)
