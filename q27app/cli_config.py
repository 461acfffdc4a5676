"""Commands that only read: config, list, version."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import click

from q27app import __version__


@click.group()
def config() -> None:
    """Show the configuration and where each value comes from."""


@config.command()
def path() -> None:
    """Print the path of config.toml, whether it exists or not."""
    from q27app.config import config_path

    click.echo(config_path())


@config.command()
@click.option("--origin", is_flag=True, help="Also say where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(origin: bool, as_json: bool) -> None:
    """Print every setting as it is now. Keys are never printed."""
    from q27app.config import SECTIONS, load_config

    loaded = load_config()
    rows = [(section, item.name, _printable(getattr(getattr(loaded, section), item.name), item.metadata["secret"]))
            for section, kind in SECTIONS.items() for item in fields(kind)]
    if as_json:
        result: dict[str, dict[str, Any]] = {}
        for section, key, value in rows:
            source = loaded.origins[f"{section}.{key}"]
            shown = {"value": value, "origin": source.kind, "where": str(source)} if origin else value
            result.setdefault(section, {})[key] = shown
        click.echo(json.dumps(result, indent=2))
        return
    section_before = None
    for section, key, value in rows:
        if section != section_before:
            click.echo(("" if section_before is None else "\n") + f"[{section}]")
            section_before = section
        line = f"{key} = {json.dumps(value)}"
        click.echo(f"{line:<40} # {loaded.origins[f'{section}.{key}']}" if origin else line)


def _printable(value: Any, secret: bool) -> Any:
    if secret:
        return ["***"] * len(value)
    return list(value) if isinstance(value, tuple) else value


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_command(as_json: bool) -> None:
    """List the models that can be named.

    The bundled one, and those of the models folder, with tier, size, and whether they fit this card.
    """
    from q27app.paths import models_dir
    from q27app.setup.listing import list_models

    rows = list_models()
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
        return
    width = max([len(row.name) for row in rows], default=0)
    for row in rows:
        fits = {True: "fits", False: "does not fit", None: ""}[row.fits]
        click.echo(f"{row.name:<{width}}  {row.tier:<8} {row.bytes / 1e9:8.3f} GB  {fits:<12}  {row.path}" + (f"  ({row.why})" if row.fits is False else ""))
    click.echo(f"Models folder: {models_dir()}", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def version(as_json: bool) -> None:
    """Print versions.

    Of q27app, Python, the NVIDIA driver and the newest CUDA that it runs.
    """
    import platform

    from q27app.gpu import read_driver

    driver = read_driver()
    facts = {"q27app": __version__, "python": platform.python_version(),
             "nvidia_driver": driver.version if driver else None,
             "cuda": ".".join(map(str, driver.cuda)) if driver and driver.cuda else None}
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        click.echo(f"{name} {value or 'none'}")
