"""A server of OpenAI's dialect whose every answer is known, on a loopback port of its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class OpenAIDouble:
    """words: each answer has so many pieces, unless the request wants fewer. delay_s: between pieces. tells_usage,
    has_logprobs, takes_ids: what it can. window: words of the longest prompt. key: required where not "". answer: what it says instead of words. fail_after:
    from that request on it answers 500. hold_after: later ones wait for their answers until it is raised."""

    def __init__(self, words: int = 5, delay_s: float = 0.0, tells_usage: bool = True, has_logprobs: bool = True,
                 takes_ids: bool = True, key: str = "", answer: Any = None, fail_after: int = 10**9, window: int = 10**9,
                 hold_after: int = 10**9) -> None:
        self.words, self.delay_s, self.tells_usage = words, delay_s, tells_usage
        self.has_logprobs, self.takes_ids, self.key, self.answer, self.fail_after = has_logprobs, takes_ids, key, answer, fail_after
        self.window, self.hold_after = window, hold_after
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def __enter__(self) -> OpenAIDouble:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return None

    async def _models(self, request: web.Request) -> web.Response:
        return self._refusal(request) or web.json_response({"data": [{"id": "double"}]})

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        prompt = sum(len(str(message.get("content")).split()) for message in body.get("messages", []))
        before = [old for old in self.bodies[:-1] if old.get("messages") == body.get("messages")]
        return {"prompt_tokens": prompt, "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": prompt - 1 if before else 0}}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        while number > self.hold_after:
            await asyncio.sleep(0.01)
        if number > self.fail_after:
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        if self._usage(body, 0)["prompt_tokens"] > self.window:
            return web.json_response({"error": {"message": f"prompt is too long, more than {self.window}"}}, status=400)
        count = min(self.words, body.get("max_tokens", self.words))
        words = [f"word{index} " for index in range(count)] if self.answer is None else self.answer(body)
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": "".join(words)}, "finish_reason": "stop"}],
                                      "usage": self._usage(body, count)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            await self._send(response, {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
            await asyncio.sleep(self.delay_s)
        await self._send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if self.tells_usage:
            await self._send(response, {"choices": [], "usage": self._usage(body, len(words))})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("logprobs") and not self.has_logprobs:
            return web.json_response({"error": {"message": "logprobs is not supported"}}, status=400)
        if not self.takes_ids:
            return web.json_response({"error": {"message": "prompt: expected a string"}}, status=400)
        pieces = [f"t{index} " for index in range(body["max_tokens"])]
        logprobs = {"tokens": pieces} if body.get("logprobs") else None
        return web.json_response({"choices": [{"text": "".join(pieces), "logprobs": logprobs}]})

    @staticmethod
    async def _send(response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")
