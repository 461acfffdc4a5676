"""The daemon as a program: binding, announcing, supervising, draining."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import aiohttp
import pytest

from q27app.daemon.serve import Notifier, run
from q27app.errors import EXIT_ADDRESS, EXIT_ENGINE_DIED, AddressInUse, EngineDied, OutOfMemory, UsageError

BODY = {"prompt": "hi", "max_tokens": 500}
END_S = 60.0
"""In which a daemon that ends has ended, on whatever machine; far less than what would keep it."""
NEVER = 600.0


@pytest.fixture
async def program(engine_of, tokenizer, template, config):
    """program(script, ...) -> (base URL, task of `run`, engine); stops what is left."""
    tasks: list[asyncio.Task] = []

    async def launch(script=("Hello",), config=config, notifier=None, engine=None, **options):
        engine = engine or engine_of(script, **options)
        announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        work = run(engine, tokenizer, template, config, announced.set_result, notifier)
        tasks.append(asyncio.create_task(work))
        await asyncio.wait([announced, tasks[-1]], return_when=asyncio.FIRST_COMPLETED)
        if not announced.done():
            await tasks[-1]
        return announced.result(), tasks[-1], engine

    yield launch
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


async def test_it_answers_when_it_announces_and_ends_with_zero(program, session):
    url, task, _ = await program()
    async with session.post(url + "/v1/completions", json=BODY) as response:
        assert response.status == 200
    send(signal.SIGTERM)
    assert await asyncio.wait_for(task, END_S) == 0
    with pytest.raises(aiohttp.ClientConnectorError):
        await session.get(url + "/health")


async def test_a_taken_port_is_named_before_anything_is_loaded(program, with_server, engine_of):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = engine_of()
        engine.start = lambda: pytest.fail("the engine was started without an address")
        with pytest.raises(AddressInUse, match=f"port {port} is in use") as caught:
            await program(config=with_server(port=port), engine=engine)
    assert caught.value.exit_code == EXIT_ADDRESS and "--port" in caught.value.hint


async def test_a_port_is_never_shared(program, with_server):
    url, _, _ = await program()
    with pytest.raises(AddressInUse):
        await program(config=with_server(port=int(url.rpartition(":")[2])))


async def test_an_address_of_another_machine_cannot_be_bound(program, with_server):
    with pytest.raises(AddressInUse, match="cannot be bound") as caught:
        await program(config=with_server(host="203.0.113.7", allow_open_bind=True))
    assert "--host" in caught.value.hint


async def test_draining_lets_answers_finish_and_refuses_new_ones(program, session, with_server):
    go_on = threading.Event()
    url, task, engine = await program(["a", go_on] + ["b"] * 10, config=with_server(drain_timeout_s=NEVER))
    answer = asyncio.create_task(session.post(url + "/v1/completions", json=BODY))
    while engine.said == 0:
        await asyncio.sleep(0.005)
    send(signal.SIGINT)
    reason = ""
    while "shutting down" not in reason:
        async with session.get(url + "/ready") as ready:
            reason = "" if ready.status == 200 else (await ready.json())["reason"]
    async with session.post(url + "/v1/messages", json=BODY) as refused:
        assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
        assert (await refused.json())["error"]["type"] == "overloaded_error"
    go_on.set()
    async with await answer as response:
        assert (await response.json())["choices"][0]["text"] == "a" + "b" * 10
    assert await asyncio.wait_for(task, END_S) == 0
    assert engine.cancels == []


async def test_draining_has_a_bound_and_tells_the_clients(program, session, with_server):
    url, task, engine = await program(["a", NEVER, "b"], config=with_server(drain_timeout_s=0.2))
    async with session.post(
        url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as response:
        while engine.said == 0:
            await asyncio.sleep(0.005)
        send(signal.SIGTERM)
        text = await response.text()
    assert '"error"' in text and "[DONE]" not in text
    assert await asyncio.wait_for(task, END_S) == 0
    assert len(engine.cancels) == 1


async def test_a_second_signal_stops_at_once(program, session, with_server):
    url, task, engine = await program(["a", NEVER, "b"], config=with_server(drain_timeout_s=NEVER))
    answer = asyncio.create_task(session.post(url + "/v1/completions", json=BODY))
    while engine.said == 0:
        await asyncio.sleep(0.005)
    send(signal.SIGTERM)
    await asyncio.sleep(0.1)
    assert not task.done()
    send(signal.SIGTERM)
    assert await asyncio.wait_for(task, END_S) == 0
    assert len(engine.cancels) == 1
    async with await answer as response:
        assert response.status == 503


@pytest.fixture
def supervisor(tmp_path):
    """(address, read): a datagram socket as systemd has it, and the messages so far."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = str(tmp_path / "notify")
    channel.bind(address)
    channel.setblocking(False)

    def read() -> str:
        messages = []
        while True:
            try:
                messages.append(channel.recv(4096).decode())
            except BlockingIOError:
                return "\n".join(messages)

    yield address, read
    channel.close()


async def told(read, *wanted: str) -> str:
    """What the supervisor is told until all of this is among it."""
    text = ""
    async with asyncio.timeout(END_S):
        while not all(each in text for each in wanted):
            await asyncio.sleep(0.01)
            text += read() + "\n"
    return text


async def test_the_supervisor_is_told(program, supervisor):
    address, read = supervisor
    _, task, engine = await program(notifier=Notifier(address))
    engine.state.state, engine.state.load_progress = "loading", 0.43
    await told(read, "READY=1")
    send(signal.SIGTERM)
    await asyncio.wait_for(task, END_S)
    assert "STOPPING=1" in read()


async def test_readiness_is_told_only_when_the_model_answers(program, supervisor, engine_of):
    address, read = supervisor
    engine = engine_of()
    engine.state.state, engine.state.load_progress = "loading", 0.43
    await program(notifier=Notifier(address), engine=engine)
    assert "READY=1" not in await told(read, "STATUS=loading 43%", "EXTEND_TIMEOUT_USEC=")
    engine.state.state = "ready"
    await told(read, "READY=1", "WATCHDOG=1")


@pytest.mark.parametrize(("state", "age", "lives"), [("unloaded", 1.0, True), ("ready", 90.0, False), ("failed", 1.0, False)])
async def test_the_watchdog_follows_the_engines_heartbeat(program, supervisor, engine_of, state, age, lives):
    address, read = supervisor
    engine = engine_of()
    engine.state.state, engine.state.heartbeat_age_s = "loading", age
    _, task, _ = await program(notifier=Notifier(address), engine=engine)
    read()
    engine.state.state = state
    if lives:
        await told(read, "WATCHDOG=1")
    elif state == "failed":
        await asyncio.wait([task], timeout=END_S)
        assert task.done() and "WATCHDOG=1" not in read()
        task.exception()
    else:
        await asyncio.sleep(0.6)
        assert "WATCHDOG=1" not in read()


async def test_an_absent_supervisor_is_no_failure(program):
    url, task, _ = await program(notifier=Notifier("@q27app-no-such-socket"))
    send(signal.SIGTERM)
    assert await asyncio.wait_for(task, END_S) == 0


async def test_a_model_that_does_not_load_ends_the_daemon_with_its_error(program, engine_of):
    engine = engine_of()
    engine.state.state, engine.state.error = "failed", OutOfMemory("needs 20 GB, 11 GB are free.")
    _, task, _ = await program(engine=engine)
    with pytest.raises(OutOfMemory, match="20 GB"):
        await asyncio.wait_for(task, END_S)


async def test_an_engine_that_dies_ends_a_supervised_daemon_with_the_restart_code(program, supervisor):
    address, read = supervisor
    _, task, engine = await program(notifier=Notifier(address))
    await told(read, "READY=1")
    engine.state.state, engine.state.error = "failed", EngineDied("sticky error.")
    assert await asyncio.wait_for(task, END_S) == EXIT_ENGINE_DIED
    assert "STATUS=the engine died" in read()


async def test_an_engine_that_dies_leaves_an_unsupervised_daemon_to_say_why(program, session, caplog):
    caplog.set_level("INFO", "q27app")
    url, task, engine = await program()
    await told(lambda: caplog.text, "ready: a context")
    engine.state.state, engine.state.error = "failed", EngineDied("sticky error.")
    await told(lambda: caplog.text, "the engine died")
    async with session.get(url + "/health") as response:
        assert response.status == 503 and "sticky error" in (await response.json())["reason"]
    assert not task.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, END_S) == EXIT_ENGINE_DIED


def test_serve_refuses_an_open_address_before_it_opens_a_model(with_server):
    from q27app.daemon.serve import serve

    with pytest.raises(UsageError, match="without any key"):
        serve(with_server(host="0.0.0.0"))


def test_a_configuration_file_that_is_named_and_missing_is_told(monkeypatch, tmp_path, caplog):
    from q27app.daemon.serve import _warn_of_a_missing_file

    path = tmp_path / "mine.toml"
    monkeypatch.setenv("Q27APP_CONFIG", str(path))
    _warn_of_a_missing_file()
    assert str(path) in caplog.text and "does not exist" in caplog.text
    caplog.clear()
    path.touch()
    _warn_of_a_missing_file()
    monkeypatch.delenv("Q27APP_CONFIG")
    _warn_of_a_missing_file()
    assert not caplog.text
