"""Host memory that ends while a state is copied or a request gets its logits: that one is not kept, or ends; all others go on."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine import disk_cache, draft_suffix, scheduler, snapshot_cache
from q27app.engine.disk_entry import write_entry
from q27app.engine.disk_reading import Reading
from q27app.engine.draft_suffix import bring_up, index_of, may_match
from q27app.engine.host_cache import HostCache
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.engine.sequence import Sequence
from q27app.errors import OutOfMemory
from tests.engine.conversations import actions, play, settle_all
from tests.engine.test_prefix_toy import Just, ask, desk_of, prompt_of
from tests.engine.toy import VOCAB, Desk, expected_text


def ends(*rest) -> None:
    raise MemoryError("Unable to allocate 150 MiB")


def cache_of(desk: Desk) -> snapshot_cache.SnapshotCache:
    return desk.loaded.prefix_cache


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "host memory has ended" in record.getMessage()]


def assert_lost_once(desk: Desk, caplog, where: str) -> None:
    (line,) = told(caplog)
    assert f"not kept {where}" in line and "cache.host_mb" in line and cache_of(desk).to_dict()["lost"] == 1


def test_a_state_that_no_memory_is_given_for_is_not_kept(caplog):
    desk = desk_of(chunk=64)
    desk.state.take_memory = ends
    ask(desk, prompt_of(100))
    assert cache_of(desk).store.count == 0
    assert_lost_once(desk, caplog, "in host memory")
    desk.state.take_memory = lambda: None
    assert ask(desk, prompt_of(100)) == 0 and ask(desk, prompt_of(100)) == 64


def test_a_state_that_has_to_leave_its_slot_goes_where_no_memory_is_given_for_it(caplog):
    desk = desk_of(device=2)
    for seed in range(2):
        ask(desk, prompt_of(70, seed))
    desk.state.take_memory = ends
    ask(desk, prompt_of(70, 2))
    assert_lost_once(desk, caplog, "in host memory")
    assert [ask(desk, prompt_of(70, seed)) for seed in (2, 1)] == [64, 64]
    desk.state.take_memory = lambda: None
    assert ask(desk, prompt_of(70, 0)) == 0


def test_a_state_that_is_lost_on_its_way_to_the_host_is_a_miss(caplog):
    desk = desk_of(host_states=20, device=8, chunk=256, num_blocks=80)
    for seed in range(7):
        ask(desk, prompt_of(70, seed))
    store = cache_of(desk).store
    store._collect(waits=True)
    (left,) = [snapshot for snapshot in store if snapshot.slot < 0]
    seed = next(seed for seed in range(7) if np.array_equal(left.tokens, prompt_of(64, seed)))
    desk.state.take_memory = ends
    assert not told(caplog)
    assert ask(desk, prompt_of(70, seed)) == 0 and left not in list(store)
    assert_lost_once(desk, caplog, "in host memory")
    desk.state.take_memory = lambda: None
    assert ask(desk, prompt_of(70, seed)) == 64


@pytest.mark.parametrize("succeeds", [0, 1, 2])
def test_a_state_with_its_blocks_goes_where_the_host_gives_no_memory_for_them(caplog, succeeds):
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_of(host=host, max_context=640, num_blocks=12, chunk=128)
    ask(desk, prompt_of(400, 1))
    allowed = itertools.count()
    desk.state.take_memory = lambda: ends() if next(allowed) >= succeeds else None
    cache_of(desk).reclaim(12, 1)
    assert cache_of(desk).store.count == host.num_kept == host.num_bytes == 0
    assert_lost_once(desk, caplog, "with its keys and values in host memory")
    desk.state.take_memory = lambda: None
    assert ask(desk, prompt_of(400, 1)) == 0


def test_what_cannot_be_copied_ahead_is_copied_when_it_goes(caplog):
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_of(host=host, max_context=640, num_blocks=12, chunk=128)
    ask(desk, prompt_of(500, 1))
    desk.state.take_memory = ends
    settle_all(desk)
    assert host.num_kept == 0 and not told(caplog), "it may still find memory"
    desk.state.take_memory = lambda: None
    cache_of(desk).reclaim(12, 1)
    assert host.num_kept and ask(desk, (*prompt_of(500, 1), 3)) == 448


def test_a_conversation_that_cannot_be_brought_back_is_computed_again(caplog):
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_of(host=host, max_context=640, num_blocks=12, chunk=128)
    ask(desk, prompt_of(500, 1))
    cache_of(desk).reclaim(12, 1)
    allowed = itertools.count()
    desk.state.take_memory = lambda: ends() if next(allowed) == 1 else None
    assert ask(desk, (*prompt_of(500, 1), 3)) == 0 and host.num_used == 0
    assert_lost_once(desk, caplog, "on the device")


@pytest.mark.parametrize("place", ["array", "blocks", "slot"])
def test_a_state_that_no_memory_is_given_for_on_its_way_to_the_disk_is_not_written(tmp_path, caplog, monkeypatch, place):
    desk = desk_of(folder=tmp_path)
    where = {"array": (snapshot_cache, "Export"), "blocks": (desk.state, "export_blocks"), "slot": (cache_of(desk).store, "export")}
    monkeypatch.setattr(*where[place], ends)
    ask(desk, prompt_of(300), system_len=256)
    settle_all(desk)
    monkeypatch.undo()
    assert_lost_once(desk, caplog, "on disk")
    ask(desk, prompt_of(300, 2), system_len=256)
    settle_all(desk)
    cache_of(desk).close()
    again = desk_of(folder=tmp_path)
    assert [ask(again, prompt_of(300, seed)) for seed in (0, 2)] == [0, 256]
    cache_of(again).close()


class Uncopied:
    """What was read of a slot, where there is no memory for a copy."""

    copy = staticmethod(ends)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("place", ["blocks", "slot"])
def test_a_state_that_no_memory_is_given_for_on_its_way_from_the_disk_is_a_miss(tmp_path, caplog, monkeypatch, place, is_early):
    first = desk_of(folder=tmp_path)
    ask(first, prompt_of(300), system_len=256)
    settle_all(first)
    cache_of(first).close()
    desk = desk_of(folder=tmp_path)
    if place == "blocks":
        monkeypatch.setattr(desk.state, "import_blocks", ends)
    else:
        monkeypatch.setattr(Reading, "slot", lambda reading: Uncopied())
    if is_early:
        settle_all(desk)
    assert ask(desk, prompt_of(300)) == 0
    assert len(told(caplog)) == cache_of(desk).to_dict()["lost"] == 1 + is_early, "it was tried for the request as well"
    cache_of(desk).close()
    monkeypatch.undo()
    again = desk_of(folder=tmp_path)
    assert ask(again, prompt_of(300)) == 256, "the file is right"
    cache_of(again).close()


def test_a_head_that_no_memory_is_given_for_is_looked_at_when_the_folder_changes(tmp_path, caplog, monkeypatch):
    tokens, slot, blocks = np.array(prompt_of(192), np.int32), np.zeros(16, np.uint8), np.zeros((3, 512), np.uint8)
    write_entry(tmp_path, bytes(32), "turn", tokens, slot, blocks)
    monkeypatch.setattr(disk_cache, "read_head", ends)
    desk = desk_of(folder=tmp_path)
    monkeypatch.undo()
    assert len(told(caplog)) == 1 and ask(desk, prompt_of(250)) == 0
    write_entry(tmp_path, bytes(32), "turn", tokens[:64], slot, blocks[:1])
    assert next(cache_of(desk)._disk.candidates(np.array(prompt_of(250), np.int32), 64)).num_tokens == 192
    cache_of(desk).close()


def test_a_prompt_that_no_memory_is_given_to_look_for_is_computed(caplog, monkeypatch):
    desk = desk_of(chunk=64)
    ask(desk, prompt_of(100))
    monkeypatch.setattr(snapshot_cache, "_ids_of", lambda request: None)
    assert ask(desk, prompt_of(100)) == 0 and cache_of(desk).to_dict()["misses"]["memory"] == 1 == len(told(caplog))
    monkeypatch.undo()
    assert ask(desk, prompt_of(100)) == 64


def test_what_a_pass_computed_is_not_kept_where_its_tokens_find_no_memory(caplog, monkeypatch):
    desk = desk_of(device=4)
    monkeypatch.setattr(snapshot_cache, "_text_of", lambda sequence, length: None)
    ask(desk, prompt_of(200), system_len=100)
    assert cache_of(desk).store.count == 0 and len(told(caplog)) == cache_of(desk).to_dict()["lost"] == 2
    monkeypatch.undo()
    assert ask(desk, prompt_of(200)) == 0 and ask(desk, prompt_of(200)) == 192


def test_repeats_are_not_looked_for_where_their_index_finds_no_memory(caplog, monkeypatch):
    sequence = Sequence(Request("long", prompt_of(100), SamplingParams(max_tokens=50)), lambda event: None, 50)
    monkeypatch.setattr(draft_suffix.SuffixIndex, "_find", ends)
    for _ in range(3):
        index = index_of(sequence)
        assert not index.match_length and index.propose(5) == [] and not may_match(sequence, 4)
        sequence.append((1, 2, 3))
    bring_up(sequence)
    assert len([record for record in caplog.records if "repeats in the text of request long" in record.getMessage()]) == 1


@pytest.mark.parametrize("place", ["whole", "chunk"])
def test_logits_that_no_memory_is_given_for_end_their_request_alone(monkeypatch, place):
    desk = desk_of(chunk=64)
    other = desk.ask(prompt_of(10), 40)
    desk.stepper.step()
    where = (scheduler.np, "empty") if place == "whole" else (desk.model.backend, "download")
    monkeypatch.setattr(*where, ends)
    answer = desk.submit(Request("logits", prompt_of(100, 1), SamplingParams(max_tokens=3), prompt_logits=True))
    for _ in range(4):
        desk.stepper.step()
    monkeypatch.undo()
    error = answer.last.error
    assert answer.finish is FinishReason.ERROR and isinstance(error, OutOfMemory)
    assert "logits of" in str(error) and "150 MiB" in str(error) and "try again" in error.hint
    desk.run()
    assert other.tokens == expected_text(prompt_of(10), 40)
    assert desk.meter.counters()["errors"] == 1


def test_a_hint_that_finds_no_memory_is_dropped(monkeypatch):
    desk = desk_of(chunk=64)
    desk.stepper.settle(prompt_of(200), 0)
    monkeypatch.setattr(cache_of(desk), "settles", ends)
    settle_all(desk)
    assert not desk.model.passes
    monkeypatch.setattr(desk.stepper._settler, "add", ends)
    desk.stepper.settle(prompt_of(200), 0)


@pytest.mark.parametrize("device,states,blocks,host", [(0, 50, 9, 1 << 20), (2, 3, 10, 4096), (8, 3, None, None)])
def test_texts_are_the_cold_ones_whichever_copies_find_no_memory(tmp_path, device, states, blocks, host):
    folders = itertools.count()

    def cold(request):
        return [Just(token) for token in expected_text(request.prompt, request.params.max_tokens, request.params)]

    @settings(max_examples=25, deadline=None)
    @given(actions(150), st.booleans(), st.integers(0, 1 << 16), st.sampled_from([0.1, 0.5, 1.0]))
    def run(todo, has_disk, seed, share):
        folder, chance = tmp_path / str(next(folders)) if has_disk else None, random.Random(seed)

        def open_desk():
            tier = HostCache(host, min_tokens=64, piece=2) if host else None
            desk = desk_of(states, device, 128, folder, 1 << 16, tier, slots=2, max_context=400, num_blocks=blocks, chunk=64)
            desk.state.take_memory = lambda: ends() if chance.random() < share else None
            return desk

        play([action for action in todo if action.params < 2], open_desk, cold, VOCAB, 300)

    run()
