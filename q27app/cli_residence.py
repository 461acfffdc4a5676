"""Commands about the model in memory: load, unload."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from q27app.client import Client


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("--json", "as_json", is_flag=True, help="One JSON object.")(function)
    function = click.option("--no-wait", is_flag=True, help="Return at once.")(function)
    function = click.option("--key", metavar="KEY", help="API key, or @FILE; default: the configuration's.")(function)
    return click.option("--connect", metavar="URL", help="A daemon elsewhere; default: the configured address.")(function)


@click.command()
@_options
def load(connect: str | None, key: str | None, no_wait: bool, as_json: bool) -> None:
    """Have the daemon load its model.

    Returns when the model answers.
    """
    _order(connect, key, as_json, lambda client: client.load(not no_wait))


@click.command()
@_options
def unload(connect: str | None, key: str | None, no_wait: bool, as_json: bool) -> None:
    """Have the daemon give its model's memory back.

    Running answers finish first; new requests are refused until q27app load.
    """
    _order(connect, key, as_json, lambda client: client.unload(not no_wait))


def _order(connect: str | None, key: str | None, as_json: bool, give: Callable[[Client], Awaitable[dict[str, Any]]]) -> None:
    from q27app.cli_tui import _where
    from q27app.client import Client

    url, used_key = _where(connect, key)

    async def ask() -> dict[str, Any]:
        async with Client(url, used_key) as client:
            return await give(client)

    started = time.monotonic()
    state = str(asyncio.run(ask())["state"])
    seconds = round(time.monotonic() - started, 3)
    click.echo(json.dumps({"state": state, "seconds": seconds}) if as_json else f"The model is {state}, after {seconds:.1f} s.")
