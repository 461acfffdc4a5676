"""What the host does for a pass, on a device that computes nothing: it has to fit beside the pass in front of it.

A pass of the 27B takes some 5 ms on a large card; where a pass is started behind another, the device waits for nobody as long as the
host needs less than that. Times are those of the engine thread's own processor time, so that what else runs matters little.
"""

from __future__ import annotations

import time

import pytest

import q27app.kernels
from q27app.chat.guide import make_guide
from q27app.config import Config
from q27app.daemon.parts import open_text
from q27app.engine.limits import check_request
from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import Request, SamplingParams
from q27app.engine.sequence import Sequence
from q27app.engine.status import Meter
from q27app.engine.stepper import Stepper
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.synthetic import synthesize
from tests.kernels.counting_device import CARDS, CountingDevice
from tests.pace import slowness

STEPS = 200


class Replayed:
    """A recorded pass whose launch costs the host nothing."""

    def __call__(self) -> None: ...
    def close(self) -> None: ...


class IdleDevice(CountingDevice):
    def record(self, run):
        return Replayed()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("nano") / "nano.q27", wiring="chain")


@pytest.mark.long
@pytest.mark.parametrize("streams, limit_ms", [(1, 0.9), (8, 1.5), (16, 2.5)])
def test_the_host_needs_less_than_a_pass_takes(path, monkeypatch, capsys, streams, limit_ms):
    """Answers with the guides of a daemon, sampled, each with a seed of its own."""
    monkeypatch.setattr(q27app.kernels, "open_backend", lambda *_: CudaBackend(IdleDevice(CARDS["wide"])))
    loaded = open_model(EngineConfig(path, "cuda", context=2048, slots=16, draft="off"), lambda share: None)
    stepper, (tokenizer, _) = Stepper(loaded, Meter(), lambda sequence: None, checks_pools=False), open_text(Config())
    while stepper.has_spare_work:
        stepper.step()
    for index in range(streams):
        params = SamplingParams(max_tokens=1000, temperature=0.8, seed=index, ignore_eos=True)
        request = Request(f"r{index}", tuple(range(40, 100)), params, make_guide(tokenizer, eos_ids=(), finds_loops=False), cache=False)
        stepper.add(Sequence(request, lambda event: None, check_request(request, loaded.vocab_size, 2048)))
    for _ in range(20):
        stepper.step()
    num_behind, begin = 0, time.thread_time()
    for _ in range(STEPS):
        stepper.step()
        num_behind += stepper._behind is not None
    ms = (time.thread_time() - begin) * 1e3 / STEPS
    with capsys.disabled():
        print(f"\n{streams} streams: {ms:.2f} ms of the host a pass", end="")
    assert num_behind == STEPS and ms < limit_ms * slowness()
    stepper.end_all()


DEEP = 240_000
"""Tokens of a long conversation."""


@pytest.mark.long
def test_the_next_turn_of_a_long_conversation_reaches_the_device_soon(path, monkeypatch, capsys):
    """What the engine does for it from the submit to its first pass: the least of five turns of 12 tokens."""
    monkeypatch.setattr(q27app.kernels, "open_backend", lambda *_: CudaBackend(IdleDevice(CARDS["wide"])))
    loaded = open_model(EngineConfig(path, "cuda", context=262_144, slots=1, draft="auto"), lambda share: None)
    stepper = Stepper(loaded, Meter(), lambda sequence: None, checks_pools=False)
    forward, begun, turns = loaded.model.forward, [], []

    def started(batch, *rest):
        begun.append(time.thread_time())
        return forward(batch, *rest)

    monkeypatch.setattr(loaded.model, "forward", started)
    prompt = tuple(300 + place * place % 2000 for place in range(DEEP))
    for turn in range(6):
        prompt += tuple(range(400 + turn, 412 + turn))
        begun.clear()
        begin = time.thread_time()
        request = Request(f"t{turn}", prompt, SamplingParams(max_tokens=2, ignore_eos=True), stable_len=len(prompt))
        sequence = Sequence(request, lambda event: None, check_request(request, loaded.vocab_size, 262_144))
        stepper.add(sequence)
        while not sequence.is_finished:
            stepper.step()
        turns.append((begun[0] - begin) * 1e3)
        assert turn == 0 or sequence.num_cached >= len(prompt) - 128
    with capsys.disabled():
        print(f"\n{DEEP} tokens: {min(turns[1:]):.1f} ms of the host before the device has work", end="")
    assert min(turns[1:]) < 16 * slowness()
