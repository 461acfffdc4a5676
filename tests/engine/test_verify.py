"""`Engine.verify`: what lies in memory is compared with what was loaded; a difference ends the engine."""

from __future__ import annotations

import queue
import time

import numpy as np
import pytest

from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import BadRequest, EngineDied, GpuError
from q27app.kernels import reference
from q27app.weights.synthetic import synthesize


@pytest.fixture
def engine_of(tmp_path):
    engines = []

    def start(**options) -> Engine:
        path = synthesize(tmp_path / "nano.q27", "nano", "chain", "q4s", overwrite=True)
        engine = Engine(EngineConfig(model=path, backend="numpy", context=256, slots=1, **options))
        engines.append(engine)
        engine.start()
        while engine.status().state == "loading":
            time.sleep(0.01)
        return engine

    yield start
    for engine in engines:
        engine.close()


def test_weights_that_nobody_touched_are_equal(engine_of):
    engine = engine_of(verify_weights=True)
    found = engine.verify().result(30)
    assert found["weights"] > 40 and found["seconds"] >= 0
    assert engine.status().state == "ready"


def test_one_changed_bit_ends_the_engine_and_names_the_weight(engine_of):
    engine = engine_of(verify_weights=True)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    weight = engine._loaded.model.weights.layers[1].feed_forward.down
    weight.array.view(np.uint32)[3, 5] ^= 1
    future = engine.verify()
    with pytest.raises(GpuError, match="1 of .* weights in memory are not what was loaded: blk.1.ffn_down.weight"):
        future.result(30)
    with pytest.raises(EngineDied):
        engine.submit(Request("r", (1000,), SamplingParams(max_tokens=2)), inbox.put)
    assert "blk.1.ffn_down.weight" in str(engine.status().error)


def test_verifying_runs_beside_a_request_and_disturbs_nothing(engine_of):
    engine = engine_of(verify_weights=True)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.submit(Request("r", (1000, 1001), SamplingParams(max_tokens=60, ignore_eos=True)), inbox.put)
    engine.verify().result(30)
    tokens: list[int] = []
    while (event := inbox.get(timeout=120)).finish is None:
        tokens += event.tokens
    assert event.finish is FinishReason.LENGTH
    assert [*tokens, *event.tokens] == [1002 + i for i in range(60)]


def test_without_checksums_verifying_says_how_to_get_them(engine_of):
    with pytest.raises(BadRequest, match="--verify-weights"):
        engine_of().verify()


def test_a_checksum_sees_every_bit_and_every_swap():
    words = np.random.default_rng(0).integers(0, 2**32, 1 << 12, np.uint32)
    sums = {reference.checksum(words)}
    for place in (0, 1, 777, 4095):
        changed = words.copy()
        changed[place] ^= np.uint32(1 << (place % 32))
        sums.add(reference.checksum(changed))
    swapped = words.copy()
    swapped[[10, 11]] = swapped[[11, 10]]
    sums.add(reference.checksum(swapped))
    assert len(sums) == 6
