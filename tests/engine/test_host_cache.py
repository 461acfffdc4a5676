"""States that go to host memory with their blocks, and come back: budget, shared pieces, texts."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine.host_cache import HostCache
from q27app.engine.request import Request, SamplingParams
from q27app.engine.snapshot_cache import SnapshotCache
from tests.engine.conversations import settle_all
from tests.engine.test_prefix_toy import ask, desk_of, prompt_of
from tests.engine.toy import Desk, expected_text, load_toy

BLOCK, SLOT = 100, 1000


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.array(prompt_of(length, seed), np.int32)


def keep(cache: HostCache, tokens: np.ndarray, is_shared: bool = False) -> list[tuple[int, int]]:
    """The blocks that were asked for."""
    asked = []

    def export(start, stop):
        asked.append((start, stop))
        return np.full((stop - start, BLOCK), start, np.uint8)

    assert cache.keep(tokens, np.zeros(SLOT, np.uint8), export, BLOCK, is_shared)
    return asked


def test_a_turn_more_costs_what_it_adds():
    cache = HostCache(1 << 20, piece=4)
    first = tokens_of(64 * 10)
    assert keep(cache, first[:64 * 9]) == [(0, 4), (4, 8), (8, 9)]
    assert keep(cache, first) == [(8, 10)]
    assert cache.num_bytes == SLOT + 10 * BLOCK, "the turn before went, its pieces are shared"


def test_conversations_with_one_beginning_share_its_pieces():
    cache = HostCache(1 << 20, piece=4)
    system, other = tokens_of(64 * 8), tokens_of(64 * 4, 9)
    keep(cache, system, is_shared=True)
    assert keep(cache, np.concatenate([system, other])) == [(8, 12)]
    assert keep(cache, np.concatenate([system[:64 * 6], other])) == [(4, 8), (8, 10)]
    assert cache.num_bytes == 3 * SLOT + (8 + 4 + 6) * BLOCK
    assert not cache.wants(system) and not cache.wants(system[:64 * 3]) and cache.wants(np.concatenate([system, system]))


def test_the_least_recently_used_entry_goes_when_the_budget_is_full():
    cache = HostCache(2 * SLOT + 20 * BLOCK, piece=4)
    for seed in (1, 2):
        keep(cache, tokens_of(64 * 8, seed))
    assert cache.deepest(np.append(tokens_of(64 * 8, 1), 0), 64) is not None
    keep(cache, tokens_of(64 * 8, 3))
    found = [cache.deepest(np.append(tokens_of(64 * 8, seed), 0), 64) is not None for seed in (1, 2, 3)]
    assert found == [True, False, True] and cache.num_bytes <= 2 * SLOT + 20 * BLOCK


def test_what_the_whole_budget_does_not_hold_is_not_kept_and_costs_nothing():
    cache = HostCache(SLOT + 10 * BLOCK, piece=4)
    keep(cache, tokens_of(64 * 8))
    assert not cache.keep(tokens_of(64 * 20, 2), np.zeros(SLOT, np.uint8), lambda start, stop: pytest.fail("asked"), BLOCK)
    assert cache.deepest(np.append(tokens_of(64 * 8), 0), 64) is not None


def test_only_a_whole_beginning_of_a_prompt_is_found():
    cache = HostCache(1 << 20, min_tokens=64, piece=4)
    first = tokens_of(64 * 8)
    keep(cache, first)
    changed = first.copy()
    changed[5] += 1
    assert cache.deepest(first, 64) is None, "nothing of the prompt would be left to compute"
    assert cache.deepest(np.append(changed, 0), 64) is None
    assert cache.deepest(np.append(first, 0), 64 * 9) is None and cache.deepest(np.append(first, 0), 64 * 8) is not None


def desk_with(host: HostCache | None, blocks: int = 12, device: int = 0) -> Desk:
    loaded = load_toy(slots=2, max_context=640, num_blocks=blocks, chunk=128)
    slots = range(loaded.slots.num_slots, loaded.slots.num_slots + device)
    loaded.state.hashes += [0] * device
    loaded.state.lengths += [0] * device
    loaded.state.num_slots += device
    loaded.prefix_cache = SnapshotCache(loaded.state, loaded.blocks, slots, 16 * 50, None, 128, host)
    return Desk(loaded)


@pytest.mark.parametrize("device", [0, 3])
def test_two_conversations_that_do_not_fit_together_are_found_again_in_turn(device):
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    with_host, without = desk_with(host, device=device), desk_with(None, device=device)
    found = []
    for desk in (with_host, without):
        texts = [prompt_of(400, 1), prompt_of(420, 2)]
        cached = []
        for turn in range(3):
            for which, text in enumerate(texts):
                cached.append(ask(desk, text, 5, stable_len=len(text)))
                texts[which] = (*text, *expected_text(text, 5), *prompt_of(30, turn))
        found.append(cached)
    assert found[1][2:] == [0] * 4
    assert all(cached >= 384 for cached in found[0][2:]) and host.num_used == 4
    assert with_host.loaded.prefix_cache.to_dict()["host"]["used"] == 4


def test_a_conversation_comes_back_behind_what_the_device_still_has_of_it():
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_with(host)
    first = prompt_of(520, 1)
    ask(desk, first, 3)
    ask(desk, prompt_of(600, 2), 3)
    assert len(host._entries) >= 1
    ask(desk, (*first[:200], 3), 3)
    assert ask(desk, (*first, 4), 3) == 512
    answer = desk.submit(Request("last", (*first, 4, 5), SamplingParams(max_tokens=3)))
    desk.run()
    assert answer.tokens == expected_text((*first, 4, 5), 3)
    settle_all(desk)
    desk.loaded.prefix_cache.close()
    assert desk.loaded.blocks.num_free == desk.loaded.blocks.num_blocks and host.num_bytes == 0


def test_what_will_go_next_is_copied_ahead_where_blocks_run_short(monkeypatch):
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_with(host)
    ask(desk, prompt_of(300, 1), 3)
    settle_all(desk)
    assert host.num_kept == 0, "half of the blocks are free"
    sizes, export = [], desk.state.export_blocks
    monkeypatch.setattr(desk.state, "export_blocks", lambda blocks: sizes.append(len(blocks)) or export(blocks))
    ask(desk, prompt_of(390, 2), 3)
    settle_all(desk)
    assert host.num_kept == 2 and max(sizes) <= 2 and sum(sizes) == 4 + 6
    sizes.clear()
    ask(desk, prompt_of(400, 3), 3)
    assert not sizes, "what goes is there already"
    assert ask(desk, (*prompt_of(300, 1)[:299], 7), 3) == 256


def test_a_copy_is_given_up_when_its_state_goes_and_when_the_cache_is_closed():
    host = HostCache(1 << 20, min_tokens=64, piece=1)
    desk = desk_with(host)
    ask(desk, prompt_of(460, 1), 3)
    desk.stepper.step()
    cache = desk.loaded.prefix_cache
    leaving = cache.store.leaving
    assert leaving._copy is not None and host.num_kept == 0
    cache.store.clear()
    settle_all(desk)
    assert leaving._copy is None and host.num_kept == 0
    cache.close()
    assert not cache.has_spare_work


def test_copying_ahead_ends_where_the_host_has_not_room_for_all():
    host = HostCache(16 + 6 * 1024, min_tokens=64, piece=1)
    desk = desk_with(host)
    sizes = [desk.state.slot_bytes + 5 * desk.state.block_bytes]
    host._budget = sizes[0]
    for seed in (1, 2):
        ask(desk, prompt_of(330, seed), 3)
    settle_all(desk)
    assert host.num_kept == 1 and host.num_evicted == 0 and host.num_bytes <= sizes[0]
    assert host.deepest(np.array(prompt_of(330, 1), np.int32), 64) is not None, "what goes first"
    ask(desk, prompt_of(330, 1), 3)
    settle_all(desk)
    assert host.num_kept == 2 and host.num_evicted == 1, "now the other one does"


def test_blocks_go_back_where_no_state_may_be_kept():
    host = HostCache(1 << 20, min_tokens=64, piece=2)
    desk = desk_with(host)
    for seed in (1, 2, 1):
        ask(desk, prompt_of(520, seed), 3)
    desk.loaded.prefix_cache.store._host_limit = 0
    assert ask(desk, (*prompt_of(520, 2), 5), 3) == 0 and host.num_used == 1, "only what came back counts"
    desk.stepper._check()


def test_what_is_copied_ahead_never_exceeds_the_budget_with_what_is_there(monkeypatch):
    """Pieces that are on their way count; of a state that the budget does not hold nothing is copied."""
    state = 16 + 5 * 64 * 8
    host = HostCache(2 * state - 1, min_tokens=64, piece=1)
    desk = desk_with(host, blocks=14)
    leaving = desk.loaded.prefix_cache.store.leaving

    def export(blocks):
        found = inner(blocks)
        on_the_way = 0 if leaving._copy is None else sum(piece.nbytes for piece in leaving._copy.pieces.values())
        sizes.append(host.num_bytes + on_the_way)
        return found

    sizes, inner = [], desk.state.export_blocks
    monkeypatch.setattr(desk.state, "export_blocks", export)
    for seed in range(4):
        ask(desk, prompt_of(330, seed), 3)
        settle_all(desk)
    assert host.num_kept >= 3 and max(sizes) + 512 <= host._budget
    sizes.clear()
    host._budget = state - 1
    host.clear()
    for seed in range(5, 8):
        ask(desk, prompt_of(330, seed), 3)
        settle_all(desk)
    assert not sizes


def test_what_was_copied_of_a_state_that_goes_meanwhile_is_not_copied_again(monkeypatch):
    host = HostCache(1 << 20, min_tokens=64, piece=1)
    desk = desk_with(host)
    ask(desk, prompt_of(460, 1), 3)
    copied, export = [], desk.state.export_blocks
    monkeypatch.setattr(desk.state, "export_blocks", lambda blocks: copied.extend(blocks) or export(blocks))
    for _ in range(5):
        desk.stepper.step()
    assert 0 < len(copied) < 7
    ask(desk, prompt_of(600, 2), 3)
    assert host.num_kept == 1 and len(copied) == len(set(copied)) == 7


def test_closing_copies_nothing_to_memory_that_goes_with_it(tmp_path, monkeypatch):
    desk = desk_of(folder=tmp_path, host=HostCache(1 << 20, min_tokens=64, piece=1), slots=2, num_blocks=12)
    ask(desk, prompt_of(460, 1), 3, system_len=128)
    sizes, export = [], desk.state.export_blocks
    monkeypatch.setattr(desk.state, "export_blocks", lambda blocks: sizes.append(len(blocks)) or export(blocks))
    desk.loaded.prefix_cache.close()
    assert sizes == [2] and len(list(tmp_path.iterdir())) == 1
