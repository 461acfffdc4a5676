"""The engine's door: threads, states, and one final event for every request whatever happens."""

from __future__ import annotations

import json
import threading
import time

import pytest

import q27app.engine.engine as engine_module
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import BadRequest, ContextTooLong, EngineDied, GpuError, OutOfMemory, Overloaded, UsageError
from tests.engine.toy import VOCAB, Answer, expected_text, load_toy

WAIT_S = 20.0


class Waiting(Answer):
    """An answer that another thread can wait for. pause: the engine thread stands still in the first token event."""

    def __init__(self, pause: threading.Event | None = None) -> None:
        super().__init__()
        self.pause, self.has_begun, self.is_done = pause, threading.Event(), threading.Event()

    def __call__(self, event):
        super().__call__(event)
        if event.tokens:
            self.has_begun.set()
            if self.pause is not None:
                self.pause.wait(WAIT_S)
        if event.finish is not None:
            self.is_done.set()

    def wait(self):
        assert self.is_done.wait(WAIT_S), "no final event"
        return self


@pytest.fixture
def open_engine():
    """open_engine(loaded or error or function, config options) -> a started engine; ready unless ready=False."""
    engines = []

    def make(loaded=None, ready=True, max_queue=64, **options):
        source = load_toy(**options) if loaded is None else loaded
        opens = source if callable(source) else lambda config, progress: source
        engine = Engine(EngineConfig(model="toy.q27", max_queue=max_queue, checks_pools=True), opens)
        engines.append(engine)
        engine.start()
        if ready:
            until(lambda: engine.status().state == "ready")
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive() and engine.status().state == "closed"


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def ask(engine, name="a", prompt=(1, 2, 3), max_tokens=10, answer=None, **options):
    answer = answer or Waiting()
    engine.submit(Request(name, prompt, SamplingParams(max_tokens=max_tokens), **options), answer)
    return answer


def test_an_answer_arrives_and_the_name_is_free_again(open_engine):
    engine = open_engine()
    for _ in range(2):
        assert ask(engine).wait().tokens == expected_text((1, 2, 3), 10)
    assert engine.cancel("a") is False


def test_many_threads_submit_and_cancel_and_everybody_gets_one_final_event(open_engine):
    engine = open_engine(slots=3, max_context=256, max_queue=1000)
    answers = {}

    def client(number):
        for index in range(12):
            name = f"{number}.{index}"
            answers[name] = ask(engine, name, (number, index, 5), 20)
            if index % 3 == 0:
                engine.cancel(name)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for name, answer in answers.items():
        number, index = map(int, name.split("."))
        text = expected_text((number, index, 5), 20)
        assert answer.wait().tokens == text[:len(answer.tokens)]
        assert answer.finish is FinishReason.LENGTH and answer.tokens == text or index % 3 == 0
    assert len(answers) == 72
    until(lambda: engine.status().running == [])


def test_a_full_queue_refuses_with_a_time_to_come_back(open_engine):
    engine = open_engine(slots=1, max_queue=2)
    hold = threading.Event()
    first = ask(engine, "first", answer=Waiting(hold))
    assert first.has_begun.wait(WAIT_S)
    others = [ask(engine, f"r{index}") for index in range(2)]
    with pytest.raises(Overloaded, match="1 requests run and 2 wait") as caught:
        ask(engine, "late")
    assert caught.value.retry_after_s >= 1
    status = engine.status()
    assert (len(status.running), status.waiting, status.counters["refusals"]) == (1, 2, 1)
    hold.set()
    for answer in [first, *others]:
        assert answer.wait().finish is FinishReason.LENGTH
    assert ask(engine, "late").wait().tokens


def test_what_cannot_be_served_is_refused_before_anything_is_queued(open_engine):
    engine = open_engine(max_context=100)
    with pytest.raises(ContextTooLong):
        ask(engine, prompt=(1,) * 101)
    with pytest.raises(BadRequest):
        ask(engine, prompt=(VOCAB,))
    hold = threading.Event()
    first = ask(engine, "same", answer=Waiting(hold))
    with pytest.raises(BadRequest, match="already in work"):
        ask(engine, "same")
    hold.set()
    first.wait()
    assert engine.status().counters["requests"] == 1


def test_a_cancel_from_another_thread_ends_a_running_and_a_waiting_request(open_engine):
    engine = open_engine(slots=1)
    hold = threading.Event()
    running = ask(engine, "running", max_tokens=400, answer=Waiting(hold))
    assert running.has_begun.wait(WAIT_S)
    waiting = ask(engine, "waiting")
    assert engine.cancel("waiting") and engine.cancel("running") and not engine.cancel("nobody")
    hold.set()
    assert waiting.wait().finish is running.wait().finish is FinishReason.CANCELLED
    assert waiting.tokens == [] and 1 <= len(running.tokens) < 400
    assert engine.status().counters["cancels"] == 2


def test_a_receiver_that_raises_does_not_end_the_engine(open_engine):
    engine = open_engine()
    seen = []

    def deliver(event):
        seen.append(event)
        raise RuntimeError("closed loop")

    ask(engine, "bad", answer=deliver)
    until(lambda: seen and seen[-1].finish)
    assert [event.finish for event in seen if event.finish] == [FinishReason.CANCELLED]
    assert ask(engine, "good").wait().tokens == expected_text((1, 2, 3), 10)


def test_requests_may_be_submitted_and_cancelled_from_a_receiver(open_engine):
    engine = open_engine()
    second = Waiting()

    def deliver(event):
        if event.finish is not None:
            ask(engine, "first", answer=second)

    ask(engine, "first", answer=deliver)
    assert second.wait().tokens == expected_text((1, 2, 3), 10)


@pytest.mark.parametrize("error", [GpuError("the card fell off the bus."), ValueError("a bug"), MemoryError()])
def test_the_death_of_the_engine_reaches_everybody_once(open_engine, error):
    loaded = load_toy(slots=2)
    engine = open_engine(loaded)
    answers = [ask(engine, f"r{index}", max_tokens=400) for index in range(5)]
    assert answers[0].has_begun.wait(WAIT_S)

    def fail(batch):
        raise error

    loaded.model.before = fail
    for answer in answers:
        assert answer.wait().finish is FinishReason.ERROR and isinstance(answer.last.error, EngineDied)
    until(lambda: engine.status().state == "failed")
    assert type(error).__name__ in str(engine.status().error) or str(error) in str(engine.status().error)
    with pytest.raises(EngineDied):
        ask(engine, "late")
    for order in (engine.load(), engine.unload(), engine.drain()):
        assert isinstance(order.exception(WAIT_S), EngineDied)
    until(lambda: loaded.model.backend.is_closed)
    assert engine.cancel("r0") is False


def test_requests_in_the_inbox_of_a_dying_engine_end_too(open_engine):
    loaded = load_toy(slots=1)
    engine = open_engine(loaded)
    hold = threading.Event()
    first = ask(engine, "first", answer=Waiting(hold))
    assert first.has_begun.wait(WAIT_S)
    unread, order = ask(engine, "unread"), engine.drain()

    def fail(batch):
        raise ValueError("a bug")

    loaded.model.before = fail
    hold.set()
    for answer in (first, unread):
        assert isinstance(answer.wait().last.error, EngineDied)
    assert isinstance(order.exception(WAIT_S), EngineDied)


def test_a_model_that_cannot_be_loaded_is_told_and_refuses_requests(open_engine):
    def opens(config, progress):
        raise OutOfMemory("27 GB are needed, 3 GB are free.")

    engine = open_engine(opens, ready=False)
    until(lambda: engine.status().state == "failed")
    assert isinstance(engine.status().error, OutOfMemory) and engine.max_context is None
    with pytest.raises(EngineDied, match="27 GB"):
        ask(engine)
    assert isinstance(engine.load().exception(WAIT_S), OutOfMemory)


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


def test_a_later_load_that_fails_leaves_the_engine_unloaded(open_engine):
    answers = [load_toy(), OutOfMemory("a game has taken the card."), load_toy()]

    def opens(config, progress):
        answer = answers.pop(0)
        if isinstance(answer, OutOfMemory):
            raise answer
        return answer

    engine = open_engine(opens)
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
    threading.Timer(0.05, hold.set).start()
    engine.close()
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
    assert threading.active_count() == before


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
    monkeypatch.setattr(Engine, "_read_inbox", lambda self, timeout_s: reads.append(1) or original(self, timeout_s))
    engine = open_engine()
    ask(engine).wait()
    until(lambda: not engine.status().running)
    time.sleep(0.05)
    before = len(reads)
    time.sleep(0.2)
    assert len(reads) - before <= 1


def test_status_is_plain_json_and_tells_who_runs(open_engine):
    engine = open_engine(slots=1)
    hold = threading.Event()
    answer = ask(engine, "one", max_tokens=50, answer=Waiting(hold), client="chat 127.0.0.1")
    ask(engine, "two")
    assert answer.has_begun.wait(WAIT_S)
    status = json.loads(json.dumps(engine.status().to_dict()))
    (running,) = status["running"]
    assert {name: running[name] for name in ("id", "client", "phase", "num_prompt", "num_generated", "slot")} == {
        "id": "one", "client": "chat 127.0.0.1", "phase": "decode", "num_prompt": 3, "num_generated": 1, "slot": 0}
    assert running["first_token_ms"] > 0
    assert (status["state"], status["waiting"], status["error"]) == ("ready", 1, None)
    assert status["plan"] == {"num_slots": 1, "max_context": 512} and status["model"] == {"name": "toy"}
    hold.set()
    answer.wait()
    until(lambda: engine.status().counters["generated_tokens"] == 60)
    status = engine.status()
    assert status.counters["requests"] == 2 and status.counters["prompt_tokens"] == 6
    assert status.rates["decode_tokens_per_s"] > 0 and status.rates["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("options", [{"prefill_chunk": 100}, {"prefill_chunk": 0}, {"prefill_chunk": 1 << 20}, {"max_queue": -1}])
def test_settings_that_cannot_be_used_are_refused_at_once(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Engine(EngineConfig(**options))
