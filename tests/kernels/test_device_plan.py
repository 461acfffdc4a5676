"""The memory plan against what the CUDA backend takes: byte for byte, and nothing more once the model is ready."""

from __future__ import annotations

import queue
import time
from dataclasses import replace

import pytest

from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import EngineDied, GpuError, OutOfMemory
from q27app.kernels.card import WARPGROUP_KINDS
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_lacking import MAX_LACKING
from q27app.model.budget import LACKING_ROWS, card_prefill_rows, card_scratch_bytes
from q27app.weights.synthetic import synthesize
from tests.kernels.counting_device import CARDS, CountingDevice


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Start an engine on a counting device: (engine, device) once it is ready or has failed."""
    engines = []

    def start(card: str = "wide", tier: str = "q4s", size: str = "nano", total: int = 141 << 30, **options):
        path = tmp_path / f"{tier}.q27"
        if not path.exists():
            synthesize(path, size, "chain", tier)
        device = CountingDevice(CARDS[card], total)
        monkeypatch.setattr("q27app.kernels.open_backend", lambda *_: CudaBackend(device))
        engine = Engine(EngineConfig(model=path, backend="cuda", **options))
        engines.append(engine)
        engine.start()
        while engine.status().state in ("loading", "unloaded"):
            time.sleep(0.01)
        return engine, device

    yield start
    for engine in engines:
        engine.close()


def answer(engine: Engine, count: int, num_prompt: int = 100, **params):
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.submit(Request("r", tuple(range(1000, 1000 + num_prompt)), SamplingParams(max_tokens=count, ignore_eos=True, **params)), inbox.put)
    while (event := inbox.get(timeout=120)).finish is None:
        pass
    return event


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("tier", "size"), [("q4s", "nano"), ("default", "512x4"), ("f16", "nano")])
def test_what_is_taken_is_what_was_planned(served, card, tier, size):
    engine, device = served(card, tier, size, context=4096, slots=2, kv_format="fp16")
    plan = engine.status().plan
    assert device.used == plan["used"] - plan["graphs"]
    assert plan["held"] == plan["used"] + device.context_bytes
    weights = engine._loaded.model.backend.weights_arena
    assert len(weights._chunks) == 1, "the reserved chunk was too small"
    assert weights.nbytes - engine._loaded.model.weights.nbytes < 6000 * 100


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("size", ["512x4", "1280x4,vocab=65536"])
def test_the_estimate_before_loading_is_near_and_not_too_little(served, card, size):
    engine, _ = served(card, "q4s", size, context=4096, slots=1, kv_format="fp16", cache=False)
    loaded = engine._loaded
    config = loaded.model.config
    estimate = card_scratch_bytes(config, card_prefill_rows(loaded.plan.free), 64)
    most = 4 * 16 * 480 * config.num_heads * (config.head_dim + 2)   # this short window has few cuts
    assert loaded.plan.scratch <= estimate <= 1.05 * loaded.plan.scratch + most + (8 << 20)


def test_plans_know_on_which_cards_states_lack_rows():
    assert {kind: MAX_LACKING for kind in WARPGROUP_KINDS} == LACKING_ROWS
    assert [CudaBackend(CountingDevice(card)).lacking_rows for card in CARDS.values()] == [LACKING_ROWS.get(card.capability, 0) for card in CARDS.values()]


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_nothing_is_taken_once_the_model_is_ready(served, draft):
    engine, device = served(context=4096, slots=2, draft=draft)
    before = device.num_allocations
    for count in (1, 40):
        assert answer(engine, count).finish is FinishReason.LENGTH
    assert device.num_launches > 100
    assert device.num_allocations == before


def test_what_does_not_fit_is_refused_with_the_table_before_anything_is_loaded(served):
    engine, device = served(total=64 << 20, context=65536, slots=1)
    error = engine.status().error
    assert isinstance(error, OutOfMemory) and "KV cache" in error.message and "reserve" in error.message
    assert device.used == 0, "the failed load gave everything back"


@pytest.mark.parametrize("error", [
    GpuError("CUDA error 700 (CUDA_ERROR_ILLEGAL_ADDRESS): an illegal memory access was encountered."),
    TypeError("4 arguments, expected 3"),
])
def test_whatever_ends_the_engine_ends_every_request_says_why_and_gives_the_memory_back(served, error):
    """Also where the process goes on, to say what has happened."""
    engine, device = served(context=4096, slots=2)
    assert device.used > 0
    device.fails = error
    event = answer(engine, 20)
    assert event.finish is FinishReason.ERROR and isinstance(event.error, EngineDied)
    deadline = time.monotonic() + 60
    while (engine.status().state != "failed" or device.used) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert str(error)[:20] in str(engine.status().error) and device.used == 0
    with pytest.raises(EngineDied):
        answer(engine, 1)


def test_twenty_starts_and_stops_leave_nothing(served):
    for _ in range(20):
        engine, device = served(context=1024, slots=1)
        assert device.used > 0
        engine.close()
        assert device.used == 0


@pytest.mark.parametrize(("share", "waits"), [(0.0, True), (1e9, False)])
def test_the_likeliest_shapes_run_before_a_card_is_ready_as_long_as_that_takes_little_of_the_loading(served, monkeypatch, share, waits):
    from q27app.engine import loading

    asked = []
    monkeypatch.setattr(loading, "WARM_UP_SHARE", share)
    monkeypatch.setattr(loading, "WARM_UP_S", 60.0)
    monkeypatch.setattr(loading.WarmUp, "step", lambda self: asked.append(self._shapes.popleft()))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_install", lambda self, loaded: asked.append(loaded.warm_up.has_work))
        served(context=4096, slots=2)
    assert asked[-1] is waits and len(asked) > 1 - waits


@pytest.mark.parametrize(("card", "num_deep"), [("wide", 3), ("narrow", 0)])
def test_where_a_pass_launches_otherwise_at_depth_it_is_recorded_before_anybody_asks(served, monkeypatch, card, num_deep):
    """With few multiprocessors a window of 65,536 is deep."""
    monkeypatch.setitem(CARDS, card, replace(CARDS[card], num_sms=16))
    engine, _ = served(card, "q4s", "512x4", context=65536, slots=1, kv_format="fp8" if card == "wide" else "fp16", draft="mtp", max_draft=3, warm_up=True)
    replays = engine._loaded.model.replays
    found = [key for key in replays._recorded if "verify" in key]
    assert sorted((key[3], key[-1]) for key in found) == sorted((rows, depth) for rows in (2, 3, 4) for depth in range(1 + bool(num_deep)))
    assert all(replays._recorded.values()) and sum(key[-1] for key in found) == num_deep


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_no_kernel_waits_for_the_first_request(served, monkeypatch, draft):
    """A kernel is loaded where it is first launched. One that keeps a state on the way of a prompt is small and not among them."""
    launch, known, fresh = CudaBackend.launch, set(), []

    def watched(self, source, name, *args, **options):
        if (source, name) not in known:
            known.add((source, name))
            fresh.append((source, name))
        return launch(self, source, name, *args, **options)

    monkeypatch.setattr(CudaBackend, "launch", watched)
    engine, _ = served(context=4096, slots=1, draft=draft, warm_up=True)
    assert ("sample", "sample_noise") in fresh and ("linear_rows" in dict(fresh))
    fresh.clear()
    for params in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
        assert answer(engine, 40, 50, **params).finish is FinishReason.LENGTH
    assert not fresh
