"""make_app(engine, tokenizer, template, config): routes, the one middleware, and an answer's way through a dialect.

The app owns neither engine nor socket. Run it with `make_runner`: only then does a client that leaves cancel its
request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING

from aiohttp import web

from q27app.daemon import (
    admin,
    anthropic,
    models,
    openai_chat,
    openai_completions,
    openai_responses,
    sse,
    text_routes,
)
from q27app.daemon.access import (
    check_browser,
    check_key,
    check_media_type,
    describe_client,
    read_object,
)
from q27app.daemon.answer import collect
from q27app.daemon.daemon import DAEMON, REQUEST_ID, Daemon
from q27app.daemon.failures import BrokenBody, MethodNotAllowed, dialect_of, error_body, error_headers, explained
from q27app.daemon.generate import open_generation
from q27app.daemon.hub import HubHandler
from q27app.daemon.identity import Identity
from q27app.daemon.prepare import count_prompt, practise
from q27app.daemon.replies import json_response
from q27app.errors import NotFound, PayloadTooLarge, Q27Error

if TYPE_CHECKING:
    from q27app.chat.template import Template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.config import Config
    from q27app.daemon.daemon import RequestRecord
    from q27app.engine.engine import Engine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(engine: Engine, tokenizer: Tokenizer, template: Template, config: Config) -> web.Application:
    """The daemon as an aiohttp application. Raises UsageError for keys that cannot be used."""
    limit = config.server.body_limit_mb << 20
    app = web.Application(client_max_size=limit, middlewares=[_middleware])
    app[DAEMON] = Daemon(engine, tokenizer, template, config)
    for prefix in ("/v1", "/v1/v1"):
        app.router.add_post(f"{prefix}/chat/completions", _answering(openai_chat))
        app.router.add_post(f"{prefix}/completions", _answering(openai_completions))
        app.router.add_post(f"{prefix}/responses", _answering(openai_responses))
        app.router.add_post(f"{prefix}/messages", _answering(anthropic))
        app.router.add_post(f"{prefix}/messages/count_tokens", _count_tokens)
        app.router.add_get(f"{prefix}/models", models.models)
        app.router.add_get(f"{prefix}/models/{{id:.+}}", models.model)
    for path, handler in (
        ("/", admin.root),
        ("/health", admin.health),
        ("/ready", admin.ready),
        ("/status", admin.status),
        ("/metrics", admin.metrics),
        ("/openapi.json", text_routes.openapi),
        ("/admin/events", admin.events),
    ):
        app.router.add_get(path, handler)
    app.router.add_post("/tokenize", text_routes.tokenize)
    app.router.add_post("/detokenize", text_routes.detokenize)
    app.router.add_post("/apply-template", text_routes.apply_template)
    app.router.add_post("/admin/load", admin.load)
    app.router.add_post("/admin/unload", admin.unload)
    app.router.add_post("/admin/reload", admin.reload)
    app.router.add_post("/admin/cancel/{id}", admin.cancel)
    app.cleanup_ctx.append(_listening_to_logs)
    app.cleanup_ctx.append(_watching_for_idleness)
    app.on_startup.append(_practise)
    app.on_shutdown.append(_end_listeners)
    return app


def make_runner(app: web.Application, shutdown_timeout_s: float = 2.0) -> web.AppRunner:
    """A runner with the settings that the app relies on: handlers are cancelled when their client leaves."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=120.0,
        shutdown_timeout=shutdown_timeout_s,
        max_line_size=16_384,
        max_field_size=65_536,
    )


async def _listening_to_logs(app: web.Application):
    daemon = app[DAEMON]
    daemon.hub.open()
    handler = HubHandler(daemon.hub)
    logging.getLogger("q27app").addHandler(handler)
    yield
    logging.getLogger("q27app").removeHandler(handler)
    daemon.executor.shutdown(wait=False, cancel_futures=True)


async def _watching_for_idleness(app: web.Application):
    watch = asyncio.create_task(app[DAEMON].residence.watch())
    yield
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def _practise(app: web.Application) -> None:
    asyncio.get_running_loop().run_in_executor(app[DAEMON].executor, practise, app[DAEMON])


async def _end_listeners(app: web.Application) -> None:
    app[DAEMON].hub.close()


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ids, access, and every error in the dialect of the path."""
    daemon = request.app[DAEMON]
    request[REQUEST_ID] = daemon.next_id()
    dialect = dialect_of(request.path)
    try:
        check_browser(request, daemon.config)
        check_key(request, daemon.keys)
        check_media_type(request)
        response = await handler(request)
    except Exception as error:
        failure = explained(_translated(error, request), request[REQUEST_ID])
        response = json_response(error_body(failure, dialect), failure.http_status)
        response.headers.update(error_headers(failure, dialect))
        if isinstance(failure, (PayloadTooLarge, BrokenBody)):
            response.force_close()
    if not response.prepared:
        response.headers.update(_id_headers(request))
    return response


def _id_headers(request: web.Request) -> dict[str, str]:
    return {"request-id": request[REQUEST_ID], "x-request-id": request[REQUEST_ID]}


def _translated(error: Exception, request: web.Request) -> Exception:
    """aiohttp's own refusals as ours."""
    if isinstance(error, web.HTTPNotFound):
        base = f"{request.scheme}://{request.host}"
        return NotFound(
            f"there is no route {request.method} {request.path[:200]}.",
            f"Anthropic clients use the base URL {base}, OpenAI clients {base}/v1.",
        )
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(request.method, request.path[:200], sorted(error.allowed_methods))
    if isinstance(error, web.HTTPException):
        wrapped = Q27Error(f"the request was refused: {error.reason}.")
        wrapped.http_status = error.status
        return wrapped
    return error


def _answering(dialect: ModuleType) -> Handler:
    """The handler that answers in `dialect`: a module with NAME, parse, render and events."""

    async def handle(request: web.Request) -> web.StreamResponse:
        daemon = request.app[DAEMON]
        record = daemon.begin(request[REQUEST_ID], dialect.NAME, describe_client(request))
        try:
            return await _answer(request, dialect, record)
        except BaseException as error:
            _note_failure(record, error)
            raise
        finally:
            daemon.end(record)

    return handle


async def _answer(request: web.Request, dialect: ModuleType, record: RequestRecord) -> web.StreamResponse:
    daemon = request.app[DAEMON]
    body = await read_object(request, request.client_max_size, daemon.executor)
    record.body = body if daemon.capture is not None else None
    chat = dialect.parse(body)
    record.model = chat.model[:200] or daemon.model_id
    identity = Identity(record.id, chat.model or daemon.model_id, int(time.time()), chat.include_usage, chat)
    async with open_generation(daemon, chat, record) as deltas:
        if chat.stream:
            return await sse.send(
                request,
                dialect.events(identity, deltas),
                dialect_of(request.path),
                _id_headers(request),
                lambda error: _note_failure(record, error),
            )
        answer = await collect(deltas)
    return json_response(dialect.render(identity, answer))


def _note_failure(record: RequestRecord, error: BaseException) -> None:
    if isinstance(error, (asyncio.CancelledError, ConnectionError)):
        record.finish = "disconnected"
        return
    record.finish = f"error:{error.code if isinstance(error, Q27Error) else 'internal_error'}"


async def _count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens: what /v1/messages would prefill for the same body."""
    daemon = request.app[DAEMON]
    chat = anthropic.parse(await read_object(request, request.client_max_size, daemon.executor))
    return json_response({"input_tokens": await count_prompt(daemon, chat)})
