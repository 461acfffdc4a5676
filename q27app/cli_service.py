"""Commands of the service: q27app service VERB."""

from __future__ import annotations

import json

import click


@click.group()
def service() -> None:
    """Run the daemon as a systemd user service."""


@service.command()
@click.option("--no-start", is_flag=True, help="Only install and enable it.")
@click.option("--linger/--no-linger", default=None, help="Let it run without a login (asked on a terminal).")
def install(no_start: bool, linger: bool | None) -> None:
    """Install, enable and start the service."""
    import sys

    from q27app.setup.service import enable_linger, install as install_unit, lingers

    click.echo(f"Installed {install_unit(not no_start)}.")
    if lingers() is not False:
        return
    click.echo("Without linger systemd stops the service at log-out and does not start it at boot.", err=True)
    if linger is None and sys.stdin.isatty():
        linger = click.confirm("Enable linger for this user?")
    if linger:
        enable_linger()
        click.echo("Linger enabled.")
    else:
        click.echo("Enable it later: loginctl enable-linger", err=True)


@service.command()
def uninstall() -> None:
    """Stop and remove the service."""
    from q27app.setup.service import uninstall as remove_unit

    click.echo("\n".join(remove_unit()) or "There was nothing to remove.")


def _verb(name: str) -> None:
    @service.command(name, help=f"{name.capitalize()} the service.")
    def command() -> None:
        from q27app.setup.service import control

        control(name)
        click.echo(f"{name}: done.")


for _name in ("start", "stop", "restart"):
    _verb(_name)


@service.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def reload(as_json: bool) -> int:
    """Have the running daemon read its configuration again.

    No stream is dropped. Says which keys count now, which exchanged the model, and which need a restart.
    """
    import asyncio
    from typing import Any

    from q27app.cli_tui import _where
    from q27app.client import Client
    from q27app.errors import EXIT_OK, EXIT_USAGE

    url, key = _where(None, None)

    async def ask() -> dict[str, Any]:
        async with Client(url, key) as client:
            return await client.reload()

    result = asyncio.run(ask())
    if as_json:
        click.echo(json.dumps(result))
    else:
        for kind, words in (("live", "count now"), ("model", "exchanged the model"), ("refused", "need a restart")):
            if result[kind]:
                click.echo(f"{words}: {', '.join(result[kind])}")
        click.echo(f"error: {result['error']}" if result["error"] else "Reloaded.", err=bool(result["error"]))
    return EXIT_USAGE if result["error"] else EXIT_OK


@service.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(as_json: bool) -> None:
    """Show what systemd knows."""
    from q27app.setup.service import describe

    facts = describe()
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key:<12} {value}")
    if facts["installed"] and facts["linger"] is False:
        click.echo("Without linger it stops at log-out: loginctl enable-linger", err=True)


@service.command()
@click.option("--follow", "-f", is_flag=True, help="Wait for more.")
@click.option("--lines", "-n", type=click.IntRange(0, 100_000), default=100, show_default=True)
def logs(follow: bool, lines: int) -> None:
    """Show the service's log."""
    import subprocess

    from q27app.setup.service import NoUserManager, journal_command, unit_path

    if not unit_path().exists():
        click.echo("The service is not installed; what an earlier one has left follows, if anything. Install it: q27app service install",
                   err=True)
    try:
        subprocess.run(journal_command(follow, lines), check=False)
    except FileNotFoundError as error:
        raise NoUserManager("journalctl is not installed.") from error
