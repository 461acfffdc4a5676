"""The daemon on a real loopback socket, with the real chat room and a scripted engine."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from q27app.chat.template import open_template
from q27app.chat.tokenizer import Tokenizer
from q27app.config import Config
from q27app.daemon.app import make_app, make_runner
from q27app.daemon.daemon import DAEMON, Daemon
from q27app.weights.demo_tokenizer import train


def _load_scripted() -> Any:
    """The double lives in its own file; test folders are no packages."""
    name = "q27app_tests_scripted"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("scripted.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


scripted = _load_scripted()


class Running:
    """A daemon that listens. url: its base; engine: the double; daemon: its shared state; replies: (method, path,
    status) of every reply that was begun."""

    def __init__(self, url: str, port: int, engine: Any, daemon: Daemon, session: aiohttp.ClientSession) -> None:
        self.url, self.port, self.engine, self.daemon, self.session = url, port, engine, daemon, session
        self.replies: list[tuple[str, str, int]] = []

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """(status, JSON of the reply)."""
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        """(status, JSON of the reply)."""
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Any, when: dict[str, threading.Event] | None = None) -> str:
        """The whole text of an event stream. when: words -> what is set as soon as the stream holds them."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = b""
            async for piece in response.content.iter_any():
                text += piece
                for words, event in (when or {}).items():
                    if words.encode() in text:
                        event.set()
            return text.decode()

    def shrink_buffers(self) -> None:
        """Connections accepted from now on hold only little that their reader has not taken."""
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def quiet(self) -> None:
        """Wait until no request is in flight and the engine is idle."""
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            if not self.daemon.active and self.engine.is_idle:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"still in flight: {list(self.daemon.active)}, engine idle: {self.engine.is_idle}")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes and control tokens, nothing merged."""
    return Tokenizer.from_metadata({"tokenizer.huggingface.json": train([], 265)})


@pytest.fixture(scope="session")
def template(tokenizer):
    return open_template({}, tokenizer)


@pytest.fixture
def config() -> Config:
    """Short intervals, so that no test waits."""
    base = Config()
    return replace(
        base,
        server=replace(base.server, port=0, ping_interval_s=0.1, drain_timeout_s=2.0, load_wait_s=0.1),
        model=replace(base.model, path="/models/tiny-1.q27"),
    )


@pytest.fixture
def engine_of(tokenizer) -> Callable[..., Any]:
    """Makes scripted engines and closes them."""
    engines = []

    def make(*args: Any, **kwargs: Any) -> Any:
        engines.append(scripted.ScriptedEngine(tokenizer, *args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def ticking_engine(tokenizer) -> Callable[..., Any]:
    """Makes ticking engines and closes them."""
    engines = []

    def make(*args: Any) -> Any:
        engines.append(scripted.TickingEngine(tokenizer, *args))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def stubborn_engine(tokenizer) -> Callable[..., Any]:
    """Makes engines that keep to a guide's masks, and closes them."""
    engines = []

    def make(*args: Any, **kwargs: Any) -> Any:
        engines.append(scripted.StubbornEngine(tokenizer, *args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
async def start(engine_of, tokenizer, template, config) -> AsyncIterator[Callable[..., Any]]:
    """start(script, config=..., engine=..., template=..., **engine options) -> Running."""
    opened: list[tuple[Any, aiohttp.ClientSession]] = []

    async def make(
        script: Any = ("Hello", "!"),
        config: Config = config,
        engine: Any = None,
        template: Any = template,
        **options: Any,
    ) -> Running:
        engine = engine or engine_of(script, **options)
        app = make_app(engine, tokenizer, template, config)
        replies: list[tuple[str, str, int]] = []

        async def note(request: Any, response: Any) -> None:
            replies.append((request.method, request.path, response.status))

        app.on_response_prepare.append(note)
        runner = make_runner(app, shutdown_timeout_s=0.1)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        session = aiohttp.ClientSession()
        opened.append((runner, session))
        running = Running(f"http://127.0.0.1:{port}", port, engine, app[DAEMON], session)
        running.listener = site._server.sockets[0]
        running.replies, running.app = replies, app
        return running

    yield make
    for runner, session in opened:
        await session.close()
        await runner.cleanup()


@pytest.fixture
def with_server(config) -> Callable[..., Config]:
    """with_server(api_keys=(...)) -> the configuration with these server settings."""
    return lambda **changes: replace(config, server=replace(config.server, **changes))
