"""Answers that another thread can wait for."""

from __future__ import annotations

import threading
import time

from q27app.engine.request import Request, SamplingParams
from tests.engine.toy import Answer

WAIT_S = 60.0


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


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def ask(engine, name="a", prompt=(1, 2, 3), max_tokens=10, answer=None, **options):
    answer = answer or Waiting()
    engine.submit(Request(name, prompt, SamplingParams(max_tokens=max_tokens), **options), answer)
    return answer
