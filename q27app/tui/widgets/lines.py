"""Lines with roles as what Textual draws, and the panels that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from q27app.tui.marks import Line

STYLES = {
    "": "", "bold": "bold", "dim": "dim", "good": "$text-success", "warn": "$text-warning", "bad": "$text-error bold",
    "accent": "$text-accent", "part0": "$primary", "part1": "$accent", "part2": "$success", "part3": "$warning",
    "part4": "$secondary", "cursor": "reverse",
}


def content_of(lines: Sequence[Line], width: int, extra: dict[int, str] | None = None) -> Content:
    """The lines, each cut to `width` cells. extra: line -> the style of all of it."""
    parts: list[Any] = []
    for index, line in enumerate(lines):
        if index:
            parts.append("\n")
        used = 0
        over = (extra or {}).get(index, "")
        for text, role in line:
            text = text if cell_len(text) <= width - used else set_cell_size(text, max(0, width - used))
            used += cell_len(text)
            parts.append((text, over or STYLES.get(role, "")))
        if over and used < width:
            parts.append((" " * (width - used), over))
    return Content.assemble(*parts)


class Lines(Widget):
    """Draws what `read` gives for its size; `refresh_lines` draws again only if that has changed."""

    def __init__(self, read: Callable[[int, int], Sequence[Line]], title: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._read = read
        self._shown: tuple[Any, ...] = ()
        self.border_title = title or None

    def renew(self) -> None:
        """Look again, and draw if something is new."""
        if self._content_key() != self._shown:
            self.refresh()

    def _content_key(self) -> tuple[Any, ...]:
        width, height = self.content_size.width, self.content_size.height
        return width, height, [list(line) for line in self._read(width, height)[:height]] if width and height else []

    def render(self) -> Content:
        self._shown = self._content_key()
        width, height = self.content_size
        return content_of(self._shown[2], width)


class ListPanel(Widget, can_focus=True):
    """Rows under a header, one of them chosen. Owner of the cursor; rows are known by a key, so that the cursor follows its row.

    Keys: up, down, home, end, page up, page down, enter; a click chooses, a click on the chosen row opens.
    """

    class Opened(Message):
        """Enter, or a click on the chosen row."""

        def __init__(self, panel: ListPanel, row: Any) -> None:
            super().__init__()
            self.panel, self.row = panel, row

    class Moved(Message):
        """Another row is chosen."""

    BINDINGS = [("up", "move(-1)"), ("down", "move(1)"), ("pageup", "move(-10)"), ("pagedown", "move(10)"),
                ("home", "move(-1000000)"), ("end", "move(1000000)"), ("enter", "open")]
    cursor_key: reactive[Any] = reactive(None)

    def __init__(self, header: Callable[[int], Line], draw: Callable[[Any, int], Line], key: Callable[[Any], Any],
                 empty: str, title: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._header, self._draw, self._key, self._empty = header, draw, key, empty
        self._rows: list[Any] = []
        self._first = 0
        self._place: str | None = None
        self._shown: tuple[Any, ...] = ()
        self.border_title = title or None

    def watch_cursor_key(self) -> None:
        """Tell who shows more of the chosen row."""
        self.post_message(self.Moved())

    def show(self, rows: Sequence[Any], empty: str | None = None) -> None:
        """The rows from now on."""
        self._rows = list(rows)
        self._empty = self._empty if empty is None else empty
        if self._content_key() != self._shown:
            self.refresh()

    @property
    def chosen(self) -> Any:
        """The row under the cursor, or None."""
        index = self._cursor()
        return None if index is None else self._rows[index]

    def choose(self, key: Any) -> None:
        """Put the cursor on a row."""
        self.cursor_key = key

    def _cursor(self) -> int | None:
        if not self._rows:
            return None
        return next((index for index, row in enumerate(self._rows) if self._key(row) == self.cursor_key), 0)

    def action_move(self, step: int) -> None:
        """Move the cursor."""
        index = self._cursor()
        if index is not None:
            self.cursor_key = self._key(self._rows[min(len(self._rows) - 1, max(0, index + step))])

    def action_open(self) -> None:
        """Open the chosen row."""
        if self.chosen is not None:
            self.post_message(self.Opened(self, self.chosen))

    def on_click(self, event: events.Click) -> None:
        """Choose, then open."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y < 1:
            return
        index = self._first + offset.y - 1
        if index < len(self._rows):
            key = self._key(self._rows[index])
            if key == self.cursor_key:
                self.action_open()
            self.cursor_key = key

    def on_mouse_scroll_down(self) -> None:
        """The wheel moves the cursor."""
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        """The wheel moves the cursor."""
        self.action_move(-3)

    def _content_key(self) -> tuple[Any, ...]:
        width, height = self.content_size
        if not width or not height:
            return ()
        if not self._rows:
            return width, height, self.has_focus, [[(self._empty, "dim")]], None, None
        cursor = self._cursor() or 0
        room = max(1, height - 1)
        first = min(max(0, len(self._rows) - room), self._first)
        self._first = min(max(first, cursor - room + 1), cursor)
        rows = [self._draw(row, width) for row in self._rows[self._first : self._first + room]]
        place = f"{self._first + 1}-{self._first + len(rows)} of {len(self._rows)}"
        place = place if len(rows) < len(self._rows) else None
        return width, height, self.has_focus, [self._header(width), *rows], cursor - self._first + 1, place

    def _tell_place(self, place: str | None) -> None:
        """Setting a subtitle draws the panel again, even if it is the same."""
        if place != self._place:
            self._place = self.border_subtitle = place

    def render(self) -> Content:
        self._shown = self._content_key()
        if not self._shown:
            return Content("")
        width, height, has_focus, lines, cursor, place = self._shown
        if place != self._place:
            self.call_later(self._tell_place, place)  # a border cannot change while it is being drawn
        return content_of(lines[:height], width, {cursor: "reverse"} if has_focus and cursor else None)


class Bar(Widget):
    """One line with a left part and a right part; the right part stays, the left is cut."""

    def __init__(self, read: Callable[[], Sequence[Line]], **options: Any) -> None:
        super().__init__(**options)
        self._read = read
        self._shown: tuple[Any, ...] = ()

    def renew(self) -> None:
        """Look again, and draw if something is new."""
        if self._line() != self._shown:
            self.refresh()

    def _line(self) -> tuple[Any, ...]:
        left, right = self._read()
        width = self.content_size.width
        return width, tuple(left), tuple(right)

    def render(self) -> Content:
        self._shown = self._line()
        width, left, right = self._shown
        room = max(0, width - sum(cell_len(text) for text, _ in right) - (1 if right else 0))
        used = min(room, sum(cell_len(text) for text, _ in left))
        cut = content_of([list(left)], room)
        gap = " " * (width - used - sum(cell_len(text) for text, _ in right)) if right else ""
        return Content.assemble(cut, gap, content_of([list(right)], width))
