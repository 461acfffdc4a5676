"""Commands that measure: the group, what its commands share, and bench demo-eval."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from q27app.errors import Q27Error

if TYPE_CHECKING:
    from q27app.bench.report import Report


@click.group()
def bench() -> None:
    """Measure the model's answers.

    Each result comes with its conditions: card, driver, power, link, commit, tier, KV format, command. Whatever is
    measured is in a file at once; the same command with --out FILE goes on where it was stopped.
    """


class _Numbers(click.ParamType):
    """Whole numbers from 0, separated by commas; - is none."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",") if word.strip() not in ("", "-")]
        bad = next((word for word in words if not (word.isascii() and word.isdigit() and len(word) <= 9)), None)
        if bad is not None or len(words) > 1000:
            self.fail(f"{(bad or value)[:40]!r}: expected whole numbers separated by commas.", param, ctx)
        return list(dict.fromkeys(int(word) for word in words))


LISTS = _Numbers()


def report_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where a report goes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object, nothing else."),
        click.option("--plot", metavar="FILE.png", help="Also draw it (needs the extra bench)."),
        click.option("--csv", "csv_path", metavar="FILE", help="Also write the table as CSV."),
        click.option("--out", metavar="FILE", help="Journal; an existing one goes on. Default: a new one in the state folder."),
    ):
        function = option(function)
    return function


def journal_path(out: str | None, name: str) -> Path:
    """The journal's place; without --out a name that no journal has."""
    from itertools import count

    from q27app.paths import ensured, state_dir

    if out:
        return Path(out)
    folder, start = ensured(state_dir() / "bench"), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (folder / f"{start}{f'-{number}' if number else ''}.jsonl" for number in count())
    return next(path for path in names if not path.exists())


def say_progress(as_json: bool) -> Callable[[str], None]:
    """Prints a line to standard error, or nothing where only JSON is wanted."""
    def say(line: str) -> None:
        if not as_json:
            click.echo(line, err=True)
    return say


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends a measurement as Ctrl-C does: with a report of what is there. So does Ctrl-C where it was ignored until now, as
    it is for what a script has in the background: to asyncio, only what interrupts can end a measurement in good order."""
    def as_interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, as_interrupt), signal.SIGINT: signal.getsignal(signal.SIGINT)}
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_report(report: Report, options: dict[str, Any], problem: BaseException | None = None, path: Path | None = None) -> None:
    """Print the report, write its files, then raise what ended the measurement early."""
    import os

    from q27app.bench.plots import draw
    from q27app.bench.report import write_text

    report.totals["load_average_end"] = round(os.getloadavg()[0], 2)
    if problem is not None:
        report.notes.append(f"Incomplete; {path} has what is above, the same command with --out {path} goes on.")
    if report.rows:
        click.echo(report.json_line() if options["as_json"] else f"{report.text()}\n\n{report.json_line()}")
        if options["csv_path"]:
            write_text(options["csv_path"], report.csv_text())
        if options["plot"]:
            draw(report.to_dict(), options["plot"])
    if problem is not None:
        raise problem
    if not report.rows:
        raise Q27Error("nothing was measured.", "The settings ask for no test.")


@bench.command("demo-eval")
@click.option("--model", "-m", default="demo", show_default=True, metavar="M",
              help="Path, name in the models folder, or demo.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--template", metavar="auto|json|xml", help="How a conversation becomes a prompt; which tool dialect.")
@click.option("--count", type=click.IntRange(1), help="Examples of each task and split; all of them by default.")
@click.option("--task", "tasks", multiple=True, metavar="T", help="Only this task; may be given several times.")
@click.option("--split", "splits", multiple=True, metavar="held|new|blind", help="Only this split; may be given several times.")
@click.option("--failures", is_flag=True, help="Also print every wrong answer, to standard error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def demo_eval(model: str, backend: str | None, template: str | None, count: int | None, tasks: tuple[str, ...],
              splits: tuple[str, ...], failures: bool, as_json: bool) -> None:
    """Score the bundled model on its held-out sets.

    Splits: "held" has other values, "new" also other wordings, names and tools than the training text; "blind", for calls
    and recall, was never looked at while the text was made.
    """
    from q27app.bench.demo_eval import load_cases, scores, table
    from q27app.bench.stamp import make_stamp, stamp_lines
    from q27app.chat.template import open_template
    from q27app.cli_generate import start_engine, tokenizer_of
    from q27app.config import load_config
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    cases = load_cases(count, tasks, splits)
    config = load_config({"model.path": model, "model.backend": backend, "model.template": template})
    if config.model.context == "auto":
        config = replace(config, model=replace(config.model, context=8192))
    tokenizer = tokenizer_of(config.model.path)
    with open_container(resolve_model(config.model.path)) as container:
        metadata = dict(container.metadata)
    engine = start_engine(config)
    try:
        found = scores(engine, tokenizer, open_template(metadata, tokenizer, config.model.template), cases,
                       None if as_json else _progress, _complain if failures else None)
        info = engine.status().model
        served = {"kv": info.get("kv_format"), "backend": info.get("backend"), "context": engine.max_context}
    finally:
        engine.close()
    tier = metadata.get("q27app.tier", "")
    stamp = make_stamp(model=config.model.path, tier=tier, **served)
    if as_json:
        click.echo(json.dumps({"model": config.model.path, "tier": tier, "examples": len(cases), "scores": found, "stamp": stamp}))
        return
    click.echo("\n".join([*stamp_lines(stamp), "", f"{len(cases)} examples, greedy", table(found)]))


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {total}" + ("\n" if done == total else ""), nl=False, err=True)


def _complain(case: Any, answer: Any, right: bool) -> None:
    if not right:
        question = next((part.text for part in reversed(case.request.messages[-1].parts) if hasattr(part, "text")), "")
        said = answer.text or json.dumps([dict(call) for call in answer.calls])
        click.echo(f"{case.task} {case.split}: {question[-120:]!r}\n  said {said[:200]!r}\n"
                   f"  check {json.dumps(case.check)[:200]}", err=True)


def _add_commands() -> None:
    from q27app import cli_bench_http, cli_bench_model  # noqa: F401  they add their commands to the group


_add_commands()
