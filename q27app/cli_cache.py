"""The command that looks after the folder of the prefix cache: cache list, cache clear."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click

from q27app.errors import UsageError

_FOLDER = click.option("--prefix-cache", "folder", metavar="DIR", help="The folder; else that of the configuration.")


@click.group()
def cache() -> None:
    """Show or empty the folder where computed prompts are kept."""


def _folder(given: str | None) -> Path:
    from q27app.config import load_config

    name = given or load_config().cache.directory
    if not name:
        raise UsageError("no folder for the prefix cache is configured.", "Pass --prefix-cache DIR, or set cache.directory.")
    return Path(name).expanduser()


@cache.command("list")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_entries(folder: str | None, as_json: bool) -> None:
    """Show the entries, the most recently used first. Older: in a layout that is read no more; they go when the daemon starts."""
    from q27app.engine.disk_cache import describe

    where = _folder(folder)
    rows = describe(where)
    total = sum(row["bytes"] for row in rows)
    if as_json:
        click.echo(json.dumps({"version": 1, "folder": str(where), "bytes": total, "entries": rows}, indent=2))
        return
    for row in rows:
        used = datetime.fromtimestamp(row["used_at"]).strftime("%Y-%m-%d %H:%M")
        click.echo(f"{used}  {row['kind']:<7} {row['tokens']:>8} tokens {row['bytes'] / 1e6:>10.1f} MB  "
                   f"model {row['fingerprint'] or '-':<8}  {row['name']}")
    click.echo(f"{len(rows)} entries, {total / 1e9:.2f} GB in {where}", err=True)


@cache.command("clear")
@_FOLDER
def clear_entries(folder: str | None) -> None:
    """Delete every entry; other files are left alone. A daemon that runs goes on, and computes again."""
    from q27app.engine.disk_cache import clear

    where = _folder(folder)
    count, freed = clear(where)
    click.echo(f"{count} files deleted, {freed / 1e9:.2f} GB freed in {where}")
