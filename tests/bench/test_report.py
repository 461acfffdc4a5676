"""A report's JSON and table keep what was measured, small figures too."""

from __future__ import annotations

import json

from q27app.bench.report import Column, Report, table


def test_small_figures_survive_and_what_is_no_number_is_null():
    report = Report("x", {"card": "none"}, [Column("kl", "KL", 3)], [{"kl": 6.5e-10}, {"kl": float("nan")}, {"kl": 1 / 3}])
    found = json.loads(report.json_line())["rows"]
    assert [row["kl"] for row in found] == [6.5e-10, None, 0.333333333]
    assert [line.split("|")[1].strip() for line in table(report.columns, report.rows).splitlines()[2:]] == ["6.5e-10", "-", "0.333"]
