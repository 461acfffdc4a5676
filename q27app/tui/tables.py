"""The columns of the tables: what is dropped first where there is no room, and the cells of a row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from q27app.tui import figures
from q27app.tui.marks import Line
from q27app.tui.panels import clock_time
from q27app.tui.snapshot import Row, clean, count, number


MIN_OPEN = 12
"""Least width of the column that takes what is left."""


@dataclass(frozen=True)
class Column:
    """rank: 0 stays always, the highest goes first. is_right: numbers. A width of 0 takes what is left, at least MIN_OPEN."""

    title: str
    width: int
    cell: Callable[[Any], str]
    rank: int = 0
    is_right: bool = True
    role: Callable[[Any], str] = lambda row: ""


def _state_role(row: Row) -> str:
    return {"decode": "good", "queued": "warn"}.get(row.state, "accent")


def _finish_role(event: Mapping[str, Any]) -> str:
    word = clean(event.get("finish"), 20).partition(":")[0]
    return {"error": "bad", "cancelled": "warn", "disconnected": "warn"}.get(word, "")


SLOT_COLUMNS = (
    Column("slot", 4, lambda row: figures.DASH if row.slot is None else str(row.slot)),
    Column("state", 12, lambda row: row.state, 0, False, _state_role),
    Column("client", 0, lambda row: row.client, 1, False),
    Column("context", 8, lambda row: figures.thousands(row.num_context)),
    Column("tok/s", 6, lambda row: figures.rate(row.tokens_per_s), 1),
    Column("first", 8, lambda row: figures.milliseconds(row.first_token_ms), 3),
    Column("cached", 6, lambda row: figures.percent(row.num_cached / row.num_prompt if row.num_prompt else None), 2),
    Column("age", 7, lambda row: figures.duration(row.age_s), 4),
)

RECENT_COLUMNS = (
    Column("time", 8, clock_time, 2, False),
    Column("api", 10, lambda event: clean(event.get("api"), 10), 4, False),
    Column("client", 0, lambda event: clean(event.get("client"), 60), 1, False),
    Column("prompt", 8, lambda event: figures.thousands(count(event, "num_prompt"))),
    Column("cached", 6, lambda event: figures.percent(
        count(event, "num_cached") / count(event, "num_prompt") if count(event, "num_prompt") else None), 2),
    Column("made", 7, lambda event: figures.thousands(count(event, "num_generated"))),
    Column("first", 8, lambda event: figures.milliseconds(number(event, "first_token_ms")), 3),
    Column("tok/s", 6, lambda event: figures.rate(number(event, "tokens_per_s"))),
    Column("end", 12, lambda event: clean(event.get("finish"), 12), 0, False, _finish_role),
)


def chosen(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit `width`, with their widths."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width or MIN_OPEN for column in kept) + len(kept) - 1 > width:
        highest = max(column.rank for column in kept)
        kept.remove(next(column for column in reversed(kept) if column.rank == highest))
    left = width - sum(column.width for column in kept) - len(kept) + 1
    return [(column, column.width or max(0, left)) for column in kept]


def header(columns: Sequence[tuple[Column, int]]) -> Line:
    return [(" ".join(_fit(column.title, width, column.is_right) for column, width in columns), "dim")]


def line(columns: Sequence[tuple[Column, int]], row: Any) -> Line:
    spans: Line = []
    for index, (column, width) in enumerate(columns):
        spans.append((" " * bool(index) + _fit(column.cell(row), width, column.is_right), column.role(row)))
    return spans


def _fit(text: str, width: int, is_right: bool) -> str:
    if len(text) > width:
        text = text[: max(0, width - 1)] + "~"[:width]
    return text.rjust(width) if is_right else text.ljust(width)
