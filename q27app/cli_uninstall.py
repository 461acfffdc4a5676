"""The command uninstall."""

from __future__ import annotations

import json

import click

WORD = "purge"


@click.command()
@click.option("--purge", is_flag=True, help="Also models, configuration, cache, logs and history.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; removes nothing without --yes.")
def uninstall(purge: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Take q27app off this machine.

    Lists what will go and what stays, with sizes, then asks. What a link points to is never removed.
    """
    import shutil  # noqa: F401  what is needed later must be there before the program's own folder goes

    from q27app.setup import service  # noqa: F401
    from q27app.setup.removal import find_items, remove

    items = find_items()
    goes = [item for item in items if purge or not item.is_kept]
    if as_json:
        click.echo(json.dumps({"schema": 1, "items": [
            {"kind": item.kind, "path": str(item.path), "bytes": item.nbytes, "goes": item in goes} for item in items]}))
    else:
        for item in items:
            click.echo(f"{'goes ' if item in goes else 'stays'}  {item.kind:<14} {item.nbytes / 1e9:8.3f} GB  {item.path}")
        if not goes:
            click.echo("There is nothing to remove.")
    if dry_run or not goes or (as_json and not yes):
        return
    if not yes:
        if purge:
            if click.prompt(f"This deletes models and configuration. Type {WORD} to go on", default="", show_default=False) != WORD:
                raise click.Abort
        else:
            click.confirm("Remove it?", abort=True)
    for item in goes:
        if item.path.exists() or item.path.is_symlink():  # models go before the folder that holds them
            click.echo(remove(item), err=as_json)
