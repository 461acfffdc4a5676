"""What an operator and a supervisor ask: /health, /ready, /status, /metrics, and the /admin routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from aiohttp import web

from q27app import __version__
from q27app.daemon import sse
from q27app.daemon.access import read_object
from q27app.daemon.daemon import DAEMON, REQUEST_ID
from q27app.daemon.replies import json_response
from q27app.errors import GpuError, NotFound, Overloaded, Q27Error

if TYPE_CHECKING:
    from q27app.daemon.daemon import Daemon

log = logging.getLogger("q27app.daemon")


async def root(request: web.Request) -> web.Response:
    """GET and HEAD /: clients probe it."""
    return json_response({"name": "q27app", "version": __version__, "status": "/status"})


VERIFY_S = 5.0
"""Age up to which a comparison of the weights is not made again."""


async def health(request: web.Request) -> web.Response:
    """GET /health[?verify=1]: 200 while the daemon can do its work now or later, 503 with the reason once it cannot.

    verify=1 also compares the weights in memory with what was loaded; a difference ends the engine.
    """
    daemon = request.app[DAEMON]
    weights = await _verified(daemon) if request.query.get("verify") == "1" else None
    trouble = daemon.trouble()
    body: dict[str, Any] = {"status": "failed" if trouble else "ok", "state": daemon.engine.status().state}
    if weights is not None:
        body["weights"] = weights
    return json_response({**body, "reason": trouble} if trouble else body, 503 if trouble else 200)


async def _verified(daemon: Daemon) -> dict[str, Any]:
    """{"equal": True | False | None, ...}: None = could not be told, with the reason."""
    if daemon.verified is not None and time.monotonic() - daemon.verified[0] < VERIFY_S:
        return daemon.verified[1]
    try:
        found = {"equal": True, **await asyncio.shield(asyncio.wrap_future(daemon.engine.verify()))}
    except GpuError as error:
        found = {"equal": False, "reason": error.message}
    except Q27Error as error:
        return {"equal": None, "reason": str(error)}
    daemon.verified = time.monotonic(), found
    return found


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 only if the model answers now, or after the load that the next request starts (is_asleep)."""
    daemon = request.app[DAEMON]
    status = daemon.engine.status()
    reason = daemon.trouble()
    if not reason and daemon.is_draining:
        reason = "the daemon is shutting down."
    if not reason and status.state != "ready" and not daemon.residence.is_asleep:
        reason = f"the model is {status.state}."
    body = {"ready": not reason, "state": status.state, "load_progress": status.load_progress, "is_asleep": daemon.residence.is_asleep}
    return json_response({**body, "reason": reason} if reason else body, 503 if reason else 200)


async def status(request: web.Request) -> web.Response:
    """GET /status: everything that is known, without any text of prompts or answers."""
    daemon = request.app[DAEMON]
    return json_response(
        {
            "version": __version__,
            "boot_id": daemon.boot_id,
            "model": daemon.model_id,
            "uptime_s": round(time.time() - daemon.started_at, 3),
            "is_draining": daemon.is_draining,
            "is_asleep": daemon.residence.is_asleep,
            "last_reload": None if daemon.last_reload is None else daemon.last_reload.to_dict(),
            "max_context": daemon.engine.max_context,
            "requests": [record.to_dict() for record in daemon.active.values()],
            "engine": daemon.engine.status().to_dict(),
            **await daemon.machine.snapshot(),
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: Prometheus' text format."""
    from q27app.metrics import CONTENT_TYPE

    daemon = request.app[DAEMON]
    await daemon.machine.snapshot()
    return web.Response(body=daemon.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def load(request: web.Request) -> web.Response:
    """POST /admin/load {"wait": bool}: 202 at once, or 200 when the model answers."""
    return await _change(request, "load")


async def unload(request: web.Request) -> web.Response:
    """POST /admin/unload {"wait": bool}: 202 at once, or 200 when the memory is free."""
    return await _change(request, "unload")


async def _change(request: web.Request, what: str) -> web.Response:
    daemon = request.app[DAEMON]
    body = await _body(request)
    if daemon.is_draining:
        raise Overloaded("the daemon is shutting down.")
    future: Future[Any] = daemon.residence.order(what)
    if body.get("wait") is True:
        await asyncio.shield(asyncio.wrap_future(future))
        return json_response({"state": daemon.engine.status().state})
    future.add_done_callback(lambda done: _report(what, done))
    return json_response({"state": daemon.engine.status().state}, 202)


async def reload(request: web.Request) -> web.Response:
    """POST /admin/reload: read the configuration again; what counts now, what exchanged the model, what was refused."""
    from q27app.daemon.reload import reload_config

    await _body(request)
    daemon = request.app[DAEMON]
    if daemon.is_draining:
        raise Overloaded("the daemon is shutting down.")
    work = daemon.in_background(reload_config(daemon))   # a client that leaves half way leaves no half of it
    return json_response((await asyncio.shield(work)).to_dict())


def _report(what: str, done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("%s failed: %s", what, done.exception())


async def cancel(request: web.Request) -> web.Response:
    """POST /admin/cancel/ID: end a request that runs or waits, with all its answers, or one of its answers."""
    await _body(request)
    daemon, name = request.app[DAEMON], request.match_info["id"]
    record = daemon.active.get(name)
    if record is not None and not record.has_ended:
        daemon.cancel(record)
    elif not daemon.engine.cancel(name):
        raise NotFound(f"no request {name[:80]!r} runs or waits.", "/status lists them.")
    return json_response({"id": name, "cancelled": True})


async def _body(request: web.Request) -> dict[str, Any]:
    daemon = request.app[DAEMON]
    return await read_object(request, 1 << 16, daemon.executor, may_be_empty=True)


async def events(request: web.Request) -> web.StreamResponse:
    """GET /admin/events: log lines and request milestones as server-sent events, the latest ones first."""
    daemon = request.app[DAEMON]
    if daemon.hub.is_full:
        raise Overloaded("too many listeners on /admin/events.")
    return await sse.send(request, _lines(daemon), "openai", {"request-id": request[REQUEST_ID]})


async def _lines(daemon: Daemon) -> AsyncIterator[bytes]:
    yield sse.COMMENT
    async for record in daemon.hub.listen(daemon.config.server.ping_interval_s):
        yield sse.COMMENT if record is None else sse.event(record["event"], record)
