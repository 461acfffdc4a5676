"""Which shapes a server runs before anybody asks, in which order, and what it learns from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from q27app.engine import warm_up
from q27app.engine.depth import PassPrices
from q27app.engine.status import Meter
from q27app.engine.stepper import Stepper
from q27app.engine.warm_up import WarmUp, usual_shapes
from q27app.weights.synthetic import synthesize
from tests.engine.test_drafts import desk_of, tell


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("dense") / "dense.q27", wiring="dense")


def test_the_likeliest_shapes_come_first_and_none_is_missing():
    shapes = usual_shapes(2, 15, True)
    rows = [lengths[0] - 1 for kind, lengths in shapes if kind == "rows" and len(lengths) == 1]
    assert shapes[:3] == [("prefill", (64,)), ("rows", (1,)), ("draft", (1,))]
    assert rows[:9] == [0, 5, 7, 4, 6, 3, 8, 2, 1] and rows[9:] == list(range(9, 16))
    assert len(set(shapes)) == len(shapes) - 4, "each prefill is run twice"
    for cap in range(16):
        assert sorted(lengths[0] - 1 for kind, lengths in usual_shapes(1, cap, False) if kind == "rows") == list(range(cap + 1))


@pytest.mark.parametrize("cap, priced", [(15, [9, 16]), (12, [9, 13]), (8, [9]), (7, []), (0, [])])
def test_what_a_group_of_rows_more_costs_is_asked_early(cap, priced):
    """Where a straight line through fewer rows would promise too much."""
    shapes = usual_shapes(1, cap, True)
    found = [place for place, (kind, _) in enumerate(shapes) if kind == "price"]
    assert [shapes[place][1][0] for place in found] == priced
    before = [lengths[0] for kind, lengths in shapes[:found[0]] if kind == "rows"] if found else []
    assert not found or before == [1, 6, 8] and found[-1] - found[0] == len(found) - 1


@pytest.mark.parametrize("depths, price", [(warm_up.USUAL_DEPTHS, 2.0), ((5, 7), 2.0), ((5, 3), 2.0), ((5, 4, 6), 0.0), ((5,), 0.0)])
def test_the_price_of_a_draft_step_is_what_longer_and_shorter_chains_differ_by(monkeypatch, depths, price):
    prices, clock = PassPrices(), [0.0]
    monkeypatch.setattr(warm_up.time, "monotonic", lambda: clock[0])
    warm = WarmUp.__new__(WarmUp)
    warm._prices, warm._ahead, warm._is_narrow, warm._state = prices, None, False, None
    warm._forward = lambda batch: None
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100), backend=SimpleNamespace(drafted=lambda: None, result=lambda: None))
    model.draft_ahead = lambda state, steps, rows, narrow: clock.__setitem__(0, clock[0] + 0.1 + 0.002 * steps)
    warm._model = model
    for depth in depths:
        warm._run_ahead(SimpleNamespace(num_seqs=1, num_rows=1 + depth))
    assert abs(prices.step_ms - price) < 1e-6


def test_warming_up_records_shapes_learns_prices_and_leaves_the_slots_empty(dense):
    desk, fresh = desk_of(dense, "auto", cap=3), desk_of(dense, "auto", cap=3)
    loaded = desk.loaded
    warm = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 3, True, loaded.drafter.prices)
    while warm.has_work:
        warm.step()
        desk.stepper._scheduler.check()
    prices = loaded.drafter.prices.to_dict()
    assert set(prices["pass_ms"]) == {"1", "2", "3", "4"} and prices["step_ms"] > 0
    num_fresh = loaded.model.num_fresh
    assert len(loaded.model.replays) == num_fresh / 2 == 4 + 1 + 3 + 4, "rows alone, together, with drafts; first and further steps"
    assert all(not loaded.state.export_slot(slot).any() for slot in range(2))
    assert tell(desk) == tell(fresh)


def test_the_prices_of_many_rows_come_without_recordings_of_their_chains(dense, monkeypatch):
    desk = desk_of(dense, "auto", cap=15)
    loaded, chains = desk.loaded, []
    monkeypatch.setattr(WarmUp, "_run_ahead", lambda self, batch: chains.append(batch.num_rows))
    monkeypatch.setattr(loaded.model.backend, "is_ahead", True)
    monkeypatch.setattr(WarmUp, "_run_behind", lambda self, batch: None)
    prices = PassPrices()
    warm = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 15, True, prices)
    while any(kind == "price" for kind, _ in warm._shapes):
        warm.step()
    assert set(prices.to_dict()["pass_ms"]) == {"1", "6", "8", "9", "16"} and chains == [6, 8]


@pytest.mark.parametrize("window, differs, num_deep", [(4096, True, 3), (4096, False, 0), (3, True, 0), (0, True, 0)])
def test_shapes_that_launch_otherwise_at_depth_are_recorded_there_too(dense, monkeypatch, window, differs, num_deep):
    desk, fresh = desk_of(dense, "auto", cap=3), desk_of(dense, "auto", cap=3)
    loaded = desk.loaded
    monkeypatch.setattr(loaded.model.backend, "depth_group", lambda batch: int(differs and int(batch.positions[-1]) > 1000))
    prices = PassPrices()
    warm = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 3, True, prices, window)
    num_shapes = warm.num_left
    while warm.has_work:
        told = prices.to_dict()["pass_ms"] if warm._shapes[0][0] == "deep" else None
        warm.step()
        desk.stepper._scheduler.check()
        assert told is None or told == prices.to_dict()["pass_ms"], "a price of few passes"
    deep = [key for key in loaded.model.replays._recorded if key[-1] == 1 and "verify" in key]
    assert sorted(key[3] for key in deep) == [2, 3, 4][:num_deep] and warm.num_run == num_shapes - 3 + num_deep
    assert loaded.model.num_fresh == 2 * len(loaded.model.replays) == 2 * (12 + num_deep), "each has run plainly and is recorded"
    assert all(not loaded.state.export_slot(slot).any() for slot in range(2))
    assert loaded.blocks.num_free == loaded.blocks.num_blocks and tell(desk) == tell(fresh)


def test_no_shape_takes_the_place_of_a_likelier_one(dense):
    loaded = desk_of(dense, "auto", cap=3).loaded
    all_of_it = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 3, True, PassPrices())
    while all_of_it.has_work:
        all_of_it.step()
    recorded = list(loaded.model.replays._recorded)
    loaded.model.replays.clear()
    loaded.model.replays.limit = 7
    warm = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 3, True, PassPrices())
    while warm.has_work:
        warm.step()
    found = list(loaded.model.replays._recorded)
    assert found == recorded[:len(found)] and 5 <= len(found) <= 7 and warm.num_left == 0


def test_a_shape_is_given_up_where_its_slots_are_taken(dense):
    desk = desk_of(dense, "off")
    loaded = desk.loaded
    taken = loaded.slots.allocate()
    warm = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 0, False, PassPrices())
    while warm.has_work:
        warm.step()
    assert len(loaded.model.replays) == 1 and loaded.slots.num_free == 1
    assert loaded.blocks.num_free == loaded.blocks.num_blocks
    loaded.slots.release(taken)


def test_a_card_warms_up_while_nobody_waits(dense):
    desk = desk_of(dense, "off")
    loaded = desk.loaded
    loaded.warm_up = WarmUp(loaded.model, loaded.state, loaded.slots, loaded.blocks, 0, False, PassPrices())
    stepper = Stepper(loaded, Meter(), lambda sequence: None, checks_pools=True)
    while stepper.has_spare_work:
        assert not stepper.has_work
        stepper.step()
    assert len(loaded.model.replays) == 2
    assert set(stepper._scheduler.pace._ms) == {1, 2, 4}, "prices of the prefills that a pass holds"
