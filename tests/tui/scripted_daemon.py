"""A daemon that says what it is told to, over real HTTP: the status, the events, the pieces of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

Step = str | float | asyncio.Event | dict[str, Any]
"""A piece of text, seconds or an event to wait for, or a delta of the OpenAI dialect."""


class ScriptedDaemon:
    """status: what /status says; None = 500. script: request body -> steps of the answer. Owner of what it has been asked."""

    def __init__(self, status: dict[str, Any] | None = None, events: Iterable[dict[str, Any]] = ()) -> None:
        self.status = status
        self.events = [{"number": index + 1, **event} for index, event in enumerate(events)]
        self.script: Callable[[dict[str, Any]], Iterable[Step]] = lambda body: ["Hello", " there"]
        self.usage: dict[str, Any] = {"prompt_tokens": 20, "completion_tokens": 2}
        self.asked: list[dict[str, Any]] = []
        self.orders: list[str] = []
        self.num_broken_off = 0
        self.url, self.port = "", 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ScriptedDaemon:
        app = web.Application()
        app.add_routes([
            web.get("/status", self._status), web.get("/health", self._health), web.get("/admin/events", self._events),
            web.post("/v1/chat/completions", self._chat), web.post("/admin/{order:.*}", self._order)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Nothing listens any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _status(self, request: web.Request) -> web.Response:
        if self.status is None:
            return web.json_response({"error": {"message": "no status."}}, status=500)
        return web.json_response(self.status)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _order(self, request: web.Request) -> web.Response:
        self.orders.append(request.match_info["order"])
        return web.json_response({})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(3600)
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        steps = self.script(body)
        if isinstance(steps, web.Response):
            return steps
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await response.write(_chunk({"choices": [{"delta": {"content": step} if isinstance(step, str) else step}]}))
            await response.write(_chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
            await response.write(_chunk({"choices": [], "usage": self.usage}) + b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_broken_off += 1
            raise
        return response


def _chunk(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
