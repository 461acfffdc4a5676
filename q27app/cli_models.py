"""Commands about model files: pull, import, show, rm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click


if TYPE_CHECKING:
    from q27app.setup.models import Source

STALL_S = 30.0


@click.command()
@click.argument("what", metavar="TIER|REPO[:FILE]")
@click.option("--generation", type=click.Choice(["3.6", "3.8"]), default="3.6", show_default=True, help="Of a tier.")
@click.option("--stall", "stall_s", type=click.FloatRange(0.1, 3600), default=STALL_S, show_default=True, help="Seconds of silence that end an attempt.")
def pull(what: str, generation: str, stall_s: float) -> None:
    """Download a model from the Hugging Face hub.

    Goes on where it stopped; HF_ENDPOINT names another hub.
    """
    from q27app.config import load_config
    from q27app.setup.models import find_source

    paths = _fetch(find_source(what, generation, load_config().model.repos), stall_s)
    for path in paths:
        click.echo(path)
    if paths[0].suffix != ".q27":
        click.echo(f"Convert it: q27app import {paths[0] if len(paths) == 1 else paths[0].parent}", err=True)


def _fetch(source: Source, stall_s: float) -> list[Path]:
    from q27app.cli_progress import Progress
    from q27app.setup.models import pull as fetch

    progress = Progress("fetched")
    try:
        return fetch(source, progress, stall_s)
    finally:
        progress.close()


def fetch_into_folder(what: str, tier: str) -> Path:
    """Download OWNER/REPO[:FILE] and convert it to `tier` if it is no .q27; the .q27 in the models folder. Raises Q27Error."""
    from q27app.setup.models import find_source

    paths = _fetch(find_source(what, "3.6"), STALL_S)
    if paths[0].suffix == ".q27":
        return paths[0]
    return import_into_folder(paths[0] if len(paths) == 1 else paths[0].parent, tier)


def import_into_folder(path: Path, tier: str, how: str = "link") -> Path:
    """Bring a .q27 into the models folder, or convert a GGUF or a safetensors folder to `tier`. how: copy, link, move.
    Raises Q27Error."""
    from q27app.cli_progress import Progress
    from q27app.paths import ensured
    from q27app.setup.models import place, plan_import
    from q27app.weights.convert import convert

    found = plan_import(path)
    if found.kind == "q27":
        return place(found, how)
    ensured(found.target.parent)
    progress = Progress("converted")
    try:
        convert(str(path), str(found.target), tier, None, progress)
    finally:
        progress.close()
    return found.target


@click.command("import")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--copy", "how", flag_value="copy", default="copy", help="Copy a .q27 (default).")
@click.option("--link", "how", flag_value="link", help="Link a .q27.")
@click.option("--move", "how", flag_value="move", help="Move a .q27.")
@click.option("--tier", default="q4s", show_default=True, help="Tier to convert a GGUF or safetensors folder to.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
def import_model(path: Path, how: str, tier: str, dry_run: bool) -> None:
    """Take a .q27, GGUF or safetensors folder into the models folder."""
    from q27app.setup.models import plan_import

    found = plan_import(path)
    deed = how if found.kind == "q27" else f"convert to {tier}"
    if dry_run:
        click.echo(f"{found.kind}: would {deed}: {found.target}")
        return
    click.echo(import_into_folder(path, tier, how))


@click.command()
@click.argument("name", metavar="MODEL")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(name: str, as_json: bool) -> None:
    """Show a model: tier, size, and whether it fits this card."""
    from q27app.gpu import read_gpus
    from q27app.paths import resolve_model
    from q27app.setup.checkpoints import checkpoint_of
    from q27app.gpu import choose_card
    from q27app.setup.listing import fit
    from q27app.setup.machine import read_machine

    path = resolve_model(name)
    checkpoint = checkpoint_of(path)
    facts = {"name": checkpoint.name, "path": str(path), "bytes": path.stat().st_size, "tier": checkpoint.tier,
             "generation": checkpoint.generation, "native_context": checkpoint.config.max_context}
    card = choose_card(None, read_gpus())
    fits, why = fit(checkpoint, None if card is None else read_machine(card))
    facts |= {"fits": fits, "why": why}
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts["fits"] = "unknown" if fits is None else fits
    for key, value in facts.items():
        click.echo(f"{key:<15} {value}")


@click.command()
@click.argument("name", metavar="MODEL")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(name: str, yes: bool) -> None:
    """Delete a model of the models folder."""
    from q27app.setup.models import find_installed, remove

    path = find_installed(name)
    if not yes:
        click.confirm(f"Delete {path} ({path.stat().st_size / 1e9:.2f} GB)?", abort=True)
    path, size = remove(name)
    click.echo(f"Deleted {path}, {size / 1e9:.3f} GB freed.")
