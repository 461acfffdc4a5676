"""States that lack rows under a whole engine, on the CPU (tests/kernels/emulation): prompts that share a beginning, somebody who waits, is cancelled, comes back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import numpy as np
import pytest

from q27app.engine import warm_up
from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import Request, SamplingParams
from q27app.kernels import cuda_lacking
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.synthetic import synthesize
from tests.kernels.emulation.emulated_device import EmulatedDevice, needs_compiler

pytestmark = [needs_compiler, pytest.mark.long]


class Talk:
    """Requests of an engine, and what they have said so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.texts, self._inboxes = engine, {}, {}

    def submit(self, name: str, prompt: tuple[int, ...], count: int) -> None:
        self.texts[name], self._inboxes[name] = [], queue.SimpleQueue()
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, seed=ord(name))
        self.engine.submit(Request(name, prompt, params, system_len=64), self._inboxes[name].put)

    def take(self, name: str, count: int = 1 << 30) -> None:
        """Up to so many tokens, or to its end."""
        while len(self.texts[name]) < count:
            event = self._inboxes[name].get(timeout=300)
            self.texts[name] += event.tokens
            if event.finish is not None:
                return


def talk(engine: Engine) -> dict[str, list[int]]:
    """Two slots. Somebody goes on alone behind six passes of two; of three more one is cancelled while another one waits; then the first one's next turn."""
    random, talk = np.random.default_rng(1), Talk(engine)
    common = tuple(random.integers(300, 2500, 70).tolist())
    talk.submit("a", (*common, 5), 24)
    talk.take("a", 1)
    talk.submit("b", (*common, 6), 7)
    talk.take("b")
    talk.take("a", 13)
    talk.submit("c", (*common, 7), 200)
    talk.submit("d", (*common, 8), 6)
    talk.take("c", 5)
    engine.cancel("c")
    talk.take("a")
    talk.take("d")
    talk.submit("e", (*common, 5, *talk.texts["a"], 3), 5)
    talk.take("e")
    talk.texts["c"] = talk.texts["c"][:5]
    return talk.texts


@pytest.fixture
def talked(monkeypatch, tmp_path) -> Callable:
    """(texts, rows that sequences of passes lacked) of an engine whose slots have to be so steady."""
    path = synthesize(tmp_path / "dense.q27", "nano", "dense", "q4s")
    monkeypatch.setattr(warm_up, "usual_shapes", lambda *_: [])
    monkeypatch.setattr("q27app.kernels.open_backend", lambda *_: CudaBackend(EmulatedDevice()))

    def run(steady: int) -> tuple[dict[str, list[int]], set[int]]:
        met, begin = set(), cuda_lacking.Lacking.begin

        def noting(lacking, slots):
            met.update(lacking.rows[slots].tolist())
            return begin(lacking, slots)

        with monkeypatch.context() as patch:
            patch.setattr(cuda_lacking, "STEADY_PASSES", steady)
            patch.setattr(cuda_lacking.Lacking, "begin", noting)
            engine = Engine(EngineConfig(model=path, backend="cuda", context=512, slots=2, kv_format="fp16", draft="off", cache_device_slots=2,
                                         prefill_chunk=64))
            try:
                engine.start()
                while engine.status().state in ("loading", "unloaded"):
                    time.sleep(0.01)
                return talk(engine), met
            finally:
                engine.close()

    return run


def test_no_text_tells_when_states_are_written(monkeypatch, talked):
    """And without `settle` they would."""
    (written, never), (lacking, met) = talked(1 << 30), talked(0)
    assert never == {0} and met == {0, 1, 2, 3}
    assert lacking == written

    def forget(lacking, slots):
        lacking.rows[list(slots)] = 0

    monkeypatch.setattr(cuda_lacking.Lacking, "settle", forget)
    assert talked(0)[0] != written
