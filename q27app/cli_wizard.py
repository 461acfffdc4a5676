"""The command setup: the set-up dialogue of `setup.wizard` as plain prompts, with a flag for every answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from q27app.errors import Q27Error, UsageError

if TYPE_CHECKING:
    from q27app.setup.checkpoints import Checkpoint
    from q27app.setup.facts import Facts
    from q27app.setup.wizard import Question, Trial, Wizard

MAX_TRIES = 20
"""Answers in a row that are none; then the dialogue ends."""
HELP = "A number or an answer's name; enter takes the one with *, b goes back, q leaves everything as it was."


class _Left(Exception):
    """The user wants nothing written."""


@click.command()
@click.option("--yes", "-y", is_flag=True, help="Take the default of every question that no flag answers.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@click.option("--gpu", metavar="UUID|cpu", help="Which card (a UUID or its beginning), or cpu.")
@click.option("--model", metavar="M", help="A model of the models folder, one of the family (Qwen3.6-27B ...), or demo.")
@click.option("--tier", metavar="T", help="Tier.")
@click.option("--kv", metavar="F", help="KV format.")
@click.option("--ctx", metavar="N", help="Window, tokens.")
@click.option("--slots", metavar="N", help="Requests at once.")
@click.option("--download", metavar="REPO:FILE", help="Download the model from there.")
@click.option("--import", "import_path", metavar="PATH", help="Import it: a .q27, a GGUF or a safetensors folder.")
@click.option("--later", is_flag=True, help="Bring the model later.")
@click.option("--trial/--no-trial", default=None, help="Load it and measure.")
@click.option("--idle", metavar="S", help="Give the memory back after so many seconds without a request; 0 = never.")
@click.option("--service/--no-service", default=None, help="Install the systemd user service.")
@click.option("--linger", is_flag=True, help="The service, also without a login.")
@click.option("--access", metavar="open|key|lan", help="Who may ask: this machine, with a key, other machines too.")
@click.option("--clients/--no-clients", default=None, help="Show how coding clients are started.")
def setup(yes: bool, dry_run: bool, gpu: str | None, model: str | None, tier: str | None, kv: str | None, ctx: str | None,
          slots: str | None, download: str | None, import_path: str | None, later: bool, trial: bool | None, idle: str | None,
          service: bool | None, linger: bool, access: str | None, clients: bool | None) -> None:
    """Set up card, model, window, service and key, with reasons.

    Asks step by step, goes back with b, and writes once, at the end. Ctrl-C before that changes no setting. Run it again to
    change an answer: what is set up now is the default.
    """
    from q27app.setup.facts import read_facts
    from q27app.setup.wizard import begin

    facts = read_facts()
    sources = [source for source in (download and f"download:{download}", import_path and f"import:{import_path}",
                                     "later" if later else None) if source]
    if len(sources) > 1:
        raise UsageError("--download, --import and --later were given together.", "Give one of them.")
    given = {"card": gpu, "model": _model_answer(facts, model), "tier": tier, "kv": kv, "context": ctx, "slots": slots,
             "fetch": sources[0] if sources else None, "trial": _word(trial, "yes", "no"), "idle": idle,
             "service": "linger" if linger else _word(service, "yes", "no"), "access": access,
             "clients": _word(clients, "show", "skip")}
    asks = _take_default if yes else _prompt if sys.stdin.isatty() else _refuse
    try:
        _talk(begin(facts, {step: value for step, value in given.items() if value}), asks, dry_run)
    except _Left:
        click.echo("Nothing was written.", err=True)


def _word(wish: bool | None, yes: str, no: str) -> str | None:
    return None if wish is None else yes if wish else no


def _model_answer(facts: Facts, model: str | None) -> str | None:
    """A model's name as an answer: files of the models folder before names of the family."""
    from q27app.setup.wizard import model_name

    if model is not None and any(model_name(entry.path) == model.removesuffix(".q27") for entry in facts.models):
        return f"file:{model.removesuffix('.q27')}"
    return model


def _talk(wizard: Wizard, ask: Callable[[Wizard, Question], Wizard], dry_run: bool) -> None:
    from q27app.setup.finish import finish
    from q27app.setup.wizard import failed, outcome, question, worked

    while wizard.step not in ("done", "left"):
        if wizard.work:
            try:
                wizard = worked(wizard, carry_out(wizard))
            except Q27Error as error:
                if ask is not _prompt:
                    raise
                click.echo(f"  {error}", err=True)
                wizard = failed(wizard, error.message)
            continue
        shown = question(wizard)
        assert shown is not None
        wizard = ask(wizard, shown)
    if wizard.step == "left":
        raise _Left
    made = outcome(wizard)
    if dry_run:
        for key, value in made.settings.items():
            click.echo(f"{key} = {value!r}")
        raise _Left
    finish(made, click.echo)
    if made.shows_clients:
        _show_clients(wizard)
    click.echo("Next: " + ("q27app status" if made.service else "q27app serve"))


def _show(wizard: Wizard, shown: Question) -> None:
    click.echo(f"\n{shown.title}")
    for line in shown.text:
        click.echo(f"  {line}")
    for number, option in enumerate(shown.options, 1):
        mark = "*" if option.value == shown.default else " "
        place = f"{number:>2}" if option.is_possible else " -"
        click.echo(f" {mark}{place}  {option.label}" + (f"  ({option.reason})" if option.reason else ""))
    if shown.takes:
        click.echo(f"      or {shown.takes}")
    if shown.budget:
        click.echo("  " + ", ".join(f"{what} {size / 1e9:.2f}" for what, size in shown.budget) + " GB")


def _prompt(wizard: Wizard, shown: Question) -> Wizard:
    """Show the question and read an answer, a few times if need be."""
    from q27app.setup.wizard import MAX_ANSWER, STEPS, answered, back

    _show(wizard, shown)
    for _ in range(MAX_TRIES):
        click.echo(f"{shown.step} [{shown.default}]: ", nl=False)
        text = sys.stdin.readline(MAX_ANSWER + 2)
        if not text:
            raise click.Abort
        text = text.rstrip("\r\n")
        if text in ("b", "back") and shown.step != STEPS[0]:
            return back(wizard)
        if text in ("q", "quit"):
            raise _Left
        if text == "?":
            click.echo(f"  {HELP}")
            continue
        if text.isascii() and text.isdigit() and len(text) < 3 and 1 <= int(text) <= len(shown.options):
            text = shown.options[int(text) - 1].value
        try:
            return answered(wizard, text or shown.default)
        except UsageError as error:
            click.echo(f"  {error}", err=True)
    raise UsageError(f"{MAX_TRIES} answers to {shown.step} were none.", "Nothing was written. q27app setup --yes takes the defaults.")


def _take_default(wizard: Wizard, shown: Question) -> Wizard:
    """--yes. What the checks found is shown, and is no reason to stop: what needs it will say so."""
    from q27app.setup.wizard import answered

    if shown.step == "checks":
        for line in shown.text:
            click.echo(line, err=True)
    value = "go" if shown.step == "checks" else shown.default
    click.echo(f"{shown.step}: {value}", err=True)
    return answered(wizard, value)


def _refuse(wizard: Wizard, shown: Question) -> Wizard:
    raise UsageError(f"there is no terminal to ask about {shown.step!r}.", "Add --yes to take the defaults of what no flag answers.")


def carry_out(wizard: Wizard) -> Checkpoint | Trial:
    """Carry out what the last answer asked for. Raises Q27Error."""
    from q27app.setup.trial import run_trial
    from q27app.setup.wizard import outcome

    kind, _, what = wizard.work.partition(" ")
    if kind == "trial":
        click.echo("  Loading the model and measuring ...", err=True)
        measured = run_trial({**wizard.facts.current, **outcome(wizard).settings})
        click.echo(f"  {measured.tokens_per_s:.1f} tokens/s, loaded in {measured.load_s:.0f} s.")
        return measured
    return _fetch(wizard, kind, what)


def _fetch(wizard: Wizard, kind: str, what: str) -> Checkpoint:
    from q27app.cli_models import fetch_into_folder, import_into_folder
    from q27app.setup.checkpoints import checkpoint_of
    from q27app.setup.models import plan_import

    tier = wizard.answers.get("tier", "q4s")
    if kind == "download":
        return checkpoint_of(fetch_into_folder(what, tier))
    target = plan_import(Path(what)).target
    is_there = target.exists() and target.samefile(what)  # a second run of the set-up
    return checkpoint_of(target if is_there else import_into_folder(Path(what), tier))


def _show_clients(wizard: Wizard) -> None:
    from q27app.setup.launch import CLIENTS

    click.echo("Coding clients, once the daemon runs:")
    for name in wizard.facts.clients or tuple(CLIENTS):
        click.echo(f"  q27app launch {name}")
