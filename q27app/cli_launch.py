"""Command that starts a coding client on the daemon: launch."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from q27app.errors import Q27Error

if TYPE_CHECKING:
    from q27app.setup.launch import Daemon, Launch

HIDDEN = "YOUR-KEY"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("client", metavar="claude|codex|opencode")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Print what would be set and run, and run nothing.")
@click.option("--restore", is_flag=True, help="Remove the files that earlier launches wrote for this client.")
@click.option("--connect", metavar="URL", help="A daemon elsewhere.")
@click.option("--key", metavar="KEY", help="Its API key.")
def launch(client: str, arguments: tuple[str, ...], only_print: bool, restore: bool, connect: str | None,
           key: str | None) -> None:
    """Start a coding client on the daemon's model.

    Sets what the client needs for this one run: address, key, model names, window, time-outs, telemetry off. Your own
    configuration of the client is neither read nor changed. What follows -- goes to the client.
    """
    from q27app.paths import state_dir
    from q27app.setup.launch import CLIENTS, plan_launch

    folder = state_dir() / "clients"
    if restore:
        _restore(client, folder, tuple(CLIENTS))
        return
    plan = plan_launch(client, _look(connect, key), folder, arguments)
    if only_print:
        _print(plan)
        return
    _start(plan)


def _look(connect: str | None, key: str | None) -> Daemon:
    """What the daemon says of itself. Raises Unreachable."""
    from q27app.client import Client
    from q27app.setup.launch import Daemon

    url, used_key = _where(connect, key)

    async def ask() -> dict[str, Any]:
        async with Client(url, used_key) as connection:
            return await connection.catalogue()

    listed = asyncio.run(ask())
    entry = listed["data"][0]
    return Daemon(url, used_key, entry["id"], int(entry.get("context_window") or 0), tuple(listed.get("models") or ()))


def _where(connect: str | None, key: str | None) -> tuple[str, str]:
    """(URL, key). Of the configured keys a client gets one for the API, an admin key only where there is no other."""
    from q27app.cli_tui import _first_key, _where
    from q27app.config import load_config

    url, found = _where(connect, key)
    if key or connect:
        return url, found
    server = load_config().server
    if server.api_keys:
        return url, server.api_keys[0]
    return url, (_first_key(Path(server.api_key_file)) if server.api_key_file else "") or found


def _restore(client: str, folder: Path, known: tuple[str, ...]) -> None:
    if client not in known:
        raise click.UsageError(f"There is no client {client!r}. Clients: {', '.join(known)}.")
    ours = folder / client
    if ours.is_dir():
        shutil.rmtree(ours)
        click.echo(f"Removed {ours}. Your own configuration of {client} was never changed.")
    else:
        click.echo(f"Nothing to remove: your own configuration of {client} was never changed.")


def _print(plan: Launch) -> None:
    """Shell lines. A key is not printed."""
    secrets = {value for name, value in plan.environment.items() if name.endswith(("_TOKEN", "_KEY")) and value}
    secrets -= {"none"}
    for name, value in plan.environment.items():
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        click.echo(f"export {name}={shlex.quote(value)}")
    for path in plan.files:
        click.echo(f"# a run writes {path}")
    click.echo(shlex.join([plan.program, *plan.arguments]))


def _start(plan: Launch) -> None:
    """Become the client. Raises Q27Error where it is not installed."""
    from q27app.config import child_environment

    environment = child_environment(plan.environment)
    program = shutil.which(plan.program, path=environment.get("PATH"))
    if program is None:
        raise Q27Error(f"{plan.program} is not installed, or not on PATH.", f"Install it with: {plan.install}")
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text, encoding="utf-8")
    os.execve(program, [program, *plan.arguments], environment)
