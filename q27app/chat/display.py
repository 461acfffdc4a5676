"""Is a position in an answer's text only shown, not meant? Inside code and quotations a marker is an example.

    construct                                                    a `<tool_call>` there is   the beginning of a bare call
    fence of ``` or ~~~, also unterminated                       shown                      shown
    line indented by 4 columns or more                           shown                      shown
    quotation or list item (its own line, and lines indented     shown                      shown
    to the content of the item)
    HTML comment, CDATA, element of a block that began a line    shown                      shown
    definition of a link, `[label]: ..`                          shown                      shown
    code span, JSON string or container, link target, inline     shown, unless it begins    shown
    HTML, of the same paragraph (display_inline.py)              its line
    <result> or <output> that is open                            the same                   shown
    everything else                                              meant                      meant

A wrapper is strong evidence, a bare call a weak one: prose with an open bracket must not disarm a wrapped call.
Reads each character once; keeps at most the first 256 characters of the current line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from q27app.chat.display_inline import InlineContext

_PREFIX_CHARS = 256
_FENCE_OPEN = re.compile(
    r"(?P<prefix>[ \t]*(?:(?:>|[-+*][ \t]|\d{1,9}[.)][ \t])[ \t]*)*)(?P<run>`{3,}|~{3,})(?P<info>.*)"
)
_FENCE_CLOSE = re.compile(r"(?P<prefix>[ \t]*(?:>[ \t]*)*)(?P<run>`{3,}|~{3,})[ \t\r]*$")
_LIST = re.compile(r"[ \t]*(?:[-+*]|\d{1,9}[.)])(?:[ \t]+|$)")
_QUOTE_OR_LIST = re.compile(r"[ \t]*(?:>|[-+*][ \t]|\d{1,9}[.)][ \t])")
_DEFINITION = re.compile(r" {0,3}\[[^\[\]\n]{1,200}\]:")


@dataclass(frozen=True)
class Fence:
    """run: its opener's characters. column: where it begins. content: where its list's content begins, or 0."""

    run: str
    column: int
    content: int
    num_quotes: int


class DisplayContext:
    """Where the text fed so far ends. Owned by one splitter."""

    def __init__(self) -> None:
        self._inline = InlineContext()
        self.reset()

    def reset(self) -> None:
        """Forget the past: a new stretch of text begins."""
        self._inline.reset()
        self._line = ""
        self._fence: Fence | None = None
        self._list = 0

    def feed(self, text: str) -> None:
        lines = text.split("\n")
        self._append(lines[0])
        for line in lines[1:]:
            self._end_line()
            self._append(line)

    @property
    def is_shown(self) -> bool:
        """True if a marker of a wrapped call that begins right here would be an example."""
        return self._is_in_block() or (bool(self._line.strip()) and self._inline.is_open)

    @property
    def is_inert(self) -> bool:
        """True if a bare call that begins right here would be an example."""
        return self._is_in_block() or self._inline.is_open or self._inline.may_be_list

    @property
    def is_line_start(self) -> bool:
        """True if only blanks precede on this line."""
        return not self._line.strip()

    def _is_in_block(self) -> bool:
        line = self._line
        if self._fence and not (not line.strip() and self._leaves_fence(line + "<")):
            return True
        if self._inline.is_in_block:
            return True
        indent = _columns(line[: len(line) - len(line.lstrip())])
        if indent >= 4 or (self._list and indent >= self._list):
            return True
        if not line.strip():
            return False
        return bool(_QUOTE_OR_LIST.match(line) or _DEFINITION.match(line) or _FENCE_OPEN.match(line))

    def _append(self, text: str) -> None:
        if not text:
            return
        was_blank = not self._line.strip()
        self._line += text[: _PREFIX_CHARS - len(self._line)]
        if self._fence and was_blank and self._line.strip() and self._leaves_fence(self._line):
            self._fence = None
        if not self._fence:
            self._inline.feed(text)

    def _leaves_fence(self, line: str) -> bool:
        """True if a line that is not blank stands outside the quotation or list that the fence belongs to."""
        assert self._fence is not None
        body = line.lstrip()
        if self._fence.num_quotes:
            return not body.startswith(">")
        return _columns(line[: len(line) - len(body)]) < self._fence.content

    def _end_line(self) -> None:
        line, self._line = self._line, ""
        self._inline.end_line()
        if self._fence:
            if self._closes_fence(line):
                self._fence = None
            return
        if not line.strip():
            self._inline.end_paragraph()
            return
        item = _LIST.match(line)
        indent = _columns(line[: len(line) - len(line.lstrip())])
        if item:
            self._list = _columns(item.group()) if line[item.end() :].strip() else _columns(item.group().rstrip()) + 1
        elif indent < self._list:
            self._list = 0
        opener = None if self._inline.is_in_block else _FENCE_OPEN.match(line)
        if opener and not (opener["run"][0] == "`" and "`" in opener["info"]):
            prefix = opener["prefix"]
            content = self._list if self._list and _columns(prefix) >= self._list else 0
            self._fence = Fence(opener["run"], _columns(prefix), content, prefix.count(">"))
            self._inline.reset()

    def _closes_fence(self, line: str) -> bool:
        fence, closer = self._fence, _FENCE_CLOSE.match(line)
        assert fence is not None
        if not closer or closer["run"][0] != fence.run[0] or len(closer["run"]) < len(fence.run):
            return False
        if fence.num_quotes:
            return closer["prefix"].count(">") == fence.num_quotes
        column = _columns(closer["prefix"])
        if fence.column - fence.content <= 3:
            return fence.content <= column <= fence.content + 3
        return column == fence.column


def _columns(text: str) -> int:
    return len(text.expandtabs(4))
