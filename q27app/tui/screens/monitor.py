"""The card and the engine on one screen: five panels, all from one snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input

from q27app.tui import panels, tables
from q27app.tui.marks import Line
from q27app.tui.poller import Trends
from q27app.tui.screens.dialogs import Detail, Question
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import Row, clean
from q27app.tui.widgets.lines import Lines, ListPanel

PANELS = ("card", "engine", "slots", "recent", "log")
NO_TRENDS = Trends()


class Monitor(Room):
    """The first screen."""

    KEYS = [("c", "chat"), ("q", "quit"), ("?", "help"), ("enter", "detail"), ("x", "cancel"), ("space", "freeze"),
            ("/", "filter"), ("1-5", "panels"), ("m", "models"), ("g", "log"), ("d", "doctor"), ("s", "setup"), ("u", "unload"), ("l", "load"), ("e", "export"),
            ("y", "copy"), ("ctrl+p", "palette")]
    BINDINGS = [
        ("c", "app.go('chat')", "Chat"), ("m", "app.go('models')", "Models"), ("g", "app.go('logs')", "Log"), ("d", "app.go('doctor')", "Doctor"),
        ("s", "app.go('setup')", "Setup"),
        ("space", "app.freeze", "Freeze"), ("slash", "filter", "Filter"), ("x", "cancel", "Cancel request"),
        ("u", "app.unload", "Unload the model"), ("l", "app.load", "Load the model"), ("e", "app.export", "Export"),
        ("y", "copy", "Copy"), ("escape", "leave", "Back"), ("r", "app.ask_now", "Ask now"),
        *((str(index + 1), f"toggle('{name}')", f"Panel {name}") for index, name in enumerate(PANELS)),
    ]
    AUTO_FOCUS = "#slots"

    def compose_body(self) -> Iterable[Widget]:
        with Horizontal(id="upper"):
            yield Lines(self._card, "1 card", id="card", classes="panel")
            yield Lines(self._engine, "2 engine", id="engine", classes="panel")
        yield ListPanel(lambda width: tables.header(tables.chosen(tables.SLOT_COLUMNS, width)),
                        lambda row, width: tables.line(tables.chosen(tables.SLOT_COLUMNS, width), row),
                        lambda row: row.id, "nothing runs", "3 slots", id="slots", classes="panel")
        with Horizontal(id="lower"):
            yield ListPanel(lambda width: tables.header(tables.chosen(tables.RECENT_COLUMNS, width)),
                            lambda event, width: tables.line(tables.chosen(tables.RECENT_COLUMNS, width), event),
                            lambda event: event.get("number"), "no request has ended yet", "4 recent", id="recent",
                            classes="panel")
            yield Lines(self._log, "5 log", id="log", classes="panel")
        yield Input(placeholder="filter by client, id, api or end; enter keeps it, escape drops it", id="filter", compact=True)

    def renew(self) -> None:
        super().renew()
        for panel in self.query(Lines):
            panel.renew()
        snapshot = self.app.snapshot
        rows = snapshot.rows if snapshot else []
        self.query_one("#slots", ListPanel).show([row for row in rows if self._matches(row.facts)])
        why = self.app.events_failure or "no request has ended yet"
        events = [event for event in reversed(self.app.recent) if self._matches(event)]
        self.query_one("#recent", ListPanel).show(events, clean(why, 120))

    @property
    def _wanted(self) -> str:
        return self.query_one("#filter", Input).value.strip().lower()

    def _matches(self, facts: Mapping[str, Any]) -> bool:
        wanted = self._wanted
        return not wanted or any(wanted in clean(facts.get(key)).lower() for key in ("client", "id", "api", "finish", "phase"))

    def _card(self, width: int, height: int) -> list[Line]:
        return panels.card_lines(self.app.snapshot, self.app.trends or NO_TRENDS, width, self.app.marks)

    def _engine(self, width: int, height: int) -> list[Line]:
        app = self.app
        return panels.engine_lines(app.snapshot, app.trends or NO_TRENDS, width, app.marks, app.failure)

    def _log(self, width: int, height: int) -> list[Line]:
        lines = [panels.log_line(event) for event in list(self.app.log_events)[-height:]] if height else []
        return lines or [[(self.app.events_failure or "quiet so far", "dim")]]

    def action_toggle(self, name: str) -> None:
        """Hide or show a panel."""
        panel = self.query_one(f"#{name}")
        panel.styles.display = "none" if panel.display else "block"
        self.call_after_refresh(self.renew_if_whole)

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
        self.query_one("#slots").focus()
        if not self._wanted:
            self.action_leave()

    def action_leave(self) -> None:
        """Drop the filter."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.query_one("#slots").focus()

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """All that is known about a request."""
        facts = event.row.facts if isinstance(event.row, Row) else event.row
        self.app.push_screen(Detail(clean(facts.get("id")) or "request", facts))

    def action_cancel(self) -> None:
        """Cancel the chosen request, after a question."""
        row = self.query_one("#slots", ListPanel).chosen
        if row is None:
            self.app.notify("No request is chosen.")
            return
        name = row.id

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self.app.cancel_request(name)

        self.app.push_screen(Question(f"Cancel the request {name} of {row.client or 'unknown'} ({row.state})?"), answered)

    def action_copy(self) -> None:
        """Copy the chosen row's facts."""
        focused = self.focused if isinstance(self.focused, ListPanel) else self.query_one("#slots", ListPanel)
        row = focused.chosen
        if row is not None:
            facts = row.facts if isinstance(row, Row) else row
            self.app.copy("\n".join(f"{key}: {clean(value)}" for key, value in facts.items()), "the request's figures")


