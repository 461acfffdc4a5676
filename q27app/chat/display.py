"""Is a position in an answer's text only shown, not meant? Inside code and quotations a marker is an example.

    construct                                  a marker there is
    fence of ``` or ~~~, also unterminated      shown
    line indented by 4 columns or more          shown
    quotation or list item (its own line)       shown
    inline code of the same paragraph           shown, unless the marker begins a line
    everything else                             meant

Reads each character once; keeps at most the first 256 characters of the current line.
"""

from __future__ import annotations

import re

_PREFIX_CHARS = 256
_FENCE_OPEN = re.compile(r"[ \t]*(?:(?:>|[-+*][ \t]|\d{1,9}[.)][ \t])[ \t]*)*(`{3,}|~{3,})(.*)")
_FENCE_CLOSE = re.compile(r"[ \t]*(?:>[ \t]*)*(`{3,}|~{3,})[ \t\r]*$")
_QUOTE_OR_LIST = re.compile(r"[ \t]*(?:>|[-+*][ \t]|\d{1,9}[.)][ \t])")
_TICKS = re.compile(r"`+")


class DisplayContext:
    """Where the text fed so far ends. Owned by one splitter."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the past: a new stretch of text begins."""
        self._line = ""
        self._fence = ""
        self._code = 0
        self._run = 0
        self._escaped = False

    def feed(self, text: str) -> None:
        lines = text.split("\n")
        self._append(lines[0])
        for line in lines[1:]:
            self._end_line()
            self._append(line)

    @property
    def is_shown(self) -> bool:
        """True if a marker that begins right here would be an example."""
        if self._fence:
            return True
        if not self._line.strip():
            return len(self._line.expandtabs(4)) >= 4
        if _QUOTE_OR_LIST.match(self._line):
            return True
        self._end_run()
        return self._code > 0

    @property
    def is_line_start(self) -> bool:
        """True if only blanks precede on this line."""
        return not self._line.strip()

    def _append(self, text: str) -> None:
        if not text:
            return
        self._line += text[: _PREFIX_CHARS - len(self._line)]
        if self._fence:
            return
        if "`" not in text:
            self._end_run()
            self._escaped = text.endswith("\\")
            return
        end = 0
        for ticks in _TICKS.finditer(text):
            if ticks.start() > end:
                self._end_run()
                self._escaped = text[ticks.start() - 1] == "\\"
            self._run += len(ticks.group())
            end = ticks.end()
        if end < len(text):
            self._end_run()
            self._escaped = text.endswith("\\")

    def _end_run(self) -> None:
        """A run of backticks is complete: it opens inline code or closes it."""
        length, self._run = self._run, 0
        if not length:
            return
        if self._escaped and not self._code:
            length -= 1
        self._escaped = False
        if not self._code:
            self._code = length
        elif self._code == length:
            self._code = 0

    def _end_line(self) -> None:
        self._end_run()
        line, self._line, self._escaped = self._line, "", False
        if self._fence:
            closer = _FENCE_CLOSE.match(line)
            if closer and closer[1][0] == self._fence[0] and len(closer[1]) >= len(self._fence):
                self._fence = ""
            return
        opener = _FENCE_OPEN.match(line)
        if opener and not (opener[1][0] == "`" and "`" in opener[2]):
            self._fence, self._code = opener[1], 0
        elif not line.strip():
            self._code = 0
