"""A message as sections: head, folded reasoning, blocks of text, tool calls, figures. Grows while it streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from q27app.tui import figures
from q27app.tui.blocks import Block, Splitter
from q27app.tui.history import Message
from q27app.tui.marks import Marks
from q27app.tui.snapshot import clean
from q27app.tui.talk import call_text
from q27app.tui.widgets.transcript import Section


class Entry:
    """message_id: in the history. Text and reasoning only grow; `sections` gives what to show."""

    def __init__(self, message_id: int, role: str, name: str, marks: Marks) -> None:
        self.message_id, self.role, self.is_unfolded = message_id, role, False
        self._marks = marks
        self._head = Section("you" if role == "user" else "model", name, gap=1)
        self._fold = Section("fold", "", owner=self)
        self._text = _Flow("markdown" if role == "assistant" else "plain")
        self._reasoning = _Flow("reasoning")
        self._calls: list[Section] = []
        self._tail = Section("dim", "")
        self._fold_words = ""

    def add_text(self, text: str) -> None:
        """More of the answer."""
        self._text.feed(text)

    def add_reasoning(self, text: str) -> None:
        """More of the thinking; drawn only while unfolded."""
        self._reasoning.feed(text)

    def set_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Tool calls, as they are known now."""
        for index, call in enumerate(calls[:100]):
            source = call_text(call)
            if index == len(self._calls):
                self._calls.append(Section("call", source, gap=1))
            self._calls[index].replace(source)

    def set_words(self, fold: str, tail: str, kind: str = "dim") -> None:
        """The line over the reasoning, and the last line."""
        self._fold_words = fold
        self._tail.kind = kind
        self._tail.replace(tail)

    def finish(self) -> None:
        """Nothing more comes."""
        self._text.finish()
        self._reasoning.finish()

    def toggle(self) -> None:
        """Fold or unfold the reasoning."""
        self.is_unfolded = not self.is_unfolded

    @property
    def source(self) -> str:
        """The text, from the blocks that are shown."""
        return self._text.source

    def sections(self) -> list[Section]:
        """From top to bottom."""
        found = [self._head]
        if self._reasoning.has_text:
            mark = self._marks.unfolded if self.is_unfolded else self._marks.folded
            self._fold.replace(f"{mark} {self._fold_words}")
            found.append(self._fold)
            if self.is_unfolded:
                found += self._reasoning.sections()
        found += self._text.sections()
        found += self._calls
        if self._tail.source:
            found.append(self._tail)
        return found


class _Flow:
    """Text as sections: finished blocks, and the open one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._splitter = Splitter()
        self._finished: list[Section] = []
        self._sources: list[str] = []
        self._open: Section | None = None
        self._open_source = ""

    @property
    def has_text(self) -> bool:
        return bool(self._finished or self._open)

    @property
    def source(self) -> str:
        return "".join(self._sources) + self._open_source

    def feed(self, text: str) -> None:
        if text:
            self._keep(self._splitter.feed(text))
            block = self._splitter.open
            self._open_source = block.source if block else ""
            if block is None:
                self._open = None
            elif self._open is None:
                self._open = self._section(block)
            else:
                self._open.gap = self._gap(block)
                self._open.replace(self._drawn(block))

    def finish(self) -> None:
        self._keep(self._splitter.finish())
        self._open, self._open_source = None, ""

    def sections(self) -> list[Section]:
        return [*self._finished, self._open] if self._open else self._finished

    def _keep(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._sources.append(block.source)
            self._finished.append(self._section(block))

    def _section(self, block: Block) -> Section:
        return Section(self._kind, self._drawn(block), gap=self._gap(block))

    def _gap(self, block: Block) -> int:
        return 1 if self._finished and not block.is_continued else 0

    def _drawn(self, block: Block) -> str:
        return block.markdown if self._kind == "markdown" else block.source.rstrip("\n")


def fold_words(seconds: float | None, num_tokens: int | None, is_thinking: bool) -> str:
    """thinking 3 s / thought 12 s, 840 tokens"""
    words = "thinking" if is_thinking else "thought"
    if seconds is not None:
        words += f" {figures.duration(seconds)}"
    return words + (f", {num_tokens:,} tokens" if num_tokens else "")


def stats_words(message: Message, marks: Marks) -> tuple[str, str]:
    """(the last line of an answer, its kind)."""
    stats = message.stats
    parts = []
    if message.state != "done":
        words = {"stopped": "stopped by you", "failed": f"failed: {clean(stats.get('error'), 400)}",
                 "interrupted": "interrupted: the program that streamed this ended"}
        parts.append(words.get(message.state, message.state))
    for key, form in (("num_generated", "{:,.0f} tokens"), ("tokens_per_s", "{:,.1f} tok/s"),
                      ("first_token_ms", "first {:,.0f} ms"), ("num_cached", "{:,.0f} prompt tokens reused")):
        value = stats.get(key)
        if isinstance(value, (int, float)) and value:
            parts.append(form.format(value))
    if stats.get("finish") == "length":
        parts.append("cut at the token limit")
    return f" {marks.dot} ".join(parts), "error" if message.state == "failed" else "dim"
