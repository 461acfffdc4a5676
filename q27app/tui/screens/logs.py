"""The daemon's log: follows its end unless scrolled away from it; a filter."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget
from textual.widgets import Input

from q27app.tui import panels
from q27app.tui.marks import Line
from q27app.tui.screens.dialogs import Detail
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import clean
from q27app.tui.widgets.lines import ListPanel


class Logs(Room):
    """Every line that the daemon has told, newest first."""

    KEYS = [("escape", "back"), ("/", "filter"), ("enter", "whole line"), ("space", "freeze"), ("?", "help"), ("q", "quit")]
    BINDINGS = [("escape", "leave", "Back"), ("slash", "filter", "Filter"), ("space", "app.freeze", "Freeze")]
    AUTO_FOCUS = "#lines"

    def compose_body(self) -> Iterable[Widget]:
        header: Line = [("newest first", "dim")]
        yield ListPanel(lambda width: header, lambda event, width: panels.log_line(event),
                        lambda event: (event.get("number"), event.get("time")), "quiet so far", "log", id="lines",
                        classes="panel")
        yield Input(placeholder="filter; enter keeps it, escape drops it", id="filter", compact=True)

    def renew(self) -> None:
        super().renew()
        wanted = self.query_one("#filter", Input).value.strip().lower()
        lines = [event for event in reversed(self.app.log_events)
                 if wanted in f"{event.get('level')} {clean(event.get('message'), 4000)}".lower()]
        self.query_one("#lines", ListPanel).show(lines, clean(self.app.events_failure) or None)

    def action_filter(self) -> None:
        """Type what to look for."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self) -> None:
        """Filter while typing."""
        self.renew()

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self.query_one("#lines").focus()

    def action_leave(self) -> None:
        """Drop the filter, or go back."""
        field = self.query_one("#filter", Input)
        if field.has_class("shown"):
            field.value = ""
            field.remove_class("shown")
            self.query_one("#lines").focus()
        else:
            self.app.go("monitor")

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """The whole line."""
        self.app.push_screen(Detail("log line", event.row))
