"""Bars, curves and signs, in box drawing and braille or in plain ASCII. No emoji: their width differs between terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[str, str]
"""(text, role); roles: "", bold, dim, good, warn, bad, accent, part0 to part4."""
Line = list[Span]

_LEFT_DOTS = (0x00, 0x40, 0x44, 0x46, 0x47)
_RIGHT_DOTS = (0x00, 0x80, 0xA0, 0xB0, 0xB8)
_ASCII_LEVELS = " .:-=+*#"


@dataclass(frozen=True)
class Marks:
    """is_ascii: nothing above 7 bits."""

    is_ascii: bool = False

    @property
    def dot(self) -> str:
        return "|" if self.is_ascii else "\u00b7"

    @property
    def folded(self) -> str:
        return "+" if self.is_ascii else "\u25b8"

    @property
    def unfolded(self) -> str:
        return "-" if self.is_ascii else "\u25be"

    @property
    def cursor(self) -> str:
        return ">" if self.is_ascii else "\u25b8"

    @property
    def down(self) -> str:
        return "v" if self.is_ascii else "\u2193"

    @property
    def fills(self) -> str:
        """One mark a part of a bar, then the mark of what is free."""
        return "#=+-o." if self.is_ascii else "\u2588\u2593\u2592\u2591\u25aa\u2500"

    def bar(self, shares: Sequence[float], width: int) -> Line:
        """Parts of a whole, a span each, the rest free. A part over nothing gets at least one cell while there is room."""
        spans: Line = []
        used, sum_before = 0, 0.0
        for index, share in enumerate(shares[:5]):
            sum_before += max(0.0, share)
            end = min(width, max(round(sum_before * width), used + (share > 0)))
            if end > used:
                spans.append((self.fills[index] * (end - used), f"part{index}"))
                used = end
        if used < width:
            spans.append((self.fills[5] * (width - used), "dim"))
        return spans

    def curve(self, figures: Sequence[float | None], width: int, top: float | None = None) -> str:
        """The latest figures as one line, newest at the right. top: the figure of full height; default: the largest.

        Braille shows two figures a cell. More figures than that are joined, each group by its largest.
        """
        per_cell = 1 if self.is_ascii else 2
        values = _joined(figures, width * per_cell)
        top = top or max((value or 0.0 for value in values), default=0.0) or 1.0
        if self.is_ascii:
            last = len(_ASCII_LEVELS) - 1
            return "".join(_ASCII_LEVELS[_level(value, top, last)] for value in values)
        levels = [_level(value, top, 4) for value in values]
        return "".join(chr(0x2800 | _LEFT_DOTS[left] | _RIGHT_DOTS[right]) for left, right in zip(levels[::2], levels[1::2]))


def _level(value: float | None, top: float, highest: int) -> int:
    if not value or value < 0:
        return 0
    return min(highest, max(1, round(value / top * highest)))


def _joined(figures: Sequence[float | None], num_places: int) -> list[float | None]:
    if len(figures) > num_places > 0:
        size = -(-len(figures) // num_places)
        start = len(figures) % size - size if len(figures) % size else 0
        figures = [max((value for value in figures[max(0, index) : index + size] if value is not None), default=None)
                   for index in range(start, len(figures), size)]
    return [None] * (num_places - len(figures)) + list(figures[-num_places:] if num_places else [])


def width_of(line: Line) -> int:
    """Characters of a line; every mark used here is one cell wide."""
    return sum(len(text) for text, _ in line)


def plain(line: Line) -> str:
    """A line without roles."""
    return "".join(text for text, _ in line).rstrip()
