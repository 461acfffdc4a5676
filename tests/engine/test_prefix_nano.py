"""The prefix cache on the dense model: warm answers have the bits of cold, solitary ones, log probabilities included."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from q27app.engine.host_cache import HostCache
from q27app.engine.leaving import Leaving
from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import Request, SamplingParams
from tests.engine.conversations import actions, play, settle_all, told
from tests.engine.toy import Desk, mix
from q27app.weights.synthetic import synthesize

VOCAB = 2560


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("dense") / "dense.q27", wiring="dense")


def desk_of(path, cache=True, states=40, folder=None, slots=2, context=320, draft="auto", kv="auto", chunk=64,
            device=0) -> Desk:
    config = EngineConfig(path, "numpy", context=context, slots=slots, prefill_chunk=chunk, cache=cache, draft=draft, kv_format=kv,
                          cache_host_bytes=states * 1_300_000, cache_device_slots=device, cache_dir=folder)
    loaded = open_model(config, lambda share: None)
    if folder is not None:
        disk = loaded.prefix_cache._disk
        disk._min_tokens = disk._step = 64
    return Desk(loaded)


class Cold:
    """Solitary runs without a cache; each different request runs once."""

    def __init__(self, path) -> None:
        self.desk, self.known = desk_of(path, cache=False, slots=1, draft="off"), {}

    def __call__(self, request: Request) -> list:
        key = (request.prompt, request.params)
        if key not in self.known:
            answer = self.desk.submit(Request(f"cold{len(self.known)}", request.prompt, request.params))
            self.desk.run()
            self.known[key] = told(answer)
        return self.known[key]


@pytest.fixture(scope="module")
def cold(dense) -> Cold:
    return Cold(dense)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(mix(seed, place) % VOCAB for place in range(length))


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=4, logprobs=4),
                                    SamplingParams(max_tokens=4, logprobs=4, temperature=0.8, seed=9)])
def test_a_conversation_of_turns_has_the_bits_of_cold_ones(dense, cold, params):
    desk, history, reused = desk_of(dense), prompt_of(90), []
    for turn in range(3):
        request = Request(f"t{turn}", history, params, stable_len=len(history) - 2)
        answer = desk.submit(request)
        desk.run()
        assert told(answer) == cold(request)
        reused.append(answer.last.stats.num_cached)
        history += tuple(answer.tokens) + prompt_of(30, turn + 1)
        desk.stepper.settle(history[:-30], 0)
        settle_all(desk)
    assert reused == [0, 64, 128]


@pytest.mark.parametrize("device", [0, 3])
def test_conversations_that_left_the_device_come_back_with_their_bits(dense, cold, device):
    desk = desk_of(dense, slots=1, device=device)
    count = desk.loaded.blocks.num_blocks // 3 + 1   # of 3 blocks each, so that they do not all fit
    host, store = HostCache(1 << 30, min_tokens=64, piece=2), desk.loaded.prefix_cache.store
    store.leaving = Leaving(desk.loaded.state, store, host)
    params = SamplingParams(max_tokens=4, logprobs=4)
    texts, cached = [prompt_of(200 + seed, seed) for seed in range(count)], []
    for turn in range(2):
        for which, text in enumerate(texts):
            request = Request(f"t{turn}-{which}", text, params, stable_len=len(text))
            answer = desk.submit(request)
            desk.run()
            assert told(answer) == cold(request)
            cached.append((answer.last.stats.num_cached, answer.last.stats.reuse.kind))
            texts[which] = (*text, *answer.tokens, *prompt_of(20, turn))
    assert cached[count:] == [(192, "host")] * count and host.num_used == count


def test_a_state_that_decode_computed_would_have_other_bits(dense):
    """Why only prefill's states are kept: this fails once decode's bits are prefill's."""
    prompt = prompt_of(60)
    decoded, settled = desk_of(dense, draft="off"), desk_of(dense, draft="off")
    answer = decoded.submit(Request("a", prompt, SamplingParams(max_tokens=6)))
    for _ in range(5):
        decoded.stepper.step()
    slot = decoded.sequences["a"].slot
    state = decoded.state.export_slot(slot)
    settled.submit(Request("b", prompt + tuple(answer.tokens[:4]), SamplingParams(max_tokens=2)))
    settled.stepper.step()
    assert decoded.sequences["a"].num_computed == settled.sequences["b"].num_computed == 64
    assert (state != settled.state.export_slot(settled.sequences["b"].slot)).any()


def interleavings(dense, cold, folder, count):
    folders = itertools.count()

    @settings(max_examples=count, deadline=None)
    @given(actions(70, 6))
    def run(todo):
        number = next(folders)
        path = folder / str(number) if number % 3 == 0 else None
        sizes = {"states": [40, 2][number % 2], "chunk": [64, 256][number // 2 % 2], "device": [0, 3][number // 2 % 2]}
        play(todo, lambda: desk_of(dense, folder=path, **sizes), cold, VOCAB, 200)

    run()


def test_any_interleaving_has_the_bits_of_cold_runs(dense, cold, tmp_path):
    interleavings(dense, cold, tmp_path, 6)


@pytest.mark.long
def test_many_interleavings_have_the_bits_of_cold_runs(dense, cold, tmp_path, long_scale):
    interleavings(dense, cold, tmp_path, max(5, int(200 * long_scale)))


def test_a_restart_finds_its_states_on_disk(dense, cold, tmp_path):
    request = Request("first", prompt_of(200), SamplingParams(max_tokens=3, logprobs=4), system_len=70)
    first = desk_of(dense, folder=tmp_path)
    first.submit(request)
    first.run()
    first.stepper.settle(prompt_of(200), 70)
    settle_all(first)
    first.loaded.close()
    again = desk_of(dense, folder=tmp_path)
    answer = again.submit(request)
    again.run()
    assert told(answer) == cold(request) and answer.last.stats.num_cached == 192
    assert answer.last.stats.reuse.kind == "disk"
    other = synthesize(tmp_path / "other.q27", wiring="dense", seed=5)
    foreign = desk_of(other, folder=tmp_path)
    answer = foreign.submit(request)
    foreign.run()
    assert answer.last.stats.num_cached == 0


def test_states_of_a_small_format_are_found_again_and_only_in_that_format(dense, tmp_path, kv="turbo5k"):
    """Two turns beside another conversation, from the ring and from disk: the bits of a cold run. Another format finds nothing."""
    params = SamplingParams(max_tokens=3, logprobs=4)
    turns = [Request("first", prompt_of(200), params, system_len=70), Request("second", prompt_of(260), params, system_len=70)]
    plain = desk_of(dense, cache=False, draft="off", kv=kv)
    cold_answers = []
    for request in turns:
        cold_answers.append(plain.submit(request))
        plain.run()
    first = desk_of(dense, folder=tmp_path, kv=kv)
    for request, expected in zip(turns, cold_answers):
        answer = first.submit(request)
        first.submit(Request("other" + request.id, prompt_of(90, seed=4), params))
        first.run()
        assert told(answer) == told(expected)
        settle_all(first)
    assert answer.last.stats.num_cached == 192
    first.loaded.close()
    again = desk_of(dense, folder=tmp_path, kv=kv)
    answer = again.submit(turns[1])
    again.run()
    assert told(answer) == told(cold_answers[1]) and answer.last.stats.reuse.kind == "disk"
    for other in ("fp16", "turbo3v"):
        foreign = desk_of(dense, folder=tmp_path, kv=other)
        answer = foreign.submit(turns[1])
        foreign.run()
        assert answer.last.stats.num_cached == 0
