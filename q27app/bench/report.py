"""A finished or interrupted measurement as text, CSV and one JSON object.

A report is the conditions (`stamp`), a table, and whatever else the benchmark found (`totals`). The text form ends in the
JSON object on one line, so that a log can be read by people and by programs.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q27app.bench.stamp import stamp_lines
from q27app.errors import UsageError


@dataclass(frozen=True)
class Column:
    """One column: the row's member `key` under `title`. digits: decimals of a number; None: as it is."""

    key: str
    title: str
    digits: int | None = None

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        if isinstance(value, float) and self.digits is not None and value and abs(value) < 0.5 * 10 ** -self.digits:
            return f"{value:.1e}"
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self.digits is not None:
            return f"{value:,.{self.digits}f}"
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@dataclass
class Report:
    """bench: its name. rows: of the table. totals: figures beside it. notes: sentences for people."""

    bench: str
    stamp: Mapping[str, Any]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    totals: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is not a number is null."""
        return _plain({"bench": self.bench, "stamp": dict(self.stamp), "rows": [dict(row) for row in self.rows],
                       **self.totals, "notes": self.notes})

    def json_line(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def text(self) -> str:
        """Conditions, table, notes."""
        parts = [*stamp_lines(self.stamp), "", table(self.columns, self.rows), *([""] if self.notes else []), *self.notes]
        return "\n".join(parts)

    def csv_text(self) -> str:
        """The rows with a header line: the table's columns, then the conditions that name a measurement."""
        names = ("server", "model", "tier", "kv", "backend", "card", "driver", "power_limit_w", "commit", "version", "time")
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([*(column.key for column in self.columns), *names])
        for row in self.rows:
            writer.writerow([*(_csv_cell(row.get(column.key)) for column in self.columns),
                             *(_csv_cell(row.get(name, self.stamp.get(name))) for name in names)])
        return target.getvalue()


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """An aligned Markdown table; columns that are empty in every row are left out."""
    rows = list(rows)
    shown = [column for column in columns if any(column.cell(row) != "-" for row in rows)] or list(columns[:1])
    cells = [[column.cell(row) for column in shown] for row in rows]
    widths = [max([len(column.title), *(len(line[index]) for line in cells)]) for index, column in enumerate(shown)]
    right = [column.digits is not None for column in shown]

    def line(values: Sequence[str]) -> str:
        padded = (value.rjust(width) if is_right else value.ljust(width)
                  for value, width, is_right in zip(values, widths, right, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True)) + "|"
    return "\n".join([line([column.title for column in shown]), rule, *(line(each) for each in cells)])


def write_text(path: str, text: str) -> None:
    """Raises UsageError if the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}.", "Name a file that you may write.") from error


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def variation(values: Sequence[float]) -> float | None:
    """Coefficient of variation, percent: standard deviation over mean; None with fewer than two values."""
    if len(values) < 2 or not any(values):
        return None
    middle = sum(values) / len(values)
    return 100 * math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1)) / middle


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed, linear between neighbours."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _csv_cell(value: Any) -> Any:
    return "" if value is None else value


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
