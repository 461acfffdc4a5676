"""Warming up under a whole engine on the CPU (tests/kernels/emulation): texts are those of an engine that never did."""

from __future__ import annotations

import queue
import time
from dataclasses import replace

import pytest

from q27app.engine import warm_up
from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import Request, SamplingParams
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.synthetic import synthesize
from tests.kernels.emulation.emulated_device import EmulatedDevice, needs_compiler
from tests.kernels.test_attend_emulated import CARD

pytestmark = [needs_compiler, pytest.mark.long]

SHAPES = [("prefill", (64,)), ("draft", (1,)), ("rows", (3,)), ("deep", (3,)), ("rows", (2, 2)), ("rows", (1, 1)), ("rows", (1,))]
"""The last one leaves what the first request would find."""


def say(engine: Engine, name: str, count: int, **params) -> list[int]:
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.submit(Request(name, tuple(range(40, 110)), SamplingParams(max_tokens=count, ignore_eos=True, **params)), inbox.put)
    tokens: list[int] = []
    while True:
        event = inbox.get(timeout=600)
        tokens += event.tokens
        if event.finish is not None:
            return tokens


def test_no_text_tells_whether_shapes_were_run_before(monkeypatch, tmp_path):
    """With few multiprocessors the window's end is deep."""
    path, texts = synthesize(tmp_path / "dense.q27", "512x4", "dense", "q4s"), {}
    monkeypatch.setattr("q27app.kernels.open_backend", lambda *_: CudaBackend(EmulatedDevice(replace(CARD, num_sms=2))))
    for shapes in ([], SHAPES):
        monkeypatch.setattr(warm_up, "usual_shapes", lambda *_, shapes=shapes: list(shapes))
        engine = Engine(EngineConfig(model=path, backend="cuda", context=8192, slots=2, kv_format="fp8", draft="mtp", max_draft=2, fixed_draft=True, warm_up=True))
        try:
            engine.start()
            while engine.status().state in ("loading", "unloaded"):
                time.sleep(0.01)
            recorded = [key[-1] for key in engine._loaded.model.replays._recorded if "verify" in key]
            assert sorted(recorded) == ([0, 0, 1] if shapes else [])
            texts[len(shapes)] = [say(engine, "a", 12), say(engine, "b", 8, temperature=1.0, seed=3)]
        finally:
            engine.close()
    assert texts[0] == texts[len(SHAPES)]
