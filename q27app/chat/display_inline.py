"""Inline constructs of an answer's text, read once as they arrive: code spans, JSON, link targets, HTML.

    construct                          ends at its own closer, or at
    code span of n backticks           a blank line
    string in "quotes"                 the end of its line
    { or [ that JSON may follow        a blank line
    link target ](..)                  a blank line
    HTML tag, inline element           a blank line
    element of a block that begins     nothing else
    a line, comment, CDATA
    <result>, <output>                 nothing else: invented results of tools

A name that is no HTML element (`Vec<u8>`, `<path>`) is prose. Only the outermost element is followed, with its depth.
"""

from __future__ import annotations

import re

BLOCK_ELEMENTS = frozenset(
    (
        "address article aside blockquote body center dd details dialog dir div dl dt fieldset figcaption figure "
        "footer form h1 h2 h3 h4 h5 h6 head header html iframe legend li main menu nav noframes ol optgroup option p pre "
        "script search section style summary table tbody td textarea tfoot th thead title tr ul"
    ).split()
)
INLINE_ELEMENTS = frozenset(
    (
        "a abbr acronym audio b bdi bdo big button canvas caption cite code colgroup data datalist del dfn em font i "
        "ins kbd label map mark meter noscript object picture progress q rp rt ruby s samp select slot small span "
        "strike strong sub sup svg template time tt u var video"
    ).split()
)
VOID_ELEMENTS = frozenset(
    (
        "area base basefont bgsound br col embed frame hr img input keygen link meta param source track wbr"
    ).split()
)
RESULT_ELEMENTS = frozenset(["result", "output"])
_ELEMENTS = BLOCK_ELEMENTS | INLINE_ELEMENTS | VOID_ELEMENTS | RESULT_ELEMENTS

_BLANKS = re.compile(r"[ \t\r]*")
_TICKS = re.compile(r"`+")
_TOP = re.compile(r'[`"\\{}\[\]<]')
_STRING = re.compile(r'["\\]')
_TAG_NAME = re.compile(r"/?(?:[A-Za-z][A-Za-z0-9]{0,15})?")
_TAG = re.compile(r"[\"'>]")
_LINK = re.compile(r'[()<>"\\]')
_VALUE_STARTS = {"{": frozenset('"}'), "[": frozenset('"{[]-0123456789tfn')}
_OPENERS = {"}": "{", "]": "["}
_ENDS = {"comment": "-->", "cdata": "]]>"}
_BRACKET_OPENERS = {"!--": "comment", "![CDATA[": "cdata"}


class InlineContext:
    """Where the text fed so far ends. Owned by one DisplayContext, which tells it of line and paragraph ends."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is open."""
        self._mode = "top"
        self._code = self._run = 0
        self._escaped = self._after_bracket = False
        self._pending = ""
        self._stack: list[str] = []
        self._num_open = {"{": 0, "[": 0}
        self._link = 0
        self._quote = ""
        self._name = self._tag = self._tail = self._element = self._kind = ""
        self._depth = 0
        self._slash = self._at_line_start = False
        self._is_fresh = True

    @property
    def is_open(self) -> bool:
        """True inside any construct. A run of backticks before this position is complete."""
        self.end_run()
        is_inside = self._mode in ("string", "link", "tag", "comment", "cdata")
        return is_inside or bool(self._code or self._stack or self._element)

    @property
    def is_in_block(self) -> bool:
        """True inside what a blank line does not end, invented results apart."""
        return self._mode in _ENDS or self._kind == "block"

    @property
    def may_be_list(self) -> bool:
        """True right after a `[`, where an object would be an item."""
        return self._pending == "["

    def end_line(self) -> None:
        self.end_run()
        self._escaped = self._after_bracket = False
        self._is_fresh = True
        if self._mode == "string":
            self._mode = "top"
        elif self._mode == "name":
            self._decide_tag("\n")

    def end_paragraph(self) -> None:
        self._code, self._pending, self._link, self._quote = 0, "", 0, ""
        self._stack, self._num_open = [], {"{": 0, "[": 0}
        if self._kind == "inline":
            self._element = self._kind = ""
        if self._mode not in _ENDS:
            self._mode = self._base

    @property
    def _base(self) -> str:
        return "element" if self._element else "top"

    def feed(self, text: str) -> None:
        """More of one line."""
        lead = len(text) - len(text.lstrip(" \t\r"))
        first = lead if self._is_fresh and lead < len(text) else -1
        self._is_fresh = self._is_fresh and lead == len(text)
        position = 0
        while position < len(text):
            if self._mode == "top":
                position = self._top(text, position, first)
            elif self._mode == "string":
                position = self._string(text, position)
            elif self._mode == "element":
                position = self._inside(text, position)
            elif self._mode == "name":
                position = self._tag_name(text, position)
            elif self._mode == "tag":
                position = self._in_tag(text, position)
            elif self._mode == "link":
                position = self._in_link(text, position)
            else:
                position = self._in_section(text, position)

    # ------------------------------------------------------------------ code, strings, containers

    def end_run(self) -> None:
        """A run of backticks is complete: it opens a code span or closes it."""
        if self._run:
            if not self._code:
                self._code = self._run
            elif self._code == self._run:
                self._code = 0
            self._run = 0

    def _top(self, text: str, position: int, first: int) -> int:
        if self._run:
            ticks = _TICKS.match(text, position)
            if ticks:
                self._run += len(ticks.group())
                return ticks.end()
            self.end_run()
        if self._code:
            found = _TICKS.search(text, position)
            self._run = len(found.group()) if found else 0
            return found.end() if found else len(text)
        if self._escaped:
            self._escaped = False
            return position + 1
        if self._after_bracket:
            self._after_bracket = False
            if text[position] == "(":
                self._mode, self._link = "link", 1
                return position + 1
        if self._pending:
            position = _BLANKS.match(text, position).end()  # type: ignore[union-attr]
            if position == len(text):
                return position
            if text[position] in _VALUE_STARTS[self._pending]:
                self._push(self._pending)
            self._pending = ""
        match = _TOP.search(text, position)
        if match is None:
            return len(text)
        self._special(match.group(), match.start() == first)
        return match.end()

    def _special(self, char: str, is_first: bool) -> None:
        if char == "`":
            self._run = 1
        elif char == '"':
            self._mode = "string"
        elif char == "\\":
            self._escaped = True
        elif char == "<":
            self._mode, self._name, self._at_line_start = "name", "", is_first
        elif char in "{[":
            if self._stack:
                self._push(char)
            else:
                self._pending = char
        else:
            self._pop(_OPENERS[char])
            self._after_bracket = char == "]"

    def _push(self, char: str) -> None:
        self._stack.append(char)
        self._num_open[char] += 1

    def _pop(self, opener: str) -> None:
        """Closes the nearest frame of this kind and those inside it; a closer without one is ignored."""
        while self._num_open[opener]:
            frame = self._stack.pop()
            self._num_open[frame] -= 1
            if frame == opener:
                return

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _STRING.search(text, position)
        if match is None:
            return len(text)
        if match.group() == "\\":
            self._escaped = True
        else:
            self._mode = "top"
        return match.end()

    # ------------------------------------------------------------------ links and HTML

    def _in_link(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _LINK.search(text, position)
        if match is None:
            return len(text)
        char = match.group()
        if char == "\\":
            self._escaped = True
        elif self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in '"<':
            self._quote = ">" if char == "<" else char
        elif char in "()":
            self._link += 1 if char == "(" else -1
        if not self._link:
            self._mode = "top"
        return match.end()

    def _inside(self, text: str, position: int) -> int:
        at = text.find("<", position)
        if at < 0:
            return len(text)
        self._mode, self._name, self._at_line_start = "name", "", False
        return at + 1

    def _tag_name(self, text: str, position: int) -> int:
        name = self._name + text[position]
        if name in _BRACKET_OPENERS:
            self._mode, self._tail = _BRACKET_OPENERS[name], ""
            return position + 1
        if _TAG_NAME.fullmatch(name) or any(opener.startswith(name) for opener in _BRACKET_OPENERS):
            self._name = name
            return position + 1
        self._decide_tag(text[position])
        return position

    def _decide_tag(self, after: str) -> None:
        """The name is complete: a tag of HTML, or prose."""
        name = self._name if self._name.islower() or len(self._name) < 3 else self._name.lower()
        if name.removeprefix("/") in _ELEMENTS and after in " \t\r\n>/":
            self._mode, self._tag, self._quote, self._slash = "tag", name, "", False
        else:
            self._mode = self._base

    def _in_tag(self, text: str, position: int) -> int:
        match = _TAG.search(text, position)
        before = text[position : match.start() if match else len(text)]
        self._slash = before.endswith("/") if before else self._slash
        if match is None:
            return len(text)
        char = match.group()
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char == ">":
            self._end_tag()
        else:
            self._quote = char
        return match.end()

    def _end_tag(self) -> None:
        name = self._tag
        if name.startswith("/"):
            if self._element == name[1:]:
                self._depth -= 1
                if not self._depth:
                    self._element = self._kind = ""
        elif not self._slash and name not in VOID_ELEMENTS:
            if not self._element:
                is_block = name in BLOCK_ELEMENTS and self._at_line_start
                self._kind = "block" if is_block else "result" if name in RESULT_ELEMENTS else "inline"
                self._element, self._depth = name, 1
            elif self._element == name:
                self._depth += 1
        self._mode = self._base

    def _in_section(self, text: str, position: int) -> int:
        """Comment or CDATA, to its end."""
        end = _ENDS[self._mode]
        seen = self._tail + text[position:]
        at = seen.find(end)
        if at < 0:
            self._tail = seen[-len(end) + 1 :]
            return len(text)
        consumed = at + len(end) - len(self._tail)
        self._mode = self._base
        return position + consumed
