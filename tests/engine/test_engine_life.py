"""The engine's states: loading, unloading, draining, closing, being idle."""

from __future__ import annotations

import threading
import time

import pytest

import q27app.engine.engine as engine_module
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig, auto_chunk
from q27app.engine.request import FinishReason
from q27app.errors import EngineDied, OutOfMemory, Overloaded, Q27Error, UsageError
from tests.engine.toy import expected_text, load_toy
from tests.engine.waiting import WAIT_S, Waiting, ask, until


def loads(*results):
    """A load's function: what each load ends with, in turn; of an exception it dies."""
    left = list(results)

    def opens(config, progress):
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return opens


def test_a_model_that_cannot_be_loaded_is_told_and_refuses_requests(open_engine):
    def opens(config, progress):
        raise OutOfMemory("27 GB are needed, 3 GB are free.")

    engine = open_engine(opens, ready=False)
    until(lambda: engine.status().state == "failed")
    assert isinstance(engine.status().error, OutOfMemory) and engine.max_context is None
    with pytest.raises(EngineDied, match="27 GB"):
        ask(engine)
    assert isinstance(engine.load().exception(WAIT_S), OutOfMemory)


@pytest.mark.parametrize("problem, kind, says", [
    (MemoryError("Unable to allocate 4.00 GiB"), OutOfMemory, "host memory does not hold the model: Unable to allocate"),
    (MemoryError(), OutOfMemory, "the system gives no more"), (KeyError("blk.3"), Q27Error, "could not be loaded: KeyError: 'blk.3'"),
])
def test_whatever_loading_ends_with_the_engine_lives_and_loads_another(open_engine, problem, kind, says, caplog):
    engine = open_engine(loads(load_toy(), problem, load_toy()))
    engine.unload().result(WAIT_S)
    error = engine.load().exception(WAIT_S)
    assert type(error) is kind and says in str(error) and "Traceback" in caplog.text
    assert engine.status().state == "unloaded"
    engine.load().result(WAIT_S)
    assert ask(engine).wait().tokens == expected_text((1, 2, 3), 10)


def test_loading_shows_progress_and_refuses_meanwhile(open_engine):
    go_on = threading.Event()

    def opens(config, progress):
        progress(0.25)
        go_on.wait(WAIT_S)
        return load_toy()

    engine = open_engine(opens, ready=False)
    assert engine.status().state == "loading"
    until(lambda: engine.status().load_progress == 0.25)
    with pytest.raises(Overloaded, match="loading"):
        ask(engine)
    go_on.set()
    until(lambda: engine.status().state == "ready")
    assert engine.status().load_progress == 1.0 and engine.max_context == 512


def test_closing_gives_up_loading(open_engine):
    is_loading, has_given_up = threading.Event(), []

    def opens(config, progress):
        is_loading.set()
        try:
            for step in range(100_000):
                progress(step / 100_000)
                time.sleep(0.002)
        except BaseException as error:
            has_given_up.append(error)
            raise
        return load_toy()

    engine = open_engine(opens, ready=False)
    assert is_loading.wait(WAIT_S)
    engine.close()
    assert has_given_up and engine.status().state == "closed"


def test_unload_lets_running_requests_finish_and_load_brings_the_model_back(open_engine):
    made = []

    def opens(config, progress):
        made.append(load_toy(slots=1))
        return made[-1]

    engine = open_engine(opens)
    hold = threading.Event()
    answer = ask(engine, answer=Waiting(hold))
    assert answer.has_begun.wait(WAIT_S)
    unloaded, loaded = engine.unload(), engine.load()
    assert engine.status().state == "draining"
    with pytest.raises(Overloaded, match="draining"):
        ask(engine, "late")
    hold.set()
    assert answer.wait().finish is FinishReason.LENGTH
    unloaded.result(WAIT_S), loaded.result(WAIT_S)
    assert len(made) == 2 and made[0].model.backend.is_closed and not made[1].model.backend.is_closed
    assert ask(engine, "late").wait().tokens == expected_text((1, 2, 3), 10)
    engine.unload().result(WAIT_S)
    status = engine.status()
    assert status.state == "unloaded" and status.plan == {} and engine.max_context is None
    engine.unload().result(WAIT_S)
    engine.load().result(WAIT_S)
    engine.load().result(WAIT_S)
    assert engine.status().state == "ready" and len(made) == 3


@pytest.mark.parametrize("kind", ["unload", "drain", "load"])
def test_who_gave_an_order_may_leave_and_it_is_obeyed(open_engine, kind):
    engine = open_engine(lambda config, progress: load_toy(slots=1))
    hold = threading.Event()
    answer = ask(engine, answer=Waiting(hold))
    assert answer.has_begun.wait(WAIT_S)
    order = getattr(engine, kind)()
    assert not order.cancel()
    hold.set()
    assert answer.wait().finish is FinishReason.LENGTH and order.result(WAIT_S) is None
    engine.load().result(WAIT_S)
    assert ask(engine, "next").wait().tokens == expected_text((1, 2, 3), 10) and engine.status().error is None


def test_a_later_load_that_fails_leaves_the_engine_unloaded(open_engine):
    engine = open_engine(loads(load_toy(), OutOfMemory("a game has taken the card."), load_toy()))
    engine.unload().result(WAIT_S)
    assert isinstance(engine.load().exception(WAIT_S), OutOfMemory)
    assert engine.status().state == "unloaded" and "a game" in str(engine.status().error)
    engine.load().result(WAIT_S)
    assert engine.status().error is None and ask(engine).wait().tokens


def test_drain_refuses_new_requests_and_ends_with_the_last_one(open_engine):
    engine = open_engine(slots=1)
    hold = threading.Event()
    running = ask(engine, "running", answer=Waiting(hold))
    waiting = ask(engine, "waiting")
    assert running.has_begun.wait(WAIT_S)
    drained = engine.drain()
    with pytest.raises(Overloaded):
        ask(engine, "late")
    assert not drained.done()
    hold.set()
    drained.result(WAIT_S)
    assert running.finish is waiting.finish is FinishReason.LENGTH
    assert engine.status().state == "draining"
    engine.load().result(WAIT_S)
    assert ask(engine, "late").wait().tokens


def test_close_ends_running_and_waiting_requests_and_orders(open_engine):
    engine = open_engine(slots=1)
    hold = threading.Event()
    running = ask(engine, "running", max_tokens=400, answer=Waiting(hold))
    waiting = ask(engine, "waiting")
    assert running.has_begun.wait(WAIT_S)
    order = engine.drain()
    lets_go = threading.Thread(target=lambda: (until(lambda: engine._is_closing), hold.set()))
    lets_go.start()
    engine.close()
    lets_go.join()
    for answer in (running.wait(), waiting.wait()):
        assert answer.finish is FinishReason.ERROR and isinstance(answer.last.error, Overloaded)
    assert isinstance(order.exception(WAIT_S), EngineDied)
    with pytest.raises(Overloaded):
        ask(engine, "late")
    engine.close()


def test_twenty_starts_and_stops_leave_no_thread_and_no_memory(open_engine):
    before = threading.active_count()
    for index in range(20):
        loaded = load_toy()
        engine = Engine(EngineConfig(), lambda config, progress: loaded)
        engine.start()
        if index % 2:
            until(lambda: engine.status().state == "ready")
            answer = ask(engine, max_tokens=100)
            if index % 4 == 1:
                answer.wait()
        engine.close()
        assert index % 2 == 0 or answer.is_done.is_set()
        assert loaded.model.backend.is_closed or engine.max_context is None
    until(lambda: threading.active_count() <= before)


def test_an_engine_that_was_never_started_can_be_closed_and_refuses():
    engine = Engine(EngineConfig())
    assert engine.status().state == "unloaded"
    with pytest.raises(Overloaded):
        ask(engine)
    assert isinstance(engine.load().exception(WAIT_S), EngineDied)
    engine.close()
    assert engine.status().state == "closed"


def test_the_heartbeat_beats_while_idle_and_unloaded(open_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_S", 0.02)
    engine = open_engine()
    engine.unload().result(WAIT_S)
    stamps = set()
    until(lambda: stamps.add(engine._heartbeat) or len(stamps) > 3)
    assert engine.status().heartbeat_age_s < WAIT_S


def test_an_idle_engine_does_not_spin(open_engine, monkeypatch):
    reads = []
    original = Engine._read_inbox
    monkeypatch.setattr(Engine, "_read_inbox", lambda self, timeout_s: reads.append(timeout_s) or original(self, timeout_s))
    engine = open_engine()
    ask(engine).wait()
    until(lambda: not engine.status().running and reads[-1] > 0)
    before, started = len(reads), time.monotonic()
    time.sleep(0.2)
    assert len(reads) - before <= (time.monotonic() - started) / engine_module.IDLE_S + 1, "it waits as long as it may"


def test_a_card_with_room_takes_larger_chunks():
    assert [auto_chunk("cuda", gib << 30) for gib in (8, 24, 80)] == [1024, 1024, 2048]
    assert auto_chunk("numpy", 80 << 30) == 256


@pytest.mark.parametrize("options", [{"prefill_chunk": 100}, {"prefill_chunk": 0}, {"prefill_chunk": 1 << 20}, {"max_queue": -1}])
def test_settings_that_cannot_be_used_are_refused_at_once(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Engine(EngineConfig(**options))
