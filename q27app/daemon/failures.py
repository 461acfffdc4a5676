"""Any `Q27Error` as the HTTP status, headers and body that the client's dialect knows, before and after headers."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

from q27app.errors import (
    BadRequest,
    ContextTooLong,
    EngineDied,
    Forbidden,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Q27Error,
    Unauthorized,
)

log = logging.getLogger("q27app.daemon")


class Cancelled(Q27Error):
    """The operator ended this request."""

    http_status = 503
    code = "cancelled"


class RequestTimeout(BadRequest):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class BrokenBody(BadRequest):
    """The body cannot be unpacked; what comes after it on its connection cannot be told."""


class UnsupportedMediaType(BadRequest):
    """A POST whose body is not declared as JSON."""

    http_status = 415
    code = "unsupported_media_type"


class MethodNotAllowed(BadRequest):
    """The route exists for other methods: `allowed`."""

    http_status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: list[str]) -> None:
        super().__init__(f"{path} does not take {method}.", f"Allowed: {', '.join(allowed)}.")
        self.allowed = allowed


ANTHROPIC_TYPES: tuple[tuple[type[Q27Error], str], ...] = (
    (Unauthorized, "authentication_error"),
    (Forbidden, "permission_error"),
    (NotFound, "not_found_error"),
    (PayloadTooLarge, "request_too_large"),
    (BadRequest, "invalid_request_error"),
    (Overloaded, "overloaded_error"),
)
"""First match wins; everything else is api_error."""

OPENAI_TYPES: tuple[tuple[type[Q27Error], str], ...] = (
    (Unauthorized, "invalid_request_error"),
    (Forbidden, "permission_error"),
    (NotFound, "invalid_request_error"),
    (BadRequest, "invalid_request_error"),
    (Overloaded, "overloaded_error"),
    (EngineDied, "server_error"),
)
"""First match wins; everything else is api_error."""


def dialect_of(path: str) -> str:
    """ "messages" for the Anthropic routes, "responses" for that one, "openai" for all others."""
    while path.startswith("/v1/v1/"):
        path = path[3:]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "messages"
    return "responses" if path == "/v1/responses" else "openai"


def explained(error: BaseException, request_id: str) -> Q27Error:
    """The error to answer with.

    One that is not ours is logged with its place but without its message, which may quote a prompt; the client gets the
    id under which the log has it.
    """
    if isinstance(error, Q27Error):
        return error
    place = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s: %s\n%s", request_id, type(error).__name__, place)
    return Q27Error("internal error.", f"The daemon's log has the details under request {request_id}.")


def error_body(error: Q27Error, dialect: str) -> dict[str, Any]:
    """The JSON object of an error reply."""
    if dialect == "messages":
        kind = _type_of(error, ANTHROPIC_TYPES)
        message = "invalid x-api-key" if isinstance(error, Unauthorized) else _text(error)
        return {"type": "error", "error": {"type": kind, "message": message}}
    message = "Incorrect API key provided" if isinstance(error, Unauthorized) else _text(error)
    detail = {
        "message": message,
        "type": _type_of(error, OPENAI_TYPES),
        "param": getattr(error, "param", None),
        "code": error.code,
    }
    return {"error": detail}


def error_headers(error: Q27Error, dialect: str) -> dict[str, str]:
    """Headers that belong to an error reply."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized) and dialect != "messages":
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    return headers


def error_event(error: Q27Error, dialect: str) -> bytes:
    """The error inside a stream whose headers are sent. Nothing well-formed follows it. b"" for "responses": its own
    event has told of the failure."""
    if dialect == "responses":
        return b""
    data = dump(error_body(error, dialect))
    return b"event: error\ndata: " + data + b"\n\n" if dialect == "messages" else b"data: " + data + b"\n\n"


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates become U+FFFD."""
    text = _ENCODER.encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _type_of(error: Q27Error, table: tuple[tuple[type[Q27Error], str], ...]) -> str:
    return next((name for kind, name in table if isinstance(error, kind)), "api_error")


def _text(error: Q27Error) -> str:
    return error.message if isinstance(error, ContextTooLong) else str(error)
