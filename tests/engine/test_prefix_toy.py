"""The prefix cache on the toy, whose text changes with any wrong slot, block, position or order."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine import disk_reading, snapshot_cache
from q27app.engine.disk_cache import DiskCache
from q27app.engine.host_cache import HostCache
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import Q27Error
from q27app.engine.snapshot_cache import SnapshotCache
from tests.engine.conversations import actions, play, settle_all
from tests.engine.toy import VOCAB, Desk, expected_text, load_toy, mix

DISK = {"min_tokens": 64, "step": 64}


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(mix(seed, place) % VOCAB for place in range(length))


def desk_of(host_states=50, device=0, ring_step=4096, folder=None, budget=1 << 30, host=None, **options) -> Desk:
    loaded = load_toy(**options)
    slots = range(loaded.slots.num_slots, loaded.slots.num_slots + device)
    loaded.state.hashes += [0] * device
    loaded.state.lengths += [0] * device
    loaded.state.num_slots += device
    disk = DiskCache(folder, bytes(32), budget, **DISK) if folder else None
    loaded.prefix_cache = SnapshotCache(loaded.state, loaded.blocks, slots, 16 * host_states, disk, ring_step, host)
    return Desk(loaded)


def ask(desk: Desk, prompt, count=5, **marks) -> int:
    """Tokens of the prompt that were reused; the text is checked."""
    name = f"r{len(desk.sequences)}"
    answer = desk.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=count), **marks))
    desk.run()
    assert answer.tokens == expected_text(prompt, count)
    return answer.last.stats.num_cached


def test_states_are_kept_at_the_marks_of_a_prompt():
    desk = desk_of(chunk=512, max_context=1024, ring_step=256)
    ask(desk, prompt_of(700), system_len=100, turn_len=450, stable_len=650)
    kept = {snapshot.num_tokens: snapshot.kind for snapshot in desk.loaded.prefix_cache.store}
    assert kept == {64: "system", 256: "ring", 448: "turn", 512: "ring", 640: "stable"}
    assert ask(desk, prompt_of(700)[:460] + (1, 2, 3)) == 448
    assert ask(desk, prompt_of(700)[:447]) == 256
    assert ask(desk, prompt_of(120)) == 64


def test_decoded_positions_are_never_reused():
    desk = desk_of()
    first = prompt_of(100)
    answer = expected_text(first, 60)
    assert ask(desk, first, 60) == 0
    assert ask(desk, (*first, *answer, 1)) == 64


def test_a_settled_turn_is_found_whole_by_the_next():
    desk = desk_of(chunk=64)
    first = prompt_of(100)
    history = (*first, *expected_text(first, 100), *prompt_of(3, 5))
    ask(desk, first, 100)
    desk.stepper.settle(history, 0)
    settle_all(desk)
    assert ask(desk, (*history, *prompt_of(40, 8))) == len(history) // 64 * 64 == 192
    assert desk.meter.counters()["requests"] == desk.meter.counters()["cancels"] == 0


def test_a_request_stops_settling_and_does_the_rest_itself():
    desk = desk_of(chunk=64, slots=1)
    history = prompt_of(400)
    desk.stepper.settle(history, 0)
    for _ in range(3):
        desk.stepper.step()
    assert not desk.stepper.has_work and desk.stepper.has_spare_work
    assert ask(desk, (*history, 1)) == 192
    settle_all(desk)
    assert ask(desk, (*history, 2)) == 384


def test_a_cancelled_prefill_leaves_what_it_computed():
    desk = desk_of(chunk=64)
    answer = desk.ask(prompt_of(300), 5, name="first")
    for _ in range(3):
        desk.stepper.step()
    desk.cancel("first")
    desk.run()
    assert answer.finish is FinishReason.CANCELLED and ask(desk, prompt_of(300)) == 192


def test_a_failed_pass_leaves_nothing():
    desk = desk_of(chunk=64)
    desk.ask(prompt_of(300), 5, name="first")
    desk.stepper.step(), desk.stepper.step()

    def fail(batch):
        raise Q27Error("the pass failed.")

    desk.model.before = fail
    desk.run()
    desk.model.before = lambda batch: None
    assert [snapshot.num_tokens for snapshot in desk.loaded.prefix_cache.store] == []


def test_the_least_recently_used_state_goes_first():
    desk = desk_of(host_states=2)
    for seed in (1, 2, 1, 3):
        ask(desk, prompt_of(70, seed))
    assert [ask(desk, prompt_of(70, seed)) for seed in (1, 3)] == [64, 64]
    assert ask(desk, prompt_of(70, 2)) == 0


def test_device_states_move_to_the_host_when_others_need_their_slots():
    desk = desk_of(host_states=2, device=2)
    for seed in range(6):
        ask(desk, prompt_of(70, seed))
    store = desk.loaded.prefix_cache.store
    assert (store.count, store.num_host) == (4, 2)
    assert [ask(desk, prompt_of(70, seed)) for seed in (2, 3, 4, 5)] == [64] * 4


def test_slots_are_freed_ahead_of_need_and_what_left_them_is_found_again():
    desk = desk_of(host_states=20, device=8, chunk=256, num_blocks=80)
    for seed in range(12):
        ask(desk, prompt_of(140, seed), stable_len=70)
    store = desk.loaded.prefix_cache.store
    assert store.count == 24 and len(desk.state.exports) >= 16, "two states a prompt"
    assert [ask(desk, (*prompt_of(140, seed)[:139], 1)) for seed in range(12)] == [128] * 12


def test_states_give_way_only_where_that_lets_a_request_in():
    desk = desk_of(slots=1, max_context=256, num_blocks=4)
    ask(desk, prompt_of(130, 1))
    running = desk.ask(prompt_of(20, 2), 30)
    desk.stepper.step()
    desk.ask(prompt_of(200, 3), 50)
    desk.stepper.step()
    assert desk.loaded.prefix_cache.store.count == 1, "the slot is taken, so giving up blocks would not help"
    desk.run()
    assert running.finish is FinishReason.LENGTH and desk.loaded.prefix_cache.store.num_evicted > 0


def test_reasons_tell_where_a_prompt_left_the_earlier_text():
    desk = desk_of(chunk=64, max_context=1200)
    base = prompt_of(400)
    ask(desk, base, system_len=66)
    changed = base[:170] + ((base[170] + 1) % VOCAB,) + base[171:]
    for prompt in (changed, base[:399], prompt_of(100, 4), base + prompt_of(600, 5), base[:300] + prompt_of(20, 6)):
        ask(desk, prompt, system_len=66)
    told = [desk.answers[f"r{index}"].last.stats.reuse for index in range(6)]
    assert [reuse.reason for reuse in told] == ["new", "diverged", "", "new", "", "not_kept"]
    assert (told[1].num_tokens, told[1].kind, told[1].possible) == (64, "system", 400)
    assert (told[1].shared, told[1].expected, told[1].given) == (170, base[170], changed[170])
    misses = desk.loaded.prefix_cache.to_dict()["misses"]
    assert misses == {"new": 2, "diverged": 1, "not_kept": 1}


def test_what_memory_holds_of_a_state_is_not_read_from_disk_again(tmp_path):
    base = prompt_of(300)
    first = desk_of(folder=tmp_path)
    ask(first, base)
    first.stepper.settle(base, 0)
    settle_all(first)
    first.loaded.prefix_cache.close()
    second = desk_of(folder=tmp_path)
    assert ask(second, base[:150]) == 0
    assert ask(second, base) == 256
    (held,) = [snapshot for snapshot in second.loaded.prefix_cache.store if snapshot.num_tokens == 128]
    (read,) = [snapshot for snapshot in second.loaded.prefix_cache.store if snapshot.kind == "disk"]
    assert np.array_equal(held.blocks, read.blocks[:2])


def hold_readers(monkeypatch, gate: threading.Event) -> None:
    """What is read from disk is not checked before the gate opens."""
    check = disk_reading.is_digest
    monkeypatch.setattr(disk_reading, "is_digest", lambda *rest: gate.wait(20) and check(*rest))


def test_streams_go_on_while_a_state_is_read_from_disk(tmp_path, monkeypatch):
    base, gate = prompt_of(300), threading.Event()
    first = desk_of(folder=tmp_path)
    ask(first, base)
    first.stepper.settle(base, 0)
    settle_all(first)
    first.loaded.prefix_cache.close()
    hold_readers(monkeypatch, gate)
    desk = desk_of(folder=tmp_path)
    stream = desk.ask(prompt_of(10, 3), 200)
    desk.stepper.step()
    waits = desk.ask(base, 5)
    for _ in range(40):
        desk.stepper.step()
    assert len(stream.tokens) >= 39 and not waits.events
    gate.set()
    desk.run()
    assert waits.tokens == expected_text(base, 5) and waits.last.stats.num_cached == 256


def test_a_cancel_while_its_state_is_read_from_disk_hides_nothing_from_those_behind(tmp_path, monkeypatch):
    first = desk_of(folder=tmp_path)
    ask(first, prompt_of(300), system_len=256)
    settle_all(first)
    first.loaded.prefix_cache.close()
    gate = threading.Event()
    hold_readers(monkeypatch, gate)
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_of(folder=tmp_path, host=host, slots=2, num_blocks=12)
    for seed in (1, 2):
        ask(desk, prompt_of(500, seed))
    assert host.num_kept
    desk.ask(prompt_of(310), 5, name="gone")
    for _ in range(3):
        desk.stepper.step()
    assert desk.loaded.prefix_cache._arrivals._now is not None
    desk.cancel("gone")
    assert ask(desk, (*prompt_of(500, 1), 7)) == 448 and host.num_used == 1
    assert desk.loaded.prefix_cache._arrivals._now is None
    gate.set()
    assert ask(desk, prompt_of(310)) == 256
    desk.loaded.prefix_cache.close()


def test_a_state_goes_to_the_disk_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_cache, "EXPORTED_BLOCKS", 1)
    desk = desk_of(folder=tmp_path)
    ask(desk, prompt_of(300))
    desk.stepper.settle(prompt_of(300), 0)
    sizes, export = [], desk.state.export_blocks
    monkeypatch.setattr(desk.state, "export_blocks", lambda blocks: (sizes.append(len(blocks)), export(blocks))[1])
    settle_all(desk)
    assert sizes == [1] * 4
    desk.loaded.prefix_cache.close()
    again = desk_of(folder=tmp_path)
    assert ask(again, prompt_of(300)) == 256


@pytest.mark.parametrize("device,states,blocks,host", [
    (0, 50, None, None), (2, 1, None, None), (1, 3, 12, None), (8, 3, None, None), (0, 50, 9, 1 << 20), (2, 3, 10, 4096)])
def test_any_interleaving_gives_the_cold_text(tmp_path, device, states, blocks, host):
    folders = itertools.count()

    def cold(request):
        return expected_text(request.prompt, request.params.max_tokens, request.params)

    @settings(max_examples=25, deadline=None)
    @given(actions(150), st.booleans(), st.sampled_from([64, 128]))
    def run(todo, has_disk, chunk):
        folder = tmp_path / str(next(folders)) if has_disk else None
        plain = [action for action in todo if action.params < 2]

        def open_desk():
            tier = HostCache(host, min_tokens=64, piece=2) if host else None
            return desk_of(states, device, 128, folder, 1 << 16, tier, slots=2, max_context=400, num_blocks=blocks, chunk=chunk)

        play(plain, open_desk, lambda request: tokens_of(cold(request)), VOCAB, 300)

    def tokens_of(tokens):
        return [Just(token) for token in tokens]

    run()


class Just:
    """Equals any entry of its token: the toy's log probabilities are not told by its definition."""

    def __init__(self, token):
        self.token = token

    def __eq__(self, entry):
        return entry.token == self.token
