"""Server-sent events out: headers at once, one write per piece, an end that the client can tell from a failure.

A client that takes nothing for `WRITE_TIMEOUT_S` is cut off. Nothing is compressed or buffered on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from q27app.daemon.failures import dump, error_event, explained

if TYPE_CHECKING:
    from aiohttp import web

WRITE_TIMEOUT_S = 120.0
SMALL_BYTES = 16_384
"""A chunk of at most so many bytes is taken at once where nothing waits before it."""
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(name: str, data: object) -> bytes:
    """A named event (Anthropic, Responses, /admin/events)."""
    return b"event: " + name.encode() + b"\ndata: " + dump(data) + b"\n\n"


def data(value: object) -> bytes:
    """An unnamed event (OpenAI)."""
    return b"data: " + dump(value) + b"\n\n"


COMMENT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


async def send(
    request: web.Request,
    chunks: AsyncIterator[bytes],
    dialect: str,
    headers: dict[str, str],
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> web.StreamResponse:
    """Stream `chunks`. An error out of the iterator becomes the dialect's error event, and the stream ends there.

    on_failure learns of it, and of a client that has gone or takes nothing (a ConnectionError).
    """
    from aiohttp import web

    response = web.StreamResponse(headers={**HEADERS, **headers})
    try:
        await response.prepare(request)
        try:
            async for chunk in chunks:
                await _write(request, response, chunk)
        except ConnectionError:
            raise
        except Exception as error:
            on_failure(error)
            failure = explained(error, headers.get("request-id", ""))
            last = error_event(failure, dialect)
            if last:
                await _write(request, response, last)
        await response.write_eof()
    except ConnectionError as error:
        on_failure(error)
    return response


async def _write(request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
    transport = request.transport
    if transport is not None and len(chunk) <= SMALL_BYTES and not transport.get_write_buffer_size():
        await response.write(chunk)
        return
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(chunk)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:.0f} s") from error
