"""Benchmarks of the network itself: bench fidelity, kernels; and bench plot."""

from __future__ import annotations

from typing import Any

import click

from q27app.cli_bench import LISTS, bench, end_report, interruptible, journal_path, report_options, say_progress
from q27app.errors import Q27Error, UsageError


@bench.command()
@click.argument("report", metavar="REPORT")
@click.argument("picture", metavar="FILE.png")
def plot(report: str, picture: str) -> None:
    """Draw a report that was printed with --json, maybe on another machine."""
    from pathlib import Path

    from q27app.bench.plots import check_plot, draw, read_report

    check_plot(picture)
    draw(read_report(Path(report)), picture)
    click.echo(picture)


@bench.command()
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--kv", metavar="K", help="KV format; default: the backend's own.")
@click.option("--rows", type=LISTS, default="1,8,16", show_default=True, metavar="N,N", help="Rows of decode and verify passes.")
@click.option("--positions", type=LISTS, default="10", show_default=True, metavar="P,P", help="Where they stand.")
@click.option("--prefill", type=LISTS, default="2048", show_default=True, metavar="N,N", help="Rows of prefill passes; none: -.")
@report_options
def kernels(model: str | None, backend: str | None, kv: str | None, rows: list[int], positions: list[int], prefill: list[int],
            **options: Any) -> None:
    """Each stage: time, bandwidth, arithmetic, share of the measured peak.

    --plot draws the roofline.
    """
    from q27app.bench import kernels as module
    from q27app.bench.journal import Journal
    from q27app.bench.plots import check_plot
    from q27app.bench.stamp import make_stamp
    from q27app.config import load_config
    from q27app.kernels import open_backend
    from q27app.kernels.batch import MAX_DECODE_ROWS

    if not all(1 <= count <= MAX_DECODE_ROWS for count in rows) or not (rows or prefill) or 0 in prefill:
        raise UsageError(f"--rows {rows}, --prefill {prefill}: expected 1 to {MAX_DECODE_ROWS} rows and 1 or more.")
    check_plot(options["plot"])
    chosen = load_config({"model.path": model, "model.backend": backend, "model.kv": kv}).model
    say = say_progress(options["as_json"])
    opened = open_backend(chosen.backend)
    problem: BaseException | None = None
    try:
        settings = {"model": chosen.path, "kv": module.USUAL_KV[opened.name] if chosen.kv == "auto" else chosen.kv, "rows": rows,
                    "positions": positions if rows else [], "prefill": prefill, "backend": opened.name}
        with Journal(journal_path(options["out"], "kernels"), "kernels", settings, make_stamp(**_facts_of(chosen.path, settings))) as journal:
            say(str(journal.path))
            try:
                with interruptible():
                    _measure_kernels(opened, chosen.path, journal, settings, say)
            except (KeyboardInterrupt, Q27Error) as error:
                problem = error
            peaks = journal.rows.get("peaks", {"gb_per_s": None, "tflop_per_s": None})
            report = module.make_report(journal, {name: peaks[name] for name in ("gb_per_s", "tflop_per_s")})
            end_report(report, options, problem, journal.path)
    finally:
        opened.close()


def _measure_kernels(backend: Any, path: str, journal: Any, settings: dict[str, Any], say: Any) -> None:
    from q27app.bench import kernels as module
    from q27app.model.forward import load_model
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    if not journal.has("peaks"):
        if backend.name == "cuda":
            from dataclasses import asdict

            from q27app.kernels.peaks import measure_peaks

            journal.add("peaks", **asdict(measure_peaks(backend.device)))
        else:
            journal.add("peaks", **module.host_peaks())
    with open_container(resolve_model(path)) as container:
        loaded = load_model(backend, container, module.max_rows(settings))
    state = loaded.allocate_state(settings["kv"], 1, module.blocks_needed(settings), 16)
    module.measure(loaded, state, journal, settings, say)


def _facts_of(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the model's file says."""
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    with open_container(resolve_model(path)) as container:
        tier = str(container.metadata.get("q27app.tier", container.metadata.get("quant_policy", "")))
    return {"model": path, "tier": tier, "kv": settings["kv"], "backend": settings["backend"]}
