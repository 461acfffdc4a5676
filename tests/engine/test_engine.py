"""The engine's door for requests: threads, and one final event for every request whatever happens."""

from __future__ import annotations

import json
import threading

import pytest

from q27app.engine.request import FinishReason
from q27app.errors import BadRequest, ContextTooLong, EngineDied, GpuError, Overloaded
from tests.engine.toy import VOCAB, expected_text, load_toy
from tests.engine.waiting import WAIT_S, Waiting, ask, until


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
    hold = threading.Event()
    answers = [ask(engine, f"r{index}", max_tokens=400, answer=Waiting(None if index else hold)) for index in range(5)]
    assert answers[0].has_begun.wait(WAIT_S)

    def fail(batch):
        raise error

    loaded.model.before = fail
    hold.set()
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
