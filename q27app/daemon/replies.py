"""A JSON reply in our own spelling."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from q27app.daemon.failures import dump


def json_response(value: Any, status: int = 200) -> web.Response:
    """`value` as compact JSON in UTF-8."""
    return web.Response(body=dump(value), status=status, content_type="application/json", charset="utf-8")
