"""What every full screen has: the top bar, a body, the key bar, and one line instead where the terminal is tiny."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widget import Widget

from q27app.tui import panels
from q27app.tui.marks import Line
from q27app.tui.widgets.lines import Bar, Lines

if TYPE_CHECKING:
    from q27app.tui.app import Q27App

MIN_WIDTH, MIN_HEIGHT = 40, 12
LOW_HEIGHT = 30


class Room(Screen[None]):
    """A full screen. KEYS: (key as shown, what it does), the most important first: what the key bar shows and help lists."""

    KEYS: ClassVar[list[tuple[str, str]]] = []
    app: Q27App

    def compose(self) -> ComposeResult:
        yield Bar(self._top, id="top")
        yield Lines(self._tiny, id="tiny")
        with Vertical(id="body"):
            yield from self.compose_body()
        yield Bar(self._keys, id="keys")

    def compose_body(self) -> Iterable[Widget]:
        """The screen's own widgets."""
        return ()

    def on_mount(self) -> None:
        """Looks that depend on the terminal."""
        self.set_class(self.app.marks.is_ascii, "-ascii")

    def on_resize(self, event: events.Resize) -> None:
        """The size classes that app.tcss knows."""
        width, height = event.size
        self.set_class(width < MIN_WIDTH or height < MIN_HEIGHT, "-tiny")
        for name, is_so in (("-narrow", width < 80), ("-normal", 80 <= width < 120), ("-wide", width >= 120),
                            ("-low", height < LOW_HEIGHT), ("-high", height >= LOW_HEIGHT)):
            self.set_class(is_so, name)
        self.call_after_refresh(self.renew_if_whole)

    def renew_if_whole(self) -> None:
        """Draw what has changed, unless the screen isn't built yet or is being taken apart."""
        if self.is_mounted:
            try:
                self.renew()
            except NoMatches:
                return

    def renew(self) -> None:
        """Draw what has changed."""
        self.query_one("#top", Bar).renew()
        self.query_one("#keys", Bar).renew()
        self.query_one("#tiny", Lines).renew()

    def _top(self) -> list[Line]:
        app = self.app
        extra: Line = [("daemon in this window  ", "dim")] if app.is_hosting and self.size.width >= 120 else []
        extra += [("frozen  ", "warn")] if app.is_frozen else []
        width = self.size.width - 2 - sum(len(text) for text, _ in extra)
        left, right = panels.top_line(app.snapshot, app.address, app.failure, app.age_s, app.marks, width)
        return [left, [*extra, *right]]

    def _tiny(self, width: int, height: int) -> list[Line]:
        return [self._top()[0]]

    def _keys(self) -> list[Line]:
        line: Line = []
        room = self.size.width - 2
        for key, what in self.KEYS:
            spans = [(key, "accent"), (f" {what}  ", "dim")]
            if sum(len(text) for text, _ in line + spans) - 2 > room:
                break
            line += spans
        return [line, []]
