"""The daemon as a program: check, bind, load, announce, tell the supervisor, drain.

The address is bound before the model is loaded and before anything is announced, so that a taken port costs no time.
The first SIGTERM or SIGINT lets running answers finish within server.drain_timeout_s and refuses new requests with 503;
the second stops at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from q27app.errors import EXIT_ENGINE_DIED, EXIT_OK, AddressInUse, EngineDied, Q27Error, why

if TYPE_CHECKING:
    from aiohttp import web

    from q27app.chat.template import Template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.config import Config
    from q27app.daemon.daemon import Daemon
    from q27app.engine.engine import Engine

log = logging.getLogger("q27app.daemon")

POLL_S = 0.5
"""How often the engine's state is looked at, for the supervisor and for failures."""
SWITCH_S = 0.001
"""Longest time that a computing thread keeps the interpreter from the loop."""
CANCEL_GRACE_S = 2.0
"""Time that cancelled answers get to tell their clients."""

Announce = Callable[[str], None]
Reread = Callable[[], "Config"]


def serve(config: Config, announce: Announce | None = None, reread: Reread | None = None) -> int:
    """Run until a signal. Returns the exit code; raises Q27Error for what cannot be used.

    announce: gets the base URL once the daemon listens; default: a log line. reread: the configuration as it stands then, for
    SIGHUP.
    """
    from q27app.config import notify_socket
    from q27app.daemon.access import check_exposure, load_keys
    from q27app.daemon.logs import open_log
    from q27app.daemon.parts import open_parts

    open_log(config.log)
    _warn_of_a_missing_file()
    keys = load_keys(config)
    check_exposure(config, keys)
    if keys.are_needed:
        log.info("API keys are needed: %d for the API, %d for /admin", len(keys.api), len(keys.admin))
    elif config.server.allow_open_bind:
        log.warning("no API key is set and server.allow_open_bind is on: whoever reaches this address may use it")
    engine, tokenizer, template = open_parts(config)
    announce = announce or (_print_banner if config.log.format == "text" else None)
    return asyncio.run(run(engine, tokenizer, template, config, announce, Notifier(notify_socket()), reread))


def _warn_of_a_missing_file() -> None:
    """Whoever names a configuration file of his own expects that it counts."""
    from q27app.config import config_path, variable

    if variable("Q27APP_CONFIG") and not config_path().exists():
        log.warning("Q27APP_CONFIG names %s, which does not exist: defaults are used in its place", config_path())


def calm() -> None:
    """Keep the loop's pauses short, once everything is loaded: what lives as long as the process is not looked through for
    garbage again (a tenth of a second each time), and a thread that computes hands the interpreter over soon."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def _print_banner(address: str) -> None:
    print(f"q27app listens on {address}", file=sys.stderr, flush=True)


class Notifier:
    """Tells a supervisor (systemd) what goes on; does nothing without a socket."""

    def __init__(self, address: str = "") -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @property
    def is_supervised(self) -> bool:
        return bool(self._address)

    def tell(self, **fields: str) -> None:
        """READY="1", STATUS="...": one datagram; a supervisor that doesn't listen is not our failure."""
        if self._address:
            message = "\n".join(f"{name}={value}" for name, value in fields.items())
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                    channel.setblocking(False)
                    channel.sendto(message.encode(), self._address)
            except OSError as error:
                log.warning("the supervisor's socket cannot be reached: %s", error)


@asynccontextmanager
async def hosting(
    engine: Engine, tokenizer: Tokenizer, template: Template, config: Config
) -> AsyncIterator[tuple[str, web.Application]]:
    """(base URL, app) of a daemon on the running loop, the engine started. Leaving it stops both, without draining.

    Raises AddressInUse before the engine is started.
    """
    from q27app.daemon.app import make_app, make_runner

    runner = make_runner(make_app(engine, tokenizer, template, config))
    await runner.setup()
    try:
        address = await listen(runner, config)
        engine.start()
        yield address, runner.app
    finally:
        await runner.cleanup()
        await asyncio.get_running_loop().run_in_executor(None, engine.close)


async def run(
    engine: Engine,
    tokenizer: Tokenizer,
    template: Template,
    config: Config,
    announce: Announce | None = None,
    notifier: Notifier | None = None,
    reread: Reread | None = None,
) -> int:
    """Bind, start the engine, serve until a signal or the engine's death, drain. Returns the exit code.

    Raises AddressInUse, or the error for which the engine could not load the model.
    """
    from q27app.daemon.daemon import DAEMON

    notifier = notifier or Notifier()
    stop = _Signals()
    try:
        async with hosting(engine, tokenizer, template, config) as (address, app):
            app[DAEMON].reread = reread
            stop.install(lambda: app[DAEMON].in_background(_reload(app[DAEMON], notifier)))
            (announce or _announce_in_log)(address)
            code = await _until_stopped(engine, stop, notifier)
            await _drain(app, stop, config.server.drain_timeout_s, notifier)
            return code
    finally:
        stop.remove()


def _announce_in_log(address: str) -> None:
    log.info("listening on %s", address)


async def listen(runner: web.AppRunner, config: Config) -> str:
    """Bind the configured address; never shared with another process. Returns the base URL. Raises AddressInUse."""
    from aiohttp import web

    server = config.server
    site = web.TCPSite(runner, server.host, server.port, reuse_address=os.name == "posix", reuse_port=False)
    try:
        await site.start()
    except OSError as error:
        where = f"{server.host} port {server.port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{where} is in use by another program.",
                "Is a daemon running already (q27app status)? Stop it, or choose --port.",
            ) from error
        raise AddressInUse(
            f"{where} cannot be bound: {why(error)}.",
            "Choose an address of this machine with --host and a port above 1023.",
        ) from error
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Signals:
    """SIGTERM and SIGINT: the first sets `asked`, the second `at_once`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def install(self, reload: Callable[[], object]) -> None:
        """reload: called at each SIGHUP, except on a terminal, whose end sends one and shall end the daemon."""
        if not (sys.stdin is not None and sys.stdin.isatty()):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def remove(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()
        log.info(
            "%s: %s",
            signal.Signals(number).name,
            "stopping at once" if self.at_once.is_set() else "finishing running answers; again stops at once",
        )


async def _until_stopped(engine: Engine, stop: _Signals, notifier: Notifier) -> int:
    """Watch the engine until a signal (exit code 0) or a failure that ends the daemon.

    A model that cannot be loaded at start raises its error. An engine that dies later leaves the daemon answering 503,
    unless a supervisor is there to start it again; the exit code tells of it in the end.
    """
    was_ready = has_died = False
    while not stop.asked.is_set():
        status = engine.status()
        if status.state == "ready" and not was_ready:
            was_ready = True
            log.info("ready: a context of %s tokens", engine.max_context)
            calm()
            notifier.tell(READY="1", STATUS="ready")
        elif status.state == "loading":
            notifier.tell(STATUS=f"loading {status.load_progress:.0%}", EXTEND_TIMEOUT_USEC="60000000")
        elif status.state == "failed":
            if not was_ready:
                raise _error_of(status)
            if not has_died:
                has_died = True
                log.error("the engine died: %s", status.error)
            if notifier.is_supervised:
                notifier.tell(STATUS="the engine died")
                return EXIT_ENGINE_DIED
        if status.state != "failed" and (status.heartbeat_age_s or 0) < 60:  # the engine's thread lives, also without a model
            notifier.tell(WATCHDOG="1")
        await _sleep_until(stop.asked, POLL_S)
    return EXIT_ENGINE_DIED if has_died else EXIT_OK


async def _reload(daemon: Daemon, notifier: Notifier) -> None:
    """SIGHUP: tell the supervisor, read the configuration again, tell it that all is well, whatever came of it."""
    from q27app.daemon.reload import reload_config

    notifier.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000), STATUS="reading the configuration again")
    result = await reload_config(daemon)
    notifier.tell(READY="1", STATUS=f"not reloaded: {result.error[:200]}" if result.error else "ready")


def _error_of(status: Any) -> Q27Error:
    error = status.error
    return error if isinstance(error, Q27Error) else EngineDied(str(error or "the engine could not load the model."))


async def _drain(app: web.Application, stop: _Signals, timeout_s: float, notifier: Notifier) -> None:
    """Refuse new requests, let running ones finish until `timeout_s` or a second signal, then cancel the rest."""
    from q27app.daemon.daemon import DAEMON, shutting_down

    daemon = app[DAEMON]
    daemon.is_draining = True
    notifier.tell(STOPPING="1")
    deadline = asyncio.get_running_loop().time() + timeout_s
    while daemon.active and asyncio.get_running_loop().time() < deadline and not stop.at_once.is_set():
        await _sleep_until(stop.at_once, 0.05)
    for record in list(daemon.active.values()):
        daemon.cancel(record, shutting_down())
    deadline = asyncio.get_running_loop().time() + CANCEL_GRACE_S
    while daemon.active and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)


async def _sleep_until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
