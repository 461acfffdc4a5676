"""The conversation as lines that are drawn once: a virtual view over sections, each with the lines of one block.

Owner of the sections and the scroll position. A finished block is drawn once a width; only the open block of a streaming
answer is drawn again. The view follows its end until someone scrolls up. Drawing that is not needed at once (a long
conversation that has just been opened, a new width) happens in slices of DRAW_SLICE_S, what is at the end first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from q27app.tui.widgets.drawing import draw

DRAW_SLICE_S = 0.015


@dataclass(eq=False)
class Section:
    """One block. kind: as `drawing.draw` knows it. gap: blank lines above. owner: given back when it is clicked."""

    kind: str
    source: str
    gap: int = 0
    owner: object = None
    lines: list[Strip] = field(default_factory=list)
    width: int = 0

    def height(self, width: int) -> int:
        """Lines with the gap; a guess while it isn't drawn."""
        if self.width:
            return self.gap + len(self.lines)
        return self.gap + self.source.count("\n") + len(self.source) // max(1, width) + 1

    def replace(self, source: str) -> None:
        """Another text; it is drawn again."""
        if source != self.source:
            self.source, self.width = source, 0


class Transcript(ScrollView, can_focus=True):
    """Shows sections."""

    BINDINGS = [("home", "scroll_home", "Start"), ("end", "scroll_end", "End")]

    class Clicked(Message):
        """A section with an owner was clicked."""

        def __init__(self, owner: object) -> None:
            super().__init__()
            self.owner = owner

    class Followed(Message):
        """The view has begun or ceased to follow its end."""

        def __init__(self, is_following: bool) -> None:
            super().__init__()
            self.is_following = is_following

    def __init__(self, is_ascii: bool = False, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.is_following = True
        self._is_settling = False
        self.num_drawn = 0
        self._is_ascii = is_ascii
        self._sections: list[Section] = []
        self._starts: list[int] = [0]
        self._has_work = False
        self._base = Style()

    @property
    def sections(self) -> Sequence[Section]:
        return self._sections

    def show(self, sections: Sequence[Section]) -> None:
        """The sections from now on; those that were drawn stay drawn."""
        self._sections = list(sections)
        self._lay_out()

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._set_following(True)
        self._keep_end()

    def _keep_end(self) -> None:
        """Go to the end now, and once more when the new size is laid out: until then the old one bounds the scrolling."""
        self._is_settling = True
        self.scroll_end(animate=False, immediate=True, x_axis=False)
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        if self.is_following:
            self.scroll_end(animate=False, immediate=True, x_axis=False)

    def _draw_missing(self) -> bool:
        """Draw from the end upwards until the slice is used. True if something is left."""
        width = self._draw_width
        limit = time.perf_counter() + DRAW_SLICE_S
        for section in reversed(self._sections):
            if section.width == width:
                continue
            if time.perf_counter() > limit:
                return True
            section.lines = draw(section.kind, section.source, width, self._is_ascii, self.app.current_theme.dark)
            section.width = width
            self.num_drawn += 1
        return False

    @property
    def _draw_width(self) -> int:
        return max(8, self.scrollable_content_region.width)

    def _lay_out(self) -> None:
        """Draw, sum the heights, keep the place."""
        if not self.size.width:
            return
        place = self._place()
        is_incomplete = self._draw_missing()
        width = self._draw_width
        self._starts = [0, *accumulate(section.height(width) for section in self._sections)]
        self.virtual_size = Size(width, self._starts[-1])
        if self.is_following:
            self._keep_end()
        elif place is not None:
            section, offset = place
            index = next((index for index, other in enumerate(self._sections) if other is section), None)
            if index is not None and self._starts[index] + offset != self.scroll_offset.y:
                self.scroll_to(y=self._starts[index] + offset, animate=False, immediate=True)
        self.refresh()
        if is_incomplete and not self._has_work:
            self._has_work = True
            self.set_timer(0.01, self._go_on)

    def _go_on(self) -> None:
        self._has_work = False
        self._lay_out()

    def _place(self) -> tuple[Section, int] | None:
        """The section at the top of the view and the line of it."""
        y = int(self.scroll_offset.y)
        index = bisect_right(self._starts, y) - 1
        is_there = 0 <= index < min(len(self._sections), len(self._starts))
        return (self._sections[index], y - self._starts[index]) if is_there else None

    def _set_following(self, is_following: bool) -> None:
        if is_following != self.is_following:
            self.is_following = is_following
            self.post_message(self.Followed(is_following))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolling up leaves the end, scrolling down to it follows again."""
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value and new_value < self.max_scroll_y and not self._is_settling:
            self._set_following(False)
        elif new_value >= self.max_scroll_y:
            self._set_following(True)

    def on_resize(self, event: events.Resize) -> None:
        """Another width: draw everything again, the end first."""
        self._lay_out()

    def notify_style_update(self) -> None:
        """Another theme."""
        super().notify_style_update()
        for section in self._sections:
            section.width = 0
        self._lay_out()

    def on_click(self, event: events.Click) -> None:
        """Tell whose section it is."""
        offset = event.get_content_offset(self)
        if offset is not None:
            index = bisect_right(self._starts, int(self.scroll_offset.y) + offset.y) - 1
            if 0 <= index < len(self._sections) and self._sections[index].owner is not None:
                self.post_message(self.Clicked(self._sections[index].owner))

    def _line(self, y: int) -> Strip | None:
        index = bisect_right(self._starts, y) - 1
        if not 0 <= index < len(self._sections):
            return None
        section = self._sections[index]
        place = y - self._starts[index] - section.gap
        return section.lines[place] if 0 <= place < len(section.lines) else None

    def render_lines(self, crop: Region) -> list[Strip]:
        """Lines of the view; the widget's own style is the same for all of them."""
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """A line of the view."""
        width, base = self.scrollable_content_region.width, self._base
        row = int(self.scroll_offset.y) + y
        strip = self._line(row)
        if strip is None:
            return Strip.blank(width, base).apply_offsets(0, row)
        strip = Strip(list(strip), strip.cell_length)  # a strip keeps what is made of it; this one goes with the frame
        strip = strip.apply_style(base).crop_extend(0, width, base)
        if (selection := self.text_selection) is not None and (span := selection.get_span(row)) is not None:
            strip = self._selected(strip, span, width)
        return strip.apply_offsets(0, row)

    def _selected(self, strip: Strip, span: tuple[int, int], width: int) -> Strip:
        start, end = span[0], width if span[1] == -1 else span[1]
        mark = Style(reverse=True)
        return Strip.join([strip.crop(0, start), strip.crop(start, end).apply_style(mark), strip.crop(end, width)])

    def text_lines(self) -> list[str]:
        """What is drawn, as text."""
        return [strip.text.rstrip() if (strip := self._line(y)) is not None else "" for y in range(self._starts[-1])]

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text under a mouse selection."""
        return selection.extract("\n".join(self.text_lines())), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw the selection."""
        self.refresh()

    def find(self, wanted: str) -> bool:
        """Scroll to the nearest line above with this text, starting again from the end."""
        lines = self.text_lines()
        top = int(self.scroll_offset.y)
        hits = [y for y, text in enumerate(lines) if wanted.lower() in text.lower()]
        if not hits:
            return False
        above = [y for y in hits if y < top]
        self._set_following(False)
        self.scroll_to(y=max(0, above[-1] if above else hits[-1]), animate=False, immediate=True)
        return True
