"""Cuts a Markdown text that is still growing into blocks: finished ones, which never change again, and the open one.

The sources of all blocks joined are the text, byte for byte. A block is bounded: one that grows over its limit is cut, and the
rest is drawn as its continuation (a code fence opens again, a table repeats its head).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_BLOCK = 3_000
MAX_SLOW_BLOCK = 1_500
"""Code and tables take several times longer to draw than text."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_RULE = re.compile(r"[ |:\-\t]+\n")
_LIST = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])[ \t]")


@dataclass(frozen=True)
class Block:
    """source: its part of the text. before, after: what makes it complete Markdown where it is only a part.
    is_continued: it goes on where the block before it was cut."""

    source: str
    before: str = ""
    after: str = ""
    is_continued: bool = False

    @property
    def markdown(self) -> str:
        return self.before + self.source.rstrip("\n") + self.after


class Splitter:
    """feed(text) gives the blocks that have become final; `open` is the rest."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._partial = ""
        self._fence = ""
        self._fence_line = ""
        self._is_continued = False
        self._before = ""

    def feed(self, text: str) -> list[Block]:
        """More text, split anywhere."""
        finished: list[Block] = []
        *lines, rest = (self._partial + text).split("\n")
        for line in lines:
            self._take(line + "\n", finished)
        self._partial = rest
        while len(self._partial) > MAX_BLOCK:
            cut = self._partial.rfind(" ", 1, MAX_BLOCK) + 1 or MAX_BLOCK
            head, self._partial = self._partial[:cut], self._partial[cut:]
            self._add(head)
            finished.append(self._finish(is_cut=True))
        return finished

    @property
    def open(self) -> Block | None:
        """What may still change."""
        source = "".join(self._lines) + self._partial
        return Block(source, self._before, self._closing(), self._is_continued) if source else None

    def finish(self) -> list[Block]:
        """The text has ended."""
        finished: list[Block] = []
        line, self._partial = self._partial, ""
        if line:
            self._take(line, finished)
        block = self.open
        self._lines, self._partial, self._size = [], "", 0
        return [*finished, block] if block else finished

    def _closing(self) -> str:
        return "\n" + self._fence if self._fence else ""

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line)

    def _finish(self, is_cut: bool = False) -> Block:
        block = Block("".join(self._lines), self._before, self._closing() if is_cut else "", self._is_continued)
        if is_cut:
            self._before = self._continuation()
        else:
            self._before = ""
        self._is_continued = is_cut
        self._lines, self._size = [], 0
        return block

    def _continuation(self) -> str:
        if self._fence:
            return self._fence_line
        if self._before:
            return self._before
        if self._is_table() and len(self._lines) > 2:
            return "".join(self._lines[:2])
        return ""

    def _take(self, line: str, finished: list[Block]) -> None:
        fence = _FENCE.match(line)
        if self._fence:
            self._add(line)
            if fence and fence[1].startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence = self._fence_line = ""
                finished.append(self._finish())
            elif self._size > MAX_SLOW_BLOCK:
                finished.append(self._finish(is_cut=True))
            return
        if self._ends_before(line, fence is not None):
            finished.append(self._finish())
        self._add(line)
        if fence:
            self._fence, self._fence_line = fence[1], line[:200].rstrip("\n") + "\n"
        elif self._size > (MAX_SLOW_BLOCK if self._is_table() else MAX_BLOCK):
            finished.append(self._finish(is_cut=True))

    def _is_table(self) -> bool:
        """Whether the block is a table, or goes on with one."""
        return "|" in self._before or (len(self._lines) > 1 and "|" in self._lines[0] and _RULE.fullmatch(self._lines[1]) is not None)

    def _ends_before(self, line: str, is_fence: bool) -> bool:
        """Whether `line` begins a block of its own. Blank lines stay with the block before them."""
        if not line.strip() or not any(map(str.strip, self._lines)):
            return False
        in_list = _LIST.match(self._lines[0]) is not None
        if is_fence and not (in_list and line[:1] == " "):
            return True
        return not self._lines[-1].strip() and not (in_list and line[:2] == "  ")


def code_blocks(text: str) -> list[str]:
    """The contents of a text's fenced blocks; one that isn't closed reaches to the end."""
    found: list[str] = []
    fence = ""
    body: list[str] = []
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if fence and mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            found.append("\n".join(body))
            fence = ""
        elif fence:
            body.append(line)
        elif mark:
            fence, body = mark[1], []
    return [*found, "\n".join(body)] if fence else found
