"""Reading the configuration again without dropping a stream: what counts at once, what waits for the model, what is refused.

    live       the next request sees it
    model      the model is exchanged once its running answers have ended; new requests wait (`Residence.exchange`)
    restart    refused: the old value stays until the daemon is started again

A configuration that cannot be read, or a model that cannot be opened, changes nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from q27app.config import SECTIONS, Config
from q27app.errors import Q27Error, UsageError

if TYPE_CHECKING:
    from q27app.daemon.daemon import Daemon

log = logging.getLogger("q27app.daemon")

SECTION_KINDS = {"server": "live", "model": "model", "engine": "model", "cache": "model", "kernels": "model", "sampling": "live",
                 "reasoning": "live", "log": "live"}
KEY_KINDS = {
    "server.host": "restart", "server.port": "restart", "server.body_limit_mb": "restart", "server.allow_open_bind": "restart",
    "server.capture": "restart", "server.capture_mb": "restart", "model.gpu": "restart", "model.backend": "restart",
    "model.idle_unload": "live", "model.repos": "live",
}
"""Where a key is not of its section's kind."""


def kind_of(key: str) -> str:
    """live, model or restart, of "section.key"."""
    return KEY_KINDS.get(key) or SECTION_KINDS[key.partition(".")[0]]


@dataclass(frozen=True)
class Reloaded:
    """Keys by what became of them. error: why nothing, or not the model, was changed; ""."""

    live: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def changed_keys(old: Config, new: Config) -> dict[str, list[str]]:
    """Kind -> keys whose values differ."""
    found: dict[str, list[str]] = {"live": [], "model": [], "restart": []}
    for section, kind in SECTIONS.items():
        for item in fields(kind):
            if getattr(getattr(old, section), item.name) != getattr(getattr(new, section), item.name):
                found[kind_of(f"{section}.{item.name}")].append(f"{section}.{item.name}")
    return found


def merged(base: Config, other: Config, keys: list[str]) -> Config:
    """`base` with these keys' values of `other`."""
    for key in keys:
        section, _, name = key.partition(".")
        part = replace(getattr(base, section), **{name: getattr(getattr(other, section), name)})
        base = replace(base, **{section: part})
    return base


async def reload_config(daemon: Daemon) -> Reloaded:
    """Read again and apply. Never raises for what the user wrote: the result says it, and it is kept for /status."""
    async with daemon.reloading:
        try:
            result = await _apply(daemon)
        except (Q27Error, OSError) as error:
            log.error("the configuration was not reloaded: %s", error)
            result = Reloaded(error=str(error))
    daemon.last_reload = result
    return result


async def _apply(daemon: Daemon) -> Reloaded:
    from q27app.daemon.access import check_exposure, load_keys
    from q27app.daemon.logs import open_log
    from q27app.daemon.parts import engine_settings, open_text

    if daemon.reread is None:
        raise UsageError("this daemon was started without a configuration that could be read again.", "Restart it.")
    old, read = daemon.config, daemon.reread()
    changed = changed_keys(old, read)
    new = merged(read, old, changed["restart"])
    keys = load_keys(new)
    check_exposure(new, keys)
    loop = asyncio.get_running_loop()
    settings = engine_settings(new) if changed["model"] else daemon.engine.config
    text = await loop.run_in_executor(None, open_text, new) if changed["model"] else None
    if any(key.startswith("log.") for key in changed["live"]):
        open_log(new.log)
    daemon.keys = keys
    daemon.config = merged(new, old, changed["model"])
    daemon.engine.reconfigure(replace(daemon.engine.config, max_queue=new.server.max_queue))
    for kind, say in (("live", "counts now"), ("restart", "needs a restart, the old value stays")):
        if changed[kind]:
            log.log(logging.INFO if kind == "live" else logging.WARNING, "reloaded: %s: %s", say, ", ".join(changed[kind]))
    result = Reloaded(tuple(changed["live"]), tuple(changed["model"]), tuple(changed["restart"]))
    if text is None:
        return result
    log.info("reloaded: the model is exchanged for: %s", ", ".join(changed["model"]))
    try:
        await daemon.residence.exchange(settings, lambda: daemon.install(new, *text))
    except Q27Error as error:
        log.error("the model could not be exchanged: %s", error)
        return replace(result, model=(), error=str(error))
    return result
