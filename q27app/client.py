"""A small HTTP client for the daemon, used by tui, bench and cli. Every failure is a `Q27Error`.

`async with Client(url, key) as client:` owns one connection pool. Streams are plain async iterators; leaving one early
closes its connection, and the daemon cancels the request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from q27app.errors import BadRequest, Forbidden, NotFound, Overloaded, Q27Error, Unauthorized, Unreachable

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 60.0
"""A stream that says nothing, not even a ping, for so long is dead."""
MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer.

    kind: "reasoning" | "text" | "call" | "ping" | "finish". call: {"index", "id", "name", "arguments"} as far as it is
    known (arguments is the next piece of its JSON text). finish and usage are set in the last piece.
    """

    kind: str
    text: str = ""
    call: dict[str, Any] | None = None
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def base_url(host: str, port: int) -> str:
    """The URL under which a daemon configured for this address is reached from this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if host != "::" else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Client:
    """Talks to the daemon at `url`, with or without /v1 at its end. key: sent if not "". silence_s: see SILENCE_TIMEOUT_S."""

    def __init__(self, url: str, key: str = "", silence_s: float = SILENCE_TIMEOUT_S) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._silence_s = silence_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._silence_s)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def health(self) -> dict[str, Any]:
        """What /health says, also when it is 503. Raises Unreachable."""
        return await self._object("GET", "/health", accept=(503,))

    async def ready(self) -> dict[str, Any]:
        """What /ready says: "ready" and, if not, "reason"."""
        return await self._object("GET", "/ready", accept=(503,))

    async def status(self) -> dict[str, Any]:
        """The whole of /status."""
        return await self._object("GET", "/status")

    async def models(self) -> list[str]:
        """Names of the served models."""
        return [entry["id"] for entry in (await self._object("GET", "/v1/models"))["data"]]

    async def catalogue(self) -> dict[str, Any]:
        """The whole of /v1/models: `data`, and `models` as Codex' catalogue describes them."""
        return await self._object("GET", "/v1/models")

    async def load(self, wait: bool = True) -> dict[str, Any]:
        """Load the model."""
        return await self._object("POST", "/admin/load", {"wait": wait}, is_patient=True)

    async def unload(self, wait: bool = True) -> dict[str, Any]:
        """Unload the model."""
        return await self._object("POST", "/admin/unload", {"wait": wait}, is_patient=True)

    async def reload(self) -> dict[str, Any]:
        """Have the configuration read again: keys that are "live", of the "model", "refused", and "error"."""
        return await self._object("POST", "/admin/reload", {}, is_patient=True)

    async def cancel(self, request_id: str) -> None:
        """End a request. Raises NotFound."""
        await self._object("POST", f"/admin/cancel/{quote(request_id, safe='')}", {})

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> AsyncIterator[Piece]:
        """Stream an answer. fields: further members of the request (model, max_tokens, temperature, tools...)."""
        body = {"messages": messages, **fields, "stream": True, "stream_options": {"include_usage": True}}
        finish = ""
        async for chunk in self.chunks("/v1/chat/completions", body):
            if not chunk:
                yield Piece("ping")
                continue
            for choice in chunk.get("choices") or []:
                for piece in pieces(choice.get("delta") or {}):
                    yield piece
                finish = choice.get("finish_reason") or finish
            if chunk.get("usage"):
                yield Piece("finish", finish=finish, usage=chunk["usage"])

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream of OpenAI's, as they come; {} for a ping. Raises what the server says went wrong."""
        async for _, data in self._events("POST", path, body):
            if data == "[DONE]":
                return
            chunk = _loads(data) if data else {}
            if "error" in chunk:
                raise _error_from(500, chunk, f"POST {self.url}{path}")
            yield chunk
        raise Unreachable(f"{self.url}: the answer broke off.", "Look at the daemon's log.")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer to a request without stream. Waits as long as it takes."""
        return await self._object("POST", path, body, is_patient=True)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What happens in the daemon, the latest events first, then as it happens."""
        async for _, data in self._events("GET", "/admin/events", None):
            if data:
                yield _loads(data)

    async def _object(
        self, method: str, path: str, body: Any = None, accept: tuple[int, ...] = (), is_patient: bool = False
    ) -> dict[str, Any]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None if is_patient else 30.0, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status >= 400 and response.status not in accept:
                    raise _refusal(response.status, text, f"{method} {self.url}{path}")
                return _loads(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def _events(self, method: str, path: str, body: Any) -> AsyncIterator[tuple[str, str]]:
        """(event name, data) of a stream; ("", "") for a comment."""
        import aiohttp

        try:
            async with self._open().request(method, self.url + path, json=body) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.text(), f"{method} {self.url}{path}")
                async for event in _parse_events(response.content.iter_any()):
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use `async with Client(...)`"
        return self._session

    def _unreachable(self, error: BaseException) -> Unreachable:
        refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
        return Unreachable(
            f"{self.url} does not answer: {'nobody listens there' if refused else error or type(error).__name__}.",
            "Start the daemon with `q27app serve`, or give its address.",
        )


async def _parse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, str]]:
    """Server-sent events out of any split of bytes. Raises Q27Error for an event over MAX_EVENT_BYTES."""
    buffer = b""
    async for chunk in chunks:
        buffer = (buffer + chunk).replace(b"\r\n", b"\n")
        *blocks, buffer = buffer.split(b"\n\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise Q27Error(f"the daemon sent an event of more than {MAX_EVENT_BYTES} bytes.")
        for block in blocks:
            lines = block.decode("utf-8", "replace").split("\n")
            name = next((line[6:].strip() for line in lines if line.startswith("event:")), "")
            yield name, "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))


def pieces(delta: dict[str, Any]) -> list[Piece]:
    """The parts of one delta of a chat stream."""
    found = [
        Piece(kind, delta[key])
        for kind, key in (("reasoning", "reasoning_content"), ("text", "content"))
        if delta.get(key)
    ]
    for entry in delta.get("tool_calls") or []:
        function = entry.get("function") or {}
        call = {
            "index": entry.get("index", 0),
            "id": entry.get("id", ""),
            "name": function.get("name", ""),
            "arguments": function.get("arguments", ""),
        }
        found.append(Piece("call", call=call))
    return found


def _loads(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Unreachable(
            "the address answers, but not as q27app does.", "Is another program on this port?"
        ) from error
    return value if isinstance(value, dict) else {}


def _refusal(status: int, text: str, asked: str) -> Q27Error:
    """The error in the body of a refusal, whoever's it is."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return _error_from(status, value if isinstance(value, dict) else {}, asked)


def _error_from(status: int, body: dict[str, Any], asked: str) -> Q27Error:
    detail = body.get("error")
    message = detail.get("message", "") if isinstance(detail, dict) else ""
    message = message or body.get("reason") or f"{asked} was answered with status {status}."
    kinds = {401: Unauthorized, 403: Forbidden, 404: NotFound, 503: Overloaded, 529: Overloaded}
    hints = {401: "Give the key that the server wants.", 403: "Give a key that may do this.",
             404: "Is the address right, and is it a server of OpenAI's dialect?"}
    if not (detail or body.get("reason")) and status >= 500:
        hints = hints | {status: "Is the address right, and is it a server of OpenAI's dialect? Its log may say more."}
    kind = kinds.get(status) or (BadRequest if 400 <= status < 500 else Q27Error)
    return kind(str(message)[:2000], hints.get(status, ""))
