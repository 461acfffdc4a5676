"""Small screens over the others: a question, a request's facts, the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from q27app.tui.marks import Line
from q27app.tui.snapshot import clean
from q27app.tui.widgets.lines import content_of


class Dialog(ModalScreen[Any]):
    """A box in the middle; escape closes it."""

    BINDINGS = [("escape", "dismiss(None)", "Close")]

    def on_mount(self) -> None:
        """Looks."""
        self.add_class("dialog")
        self.set_class(self.app.marks.is_ascii, "-ascii")  # type: ignore[attr-defined]


class Question(Dialog):
    """Yes or no; gives True or False."""

    BINDINGS = [("y", "dismiss(True)", "Yes"), ("n", "dismiss(False)", "No")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self.text, markup=False)
            yield Static("\n[$text-accent]y[/] yes   [$text-accent]n[/] no   [$text-accent]escape[/] no")


class Detail(Dialog):
    """Names and values."""

    BINDINGS = [("enter", "dismiss(None)", "Close"), ("q", "dismiss(None)", "Close"), ("y", "copy", "Copy")]

    def __init__(self, title: str, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.heading = title
        self.facts = {clean(key, 40): clean(value) for key, value in list(facts.items())[:60]}

    def compose(self) -> ComposeResult:
        lines: list[Line] = [[(f"{key:<18} ", "dim"), (value or "-", "")] for key, value in self.facts.items()]
        with VerticalScroll(classes="box"):
            yield Static(content_of([[(self.heading, "bold")], [], *lines], 400))
            yield Static("\n[$text-accent]escape[/] close   [$text-accent]y[/] copy")

    def action_copy(self) -> None:
        """Copy names and values."""
        text = "\n".join(f"{key}: {value}" for key, value in self.facts.items())
        self.app.copy(text, "the request's figures")  # type: ignore[attr-defined]


class Help(Dialog):
    """Keys of the screen below, and the chat's commands."""

    BINDINGS = [("q", "dismiss(None)", "Close"), ("question_mark", "dismiss(None)", "Close")]

    def __init__(self, title: str, sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
        super().__init__()
        self.heading, self.sections = title, sections

    def compose(self) -> ComposeResult:
        lines: list[Line] = []
        for title, entries in self.sections:
            lines += [[], [(title, "bold")]] if lines else [[(title, "bold")]]
            width = max((len(key) for key, _ in entries), default=0)
            lines += [[(f"{key:<{width}}  ", "accent"), (what, "")] for key, what in entries]
        with VerticalScroll(classes="box wide") as box:
            box.border_title = self.heading
            yield Static(content_of(lines, 200))
