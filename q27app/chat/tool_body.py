"""Where the body of a tool call ends, found while it arrives, and where its parts are.

Values may hold anything, closing tags included, so a closer counts only where the body's own structure lets it:

    body starts with   a `</tool_call>` is
    {                  the end outside JSON strings; inside an open string, provisional
    <function=         the end outside parameter values; inside an open value, provisional
    anything else      the end

A provisional closer is content if the body goes on to a real end, and the end if it does not. Inside a value,
`<tool_call>` and `<parameter=` that begin a line are counted, so that a value may quote whole calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME = 256
MAX_PROSE = 4096

_XML = re.compile(
    r"<(?:(?P<open>tool_call)|(?P<close>/tool_call)|function=(?P<function>[^<>\n]{1,256})|(?P<end>/function)"
    r"|parameter=(?P<parameter>[^<>\n]{1,256})|(?P<value_end>/parameter))>"
)
_XML_WORDS = (OPEN, CLOSE, "<function=", "</function>", "<parameter=", "</parameter>")
_JSON = re.compile(r'"|\\[\s\S]|</?tool_call>')
_WRAPPERS = re.compile(r"</?tool_call>|\n[ \t\r]*\n")


def partial_marker(window: str, words: tuple[str, ...], open_ended: bool = False) -> int:
    """Where a marker may begin that the end of `window` cuts; len(window) if none does.

    open_ended: `<function=` and `<parameter=` go on with a name until `>`.
    """
    start = window.rfind("<", max(0, len(window) - MAX_NAME - 16))
    if start < 0:
        return len(window)
    tail = window[start:]
    if any(len(tail) < len(word) and word.startswith(tail) for word in words):
        return start
    names = open_ended and tail.startswith(("<function=", "<parameter="))
    if names and len(tail) <= MAX_NAME + 11 and ">" not in tail and "\n" not in tail:
        return start
    return len(window)


@dataclass
class FunctionSpan:
    """One `<function=NAME>..</function>`: offsets into the body. values: (key, start, end) between the tags."""

    name: str
    start: int
    end: int = -1
    values: list[tuple[str, int, int]] = field(default_factory=list)


class BodyScanner:
    """Scans one body as it arrives. `end`: (where the body ends, where the text after it begins), or None so far."""

    def __init__(self) -> None:
        self.end: tuple[int, int] | None = None
        self.is_prose = False
        self.provisional: list[int] = []
        self.functions: list[FunctionSpan] = []
        self.is_malformed = False
        self.kind = ""
        self._base = 0
        self._window = ""
        self._prose_head = False
        self._in_string = False
        self._state = "out"
        self._depth = 0
        self._nested = 0
        self._value: tuple[str, int] = ("", 0)
        self._candidate = 0
        self._gap_blank = True
        self._line_blank = True
        self._last = ""

    @property
    def is_complete(self) -> bool:
        """True if the xml body so far is whole calls and nothing half-written."""
        return self.kind == "xml" and self._state == "out" and bool(self.functions) and not self.is_malformed

    def feed(self, text: str) -> None:
        """Scan more of the body; text after the end may be part of it."""
        self._window += text
        if not self.kind and not self._choose_kind():
            return
        if self.kind == "json":
            self._scan_json()
        elif self.kind == "xml":
            self._scan_xml()
        else:
            self._scan_other()

    def _choose_kind(self) -> bool:
        head = self._window.lstrip()
        blank = len(self._window) - len(head)
        self._note_gap(self._window[:blank])
        self._advance(blank)
        if not head:
            return False
        if head[0] == "{":
            self.kind = "json"
        elif head.startswith("<function="):
            self.kind = "xml"
        elif "<function=".startswith(head):
            return False
        else:
            self.kind = "other"
            self._prose_head = head[0] not in '<["'
        return True

    def _advance(self, size: int) -> None:
        self._base += size
        self._window = self._window[size:]

    def _finish(self, start: int, end: int) -> None:
        self.end = (self._base + start, self._base + end)

    def _note_gap(self, gap: str) -> None:
        """Keeps whether only blanks came since the last marker, and since the last line break."""
        line = gap.rfind("\n")
        blank = not gap.strip()
        self._gap_blank = self._gap_blank and blank
        self._line_blank = (self._line_blank and blank) if line < 0 else not gap[line:].strip()

    # ------------------------------------------------------------------ other and json

    def _scan_other(self) -> None:
        """Prose after a mentioned marker: gives up at a blank line, or when it gets long."""
        position = 0
        for match in _WRAPPERS.finditer(self._window):
            self._note_gap(self._window[position : match.start()])
            position, word = match.end(), match.group()
            if self._prose_head and self._base + match.start() >= MAX_PROSE:
                break
            if word == CLOSE:
                return self._finish(match.start(), match.end())
            if word == OPEN and self._line_blank:
                return self._finish(match.start(), match.start())
            if word not in (OPEN, CLOSE) and self._prose_head:
                self.is_prose = True
                return self._finish(match.start(), match.start())
            self._line_blank = word[-1] == "\n"
        rest = self._window[position:]
        hold = partial_marker(rest, (OPEN, CLOSE))
        line = rest.rfind("\n", max(0, len(rest) - 64))
        if line >= 0 and not rest[line:].strip():
            hold = min(hold, line)
        if self._prose_head and self._base + position + hold > MAX_PROSE:
            self.is_prose = True
            self.end = (MAX_PROSE, MAX_PROSE)
            return
        self._note_gap(rest[:hold])
        self._advance(position + hold)

    def _scan_json(self) -> None:
        position = 0
        for match in _JSON.finditer(self._window):
            self._note_gap(self._window[position : match.start()])
            position = match.end()
            word = match.group()
            if word == '"':
                self._in_string = not self._in_string
            elif word == CLOSE:
                if not self._in_string:
                    return self._finish(match.start(), match.end())
                self.provisional.append(self._base + match.start())
            elif word == OPEN and not self._in_string and self._line_blank:
                return self._finish(match.start(), match.start())
            self._line_blank = False
        rest = self._window[position:]
        hold = partial_marker(rest, (OPEN, CLOSE))
        if rest.endswith("\\"):
            hold = min(hold, len(rest) - 1)
        self._note_gap(rest[:hold])
        self._advance(position + hold)

    # ------------------------------------------------------------------ xml

    def _scan_xml(self) -> None:
        position = 0
        for match in _XML.finditer(self._window):
            self._note_gap(self._window[position : match.start()])
            position = match.end()
            self._marker(match)
            if self.end is not None:
                return
            self._last = match.lastgroup or ""
            self._gap_blank, self._line_blank = True, False
        hold = position + partial_marker(self._window[position:], _XML_WORDS, open_ended=True)
        self._note_gap(self._window[position:hold])
        self._advance(hold)

    def _marker(self, match: re.Match[str]) -> None:
        kind, name = match.lastgroup or "", match.group(match.lastgroup or 0)
        if self._state == "after" and not self._leaves_value(kind):
            self._state = "value"
        if self._state == "value":
            self._in_value(kind, match)
        elif self._state == "after":
            self._after_value(kind, name, match)
        elif self._state == "function":
            self._in_function(kind, name, match)
        else:
            self._outside(kind, name, match)

    def _leaves_value(self, kind: str) -> bool:
        """True if the value_end before this marker may have been the end of the value."""
        return kind == "value_end" or (self._gap_blank and kind in ("parameter", "end", "close"))

    def _outside(self, kind: str, name: str, match: re.Match[str]) -> None:
        if kind == "function":
            self.functions.append(FunctionSpan(name, self._base + match.start()))
            self._state = "function"
        elif kind == "close":
            self._finish(match.start(), match.end())
        elif kind == "open" and self._line_blank:
            self._finish(match.start(), match.start())
        elif kind == "value_end" and self.functions and self.functions[-1].values:
            # The value went on after something that looked like its end.
            key, start, _ = self.functions[-1].values.pop()
            self._value, self._candidate, self._state = (key, start), self._base + match.start(), "after"
        elif kind == "parameter":
            self.is_malformed = True

    def _in_function(self, kind: str, name: str, match: re.Match[str]) -> None:
        self.is_malformed = self.is_malformed or not self._gap_blank
        if kind == "parameter":
            self._open_value(name, match)
        elif kind == "end":
            self._close_function(match)
        elif kind in ("close", "open"):
            self.is_malformed = True
            self._finish(match.start(), match.end() if kind == "close" else match.start())
        else:
            self.is_malformed = True

    def _open_value(self, name: str, match: re.Match[str]) -> None:
        self._value, self._state = (name, self._base + match.end()), "value"
        self._depth = self._nested = 0

    def _close_function(self, match: re.Match[str]) -> None:
        self.functions[-1].end = self._base + match.end()
        self._state = "out"

    def _in_value(self, kind: str, match: re.Match[str]) -> None:
        if kind == "open":
            self._depth += self._line_blank or (self._last == "close" and self._gap_blank)
        elif kind == "close" and self._depth:
            self._depth -= 1
        elif kind == "close" and self._last == "end" and self._gap_blank:
            self.is_malformed = True
            self._finish(match.start(), match.end())
        elif kind == "close":
            self.provisional.append(self._base + match.start())
        elif self._depth:
            return
        elif kind == "parameter":
            self._nested += self._line_blank
        elif kind == "value_end" and self._nested:
            self._nested -= 1
        elif kind == "value_end":
            self._candidate, self._state = self._base + match.start(), "after"

    def _after_value(self, kind: str, name: str, match: re.Match[str]) -> None:
        if kind == "value_end":
            self._candidate = self._base + match.start()
            return
        self.functions[-1].values.append((*self._value, self._candidate))
        if kind == "parameter":
            self._open_value(name, match)
        elif kind == "end":
            self._close_function(match)
        else:
            self.is_malformed = True
            self._finish(match.start(), match.end())
