"""Commands that measure: bench demo-eval."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import click


@click.group()
def bench() -> None:
    """Measure the model's answers.

    Each result comes with its conditions.
    """


@bench.command("demo-eval")
@click.option("--model", "-m", default="demo", show_default=True, metavar="M",
              help="Path, name in the models folder, or demo.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--template", metavar="auto|json|xml", help="How a conversation becomes a prompt; which tool dialect.")
@click.option("--count", type=click.IntRange(1), help="Examples of each task and split; all of them by default.")
@click.option("--task", "tasks", multiple=True, metavar="T", help="Only this task; may be given several times.")
@click.option("--failures", is_flag=True, help="Also print every wrong answer, to standard error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def demo_eval(model: str, backend: str | None, template: str | None, count: int | None, tasks: tuple[str, ...],
              failures: bool, as_json: bool) -> None:
    """Score the bundled model on its held-out sets.

    Two splits: "held" has other values, "new" also other wordings, names and tools than the training text.
    """
    from q27app.bench.demo_eval import load_cases, scores, table
    from q27app.chat.template import open_template
    from q27app.cli_generate import start_engine, tokenizer_of
    from q27app.config import load_config
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    cases = load_cases(count, tasks)
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
    finally:
        engine.close()
    tier = metadata.get("q27app.tier", "")
    if as_json:
        click.echo(json.dumps({"model": config.model.path, "tier": tier, "examples": len(cases), "scores": found}))
        return
    click.echo(f"{config.model.path}, tier {tier}, {len(cases)} examples, greedy\n{table(found)}")


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {total}" + ("\n" if done == total else ""), nl=False, err=True)


def _complain(case: Any, answer: Any, right: bool) -> None:
    if not right:
        question = next((part.text for part in reversed(case.request.messages[-1].parts) if hasattr(part, "text")), "")
        said = answer.text or json.dumps([dict(call) for call in answer.calls])
        click.echo(f"{case.task} {case.split}: {question[-120:]!r}\n  said {said[:200]!r}\n"
                   f"  check {json.dumps(case.check)[:200]}", err=True)
