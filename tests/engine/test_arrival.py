"""States that come from disk: before anybody asks, while others run, and what becomes of one that nobody wants any more."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from q27app.engine import arrival, disk_cache, disk_entry
from q27app.engine.disk_cache import DiskCache
from q27app.engine.disk_entry import entries_of
from q27app.engine.request import Request, SamplingParams
from tests.engine.conversations import close, settle_all
from tests.engine.test_prefix_toy import ask, desk_of, hold_readers, prompt_of
from tests.engine.toy import expected_text


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many chunks and copies of one block."""
    monkeypatch.setattr(disk_entry, "CHUNK", 300)
    monkeypatch.setattr(arrival, "IMPORTED_BLOCKS", 1)


def written(folder, *seeds: int, size: int = 300) -> None:
    desk = desk_of(folder=folder)
    for seed in seeds:
        ask(desk, prompt_of(size, seed))
        desk.stepper.settle(prompt_of(size, seed), 0)
        settle_all(desk)
    close(desk)


def one_coming_early(folder, monkeypatch, **options):
    """A desk, its cache, and the gate at which readers wait: the only entry is on its way and nobody has asked for it."""
    written(folder, 1)
    gate = threading.Event()
    hold_readers(monkeypatch, gate)
    desk = desk_of(folder=folder, **options)
    cache = desk.loaded.prefix_cache
    cache.spare_step(), cache.spare_step()
    assert cache._arrivals._now is not None
    return desk, cache, gate


@pytest.mark.parametrize("device", [0, 8])
def test_the_last_states_are_there_before_anybody_asks(tmp_path, monkeypatch, device):
    monkeypatch.setattr(disk_cache, "EARLY", 2)
    written(tmp_path, 1, 2, 3)
    desk = desk_of(folder=tmp_path, device=device)
    cache = desk.loaded.prefix_cache
    cache.arrive(20)
    kept = sorted((snapshot.num_tokens, snapshot.kind, snapshot.slot >= 0) for snapshot in cache.store)
    assert kept == [(256, "disk", device > 0)] * 2
    files, read = set(entries_of(tmp_path)), cache.to_dict()["disk"]["read"]
    for path in files:
        path.unlink()
    assert [ask(desk, prompt_of(300, seed)) for seed in (3, 2, 1)] == [256, 256, 0] and read == 2
    close(desk)


def test_four_states_come_before_anybody_asks(tmp_path):
    written(tmp_path, 1, 2, 3, 4, 5)
    desk = desk_of(folder=tmp_path, device=8)
    desk.loaded.prefix_cache.arrive(20)
    assert desk.loaded.prefix_cache.store.count == desk.loaded.prefix_cache.to_dict()["disk"]["read"] == 4
    close(desk)


def test_a_damaged_one_is_deleted_before_anybody_asks(tmp_path):
    written(tmp_path, 1)
    (path,) = entries_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    desk = desk_of(folder=tmp_path)
    desk.loaded.prefix_cache.arrive(20)
    assert not entries_of(tmp_path) and desk.loaded.prefix_cache.store.count == 0
    assert ask(desk, prompt_of(300, 1)) == 0
    close(desk)


def test_none_comes_early_where_too_few_blocks_are_free_or_its_sizes_are_others(tmp_path):
    written(tmp_path, 1)
    desk = desk_of(folder=tmp_path, slots=1, max_context=128, num_blocks=3)
    assert not desk.loaded.prefix_cache.has_spare_work
    close(desk)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=6)
    held = desk.loaded.blocks.allocate(3)
    desk.loaded.prefix_cache.arrive(20)
    assert desk.loaded.prefix_cache.store.count == 0
    desk.loaded.blocks.release(held)
    assert ask(desk, prompt_of(300, 1)) == 256
    close(desk)


def test_entries_of_others_and_more_than_memory_allows_are_not_read_early(tmp_path):
    written(tmp_path, 1, 2)
    tokens = np.array(prompt_of(64), np.int32)
    for number in (1, 2, 3):
        disk_entry.write_entry(tmp_path, bytes([number]) * 32, "turn", tokens, np.zeros(16, np.uint8), np.zeros((1, 512), np.uint8))
    for most, count in ((1 << 20, 2), (5000, 1), (100, 0)):
        cache = DiskCache(tmp_path, bytes(32), 1 << 20, early_bytes=most)
        cache.read_early(16, 512, 100)
        assert len(cache._early) == count, most
        cache.close()


def test_a_request_takes_what_comes_early_for_its_own(tmp_path, monkeypatch):
    desk, cache, gate = one_coming_early(tmp_path, monkeypatch)
    coming = cache._arrivals._now
    waits = desk.ask(prompt_of(300, 1), 5)
    desk.stepper.step()
    assert cache._arrivals._now is coming and cache._arrivals._for is not None and not waits.events
    gate.set()
    desk.run()
    assert waits.tokens == expected_text(prompt_of(300, 1), 5) and waits.last.stats.num_cached == 256
    assert cache.to_dict()["disk"]["read"] == 1
    close(desk)


@pytest.mark.parametrize("caches", [True, False])
def test_what_comes_early_makes_room_for_a_request_and_comes_later(tmp_path, monkeypatch, caches):
    desk, _, gate = one_coming_early(tmp_path, monkeypatch, slots=1, max_context=384, num_blocks=6)
    assert desk.loaded.blocks.num_free == 2
    answer = desk.submit(request_of("other", prompt_of(300, 9), caches))
    desk.run()
    assert answer.tokens == expected_text(prompt_of(300, 9), 5)
    gate.set()
    assert ask(desk, prompt_of(300, 1)) == 256
    close(desk)


def test_what_makes_room_again_and_again_is_read_no_more(tmp_path, monkeypatch):
    """Whoever asks for one after the other and goes does not leave all of them in memory."""
    written(tmp_path, 1, 2, 3)
    desk = desk_of(folder=tmp_path)
    arrivals = desk.loaded.prefix_cache._arrivals
    arrivals._disk._early.clear()
    gate, made, inner = threading.Event(), [], arrivals._disk.begin_read
    hold_readers(monkeypatch, gate)
    monkeypatch.setattr(arrivals._disk, "begin_read", lambda entry: made.append(inner(entry)) or made[-1])
    for turn in range(2):
        for seed in (1, 2, 3):
            desk.ask(prompt_of(300, seed), 5, name=f"{turn}-{seed}")
            desk.stepper.step()
            desk.cancel(f"{turn}-{seed}")
            if turn:
                desk.loaded.prefix_cache.spare_step()
    wanted = [*arrivals._disk._early, arrivals._now.reading]
    assert len(made) > 3 and len(wanted) <= 3
    assert all(reading._is_stopped for reading in made if reading not in wanted)
    assert not any(reading._is_stopped for reading in wanted)
    gate.set()
    close(desk)


def test_a_state_that_is_kept_meanwhile_is_kept_once(tmp_path, monkeypatch):
    desk, cache, gate = one_coming_early(tmp_path, monkeypatch, device=4)
    blocks, coming = desk.loaded.blocks, cache._arrivals._now
    free = blocks.num_free
    own = blocks.allocate(4)
    cache.store.take(coming.reading.entry.tokens, own, 0, "prompt")
    blocks.release(own)   # the store shares them
    gate.set()
    settle_all(desk)
    assert [snapshot.kind for snapshot in cache.store] == ["prompt"] and blocks.num_free == free
    close(desk)


def request_of(name, prompt, caches):
    from q27app.engine.request import Request

    return Request(name, prompt, SamplingParams(max_tokens=5), cache=caches)


def test_what_nobody_waits_for_any_more_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "EARLY", 2)
    written(tmp_path, 1, 2, 3)
    desk = desk_of(folder=tmp_path)
    desk.loaded.prefix_cache.arrive(20)
    gate = threading.Event()
    hold_readers(monkeypatch, gate)
    desk.ask(prompt_of(300, 1), 5, name="gone")
    desk.stepper.step()
    assert desk.loaded.prefix_cache._arrivals._for.id == "gone"
    desk.cancel("gone")
    gate.set()
    settle_all(desk)
    assert [snapshot.num_tokens for snapshot in desk.loaded.prefix_cache.store] == [256] * 3
    for path in entries_of(tmp_path):
        path.unlink()
    assert ask(desk, prompt_of(300, 1)) == 256
    close(desk)


def test_what_is_on_its_way_when_the_cache_is_closed_is_given_back(tmp_path, monkeypatch):
    desk, _, gate = one_coming_early(tmp_path, monkeypatch, device=4)
    threading.Timer(0.2, gate.set).start()
    close(desk)


def test_only_what_is_right_is_copied(tmp_path, monkeypatch):
    """The last chunk is wrong: blocks were filled and are given back, no state tells of them."""
    written(tmp_path, 1)
    (path,) = entries_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    desk = desk_of(folder=tmp_path)
    copied, inner = [], desk.state.import_blocks
    monkeypatch.setattr(desk.state, "import_blocks", lambda blocks, found: (copied.extend(blocks), inner(blocks, found)))
    assert ask(desk, prompt_of(300, 1)) == 0
    assert len(copied) < 4 and desk.loaded.prefix_cache.to_dict()["disk"]["failed"] == 1
    desk.loaded.blocks.check(desk.loaded.prefix_cache.owned_blocks())
    assert np.array_equal(desk.loaded.prefix_cache.store.deepest(np.array(prompt_of(300, 1), np.int32), 300).tokens, prompt_of(300, 1)[:256])
    close(desk)


def damage(folder) -> None:
    (path,) = entries_of(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def kept_in(desk) -> list[tuple[int, str]]:
    return sorted((snapshot.num_tokens, snapshot.kind) for snapshot in desk.loaded.prefix_cache.store)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_kept_states_go_only_for_an_entry_that_is_right_and_somebody_who_waits(tmp_path, monkeypatch, is_damaged, stays):
    written(tmp_path, 1)
    if is_damaged:
        damage(tmp_path)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=7)
    arrivals = desk.loaded.prefix_cache._arrivals
    arrivals._disk._early.clear()
    ask(desk, prompt_of(300, 9))
    gate = threading.Event()
    hold_readers(monkeypatch, gate)
    waits = desk.ask(prompt_of(300, 1), 5, name="first")
    desk.stepper.step()
    assert arrivals._now is not None and not waits.events
    assert desk.loaded.blocks.num_free == 3 and kept_in(desk) == [(256, "prompt")]
    gate.set()
    if stays:
        desk.run()
        assert waits.tokens == expected_text(prompt_of(300, 1), 5) and waits.last.stats.num_cached == 256 * (not is_damaged)
    else:
        arrivals._now.reading.wait(1 << 40, 20)
        desk.cancel("first")
        settle_all(desk)
        assert ask(desk, prompt_of(300, 9)) == 256
    close(desk)


def test_the_state_that_an_entry_goes_on_from_stays_if_the_entry_is_damaged(tmp_path):
    written(tmp_path, 1)
    damage(tmp_path)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=7)
    for early in desk.loaded.prefix_cache._arrivals._disk._early:
        early.stop()
    desk.loaded.prefix_cache._arrivals._disk._early.clear()
    for seed in (1, 8, 9):
        ask(desk, prompt_of(130, seed))
    assert ask(desk, prompt_of(300, 1)) == 128
    close(desk)


def test_no_entry_is_read_that_would_fit_only_without_the_state_it_goes_on_from(tmp_path):
    written(tmp_path, 1)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=7)
    arrivals, prompt = desk.loaded.prefix_cache._arrivals, prompt_of(300, 1)
    arrivals._disk._early.clear()
    ask(desk, prompt[:130])
    held = desk.loaded.blocks.allocate(4)
    assert not arrivals.prepares(Request("late", prompt, SamplingParams()), np.array(prompt, np.int32), 0.0) and arrivals._now is None
    desk.loaded.blocks.release(held)
    assert ask(desk, prompt) == 256
    close(desk)


def test_the_state_that_an_entry_goes_on_from_is_the_last_to_go_for_it(tmp_path):
    written(tmp_path, 1)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=7)
    desk.loaded.prefix_cache._arrivals._disk._early.clear()
    for seed in (1, 8, 9):
        ask(desk, prompt_of(130, seed))
    arrivals, prompt = desk.loaded.prefix_cache._arrivals, np.array(prompt_of(300, 1), np.int32)
    request = Request("next", tuple(prompt.tolist()), SamplingParams())
    while arrivals.prepares(request, prompt, 1.0):
        pass
    assert kept_in(desk) == [(128, "prompt"), (128, "prompt"), (256, "disk")]
    assert arrivals._store.deepest(prompt[:200], 200) is not None
    close(desk)


def test_who_waits_for_an_entry_whose_room_others_have_taken_goes_on_without_it(tmp_path, monkeypatch):
    written(tmp_path, 1)
    desk = desk_of(folder=tmp_path, slots=1, max_context=384, num_blocks=7)
    desk.loaded.prefix_cache._arrivals._disk._early.clear()
    ask(desk, prompt_of(300, 9))
    gate, blocks = threading.Event(), desk.loaded.blocks
    hold_readers(monkeypatch, gate)
    arrivals, prompt = desk.loaded.prefix_cache._arrivals, np.array(prompt_of(300, 1), np.int32)
    request = Request("next", tuple(prompt.tolist()), SamplingParams())
    assert arrivals.prepares(request, prompt, 0.0)
    held = blocks.allocate(3)
    for snapshot in arrivals._store:
        blocks.share(snapshot.blocks)   # who runs goes on from it
    gate.set()
    assert any(not arrivals.prepares(request, prompt, 20.0) for _ in range(9)), "it would be waited for without end"
    assert arrivals._now is None and kept_in(desk) == [(256, "prompt")]
    for snapshot in arrivals._store:
        blocks.release(snapshot.blocks)
    blocks.release(held)
    blocks.check(desk.loaded.prefix_cache.owned_blocks())
    close(desk)


def test_what_nobody_waits_for_any_more_gives_its_slot_and_blocks_back(tmp_path, monkeypatch):
    desk, cache, gate = one_coming_early(tmp_path, monkeypatch, device=8)
    arrival = cache._arrivals._now
    assert arrival._slot is not None and len(cache.store._free_slots) == 7 and desk.loaded.blocks.num_free < desk.loaded.blocks.num_blocks
    cache._arrivals.stop()
    assert len(cache.store._free_slots) == 8 and desk.loaded.blocks.num_free == desk.loaded.blocks.num_blocks
    gate.set()
    close(desk)
