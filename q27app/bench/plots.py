"""Pictures of reports, from their JSON alone. matplotlib draws them; it is the extra `bench`, nothing else needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from q27app.errors import UsageError, why

MARKERS = "ovs^D<P>X*h"
"""One a stage in the roofline."""
EXTRA_HINT = "Install it with `pip install 'q27app[bench]'`, or draw later, elsewhere: q27app bench plot JOURNAL FILE.png"


def check_plot(path: str | None) -> None:
    """Refuse a plot that could not be drawn, before anything is measured. Raises UsageError."""
    if path is None:
        return
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise UsageError(f"--plot {path}: expected a name ending in .png, .svg or .pdf.")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed.", EXTRA_HINT)


def draw(report: Mapping[str, Any], path: str) -> None:
    """Draw the report of `Report.to_dict`. Raises UsageError if there is nothing to draw or the file cannot be written."""
    check_plot(path)
    painter = PAINTERS.get(report.get("bench", ""))
    if painter is None or not report.get("rows"):
        raise UsageError(f"a report of bench {report.get('bench')} with {len(report.get('rows') or [])} rows has no picture.",
                         f"Pictures: {', '.join(PAINTERS)}.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2 if painter in TWO_PANELS else 1, figsize=(11 if painter in TWO_PANELS else 7.5, 4.5),
                                   layout="constrained")
    try:
        painter(axes, report["rows"], report)
        stamp = report.get("stamp") or {}
        figure.suptitle(f"bench {report['bench']}: {_place(stamp)}, {stamp.get('commit') or stamp.get('version')}, {stamp.get('time')}",
                        fontsize=9)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}.", "Name a file that you may write.") from error
    finally:
        pyplot.close(figure)


def _place(stamp: Mapping[str, Any]) -> str:
    card = stamp.get("card")
    return f"{stamp.get('num_cpus')} cores of {stamp.get('cpu')}" if card in (None, "none") else f"{card}, driver {stamp.get('driver')}"


def _series(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, tuple[list[float], list[float]]]:
    """server -> (x values, y values), where both are known."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if isinstance(row.get(x), (int, float)) and isinstance(row.get(y), (int, float)):
            pair = found.setdefault(str(row.get("server", "")), ([], []))
            pair[0].append(row[x])
            pair[1].append(row[y])
    return found


def _lines(axis: Any, rows: Sequence[Mapping[str, Any]], x: str, y: str, labels: tuple[str, str]) -> None:
    for name, (xs, ys) in _series(rows, x, y).items():
        axis.plot(xs, ys, marker="o", markersize=3.5, label=name)
    axis.set_xlabel(labels[0])
    axis.set_ylabel(labels[1])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _speed(axes: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    deep = [row for row in rows if str(row.get("test", "")).startswith("depth")]
    _lines(axes[0], deep, "num_prompt", "decode_per_s", ("prompt, tokens", "decode, tokens/s"))
    _lines(axes[1], [row for row in deep if row["test"] != "depth 0"], "num_prompt", "prefill_per_s", ("prompt, tokens", "prefill, tokens/s"))


def _concurrency(axes: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    _lines(axes[0], rows, "streams", "aggregate_per_s", ("streams", "all together, tokens/s"))
    _lines(axes[1], rows, "streams", "first_p50_ms", ("streams", "first token, median, ms"))


def _turns(axes: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    _lines(axes[0], rows, "turn", "first_ms", ("turn", "first token, ms"))
    _lines(axes[1], rows, "turn", "wall_s", ("turn", "whole turn, s"))


def _needle(axis: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    depths = report["settings"]["depths"]
    grid = [[row.get(f"depth_{depth}") for depth in depths] for row in rows]
    values = [[float("nan") if value is None else value for value in line] for line in grid]
    axis.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(depths)), [f"{depth}%" for depth in depths])
    axis.set_yticks(range(len(rows)), [f"{row['length']:,}" for row in rows])
    axis.set_xlabel("place of the fact in the text")
    axis.set_ylabel("length, tokens")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axis.text(x, y, "-" if value is None else f"{value:.0f}", ha="center", va="center", fontsize=8)


def _fidelity(axis: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    shown = [row for row in rows if (row.get("mean_kl") or 0) > 0]
    places = range(len(shown))
    for style, key in (("o", "mean_kl"), ("_", "p99"), ("x", "max")):
        axis.plot([max(row[key] or 0, 1e-12) for row in shown], places, style, label=key.replace("_", " "))
    axis.hlines(list(places), [max(row["low"], 1e-12) for row in shown], [row["high"] for row in shown], linewidth=3, alpha=0.5)
    axis.set_yticks(list(places), [str(row["candidate"]) for row in shown], fontsize=7)
    axis.set_xscale("log")
    axis.set_xlabel("KL divergence from the reference, nats a token (bar: 95% interval of the mean)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _kernels(axis: Any, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    """Roofline: arithmetic intensity against TFLOP/s, under the measured peaks."""
    shown = [row for row in rows if row.get("flops") and row.get("bytes")]
    xs = [row["flops"] / row["bytes"] for row in shown]
    gb_per_s, tflops = report["peaks"]["gb_per_s"], report["peaks"]["tflop_per_s"]
    low, high = min([*xs, 0.5]), max([*xs, 100.0]) * 4
    if gb_per_s and tflops:
        ridge = tflops * 1e3 / gb_per_s
        axis.plot([low, ridge, max(high, ridge * 4)], [low * gb_per_s / 1e3, tflops, tflops], color="black", linewidth=1,
                  label=f"measured peaks: {gb_per_s:,.0f} GB/s, {tflops:,.0f} TFLOP/s")
    stages = list(dict.fromkeys(row["stage"] for row in shown))
    for number, pass_name in enumerate(dict.fromkeys(row["pass"] for row in shown)):
        axis.plot([], [], "s", color=f"C{number}", label=pass_name)
        for x, row in zip(xs, shown, strict=True):
            if row["pass"] == pass_name:
                axis.plot(x, row["tflop_per_s"], MARKERS[stages.index(row["stage"]) % len(MARKERS)], color=f"C{number}", markersize=6)
    for stage in stages:
        axis.plot([], [], MARKERS[stages.index(stage) % len(MARKERS)], color="grey", label=stage)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("arithmetic intensity, FLOP/byte")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=6, loc="lower right")


PAINTERS: dict[str, Callable[[Any, Sequence[Mapping[str, Any]], Mapping[str, Any]], None]] = {
    "speed": _speed, "concurrency": _concurrency, "turns": _turns, "needle": _needle, "fidelity": _fidelity, "kernels": _kernels,
}
TWO_PANELS = (_speed, _concurrency, _turns)


def read_report(path: Path) -> dict[str, Any]:
    """A report's JSON: a file that is one object, or the last line of a log. Raises UsageError."""
    import json

    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        value = json.loads(lines[-1]) if lines else None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path} holds no report: {why(error)}.", "Give what a benchmark printed with --json.") from error
    if not isinstance(value, dict) or "bench" not in value:
        raise UsageError(f"{path} holds no report.", "Give what a benchmark printed with --json.")
    return value
