"""Which shapes a server runs before anybody asks, in which order, and what it learns from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from q27app.engine import warm_up
from q27app.engine.depth import PassPrices
from q27app.engine.warm_up import WarmUp, usual_shapes


def test_the_likeliest_shapes_come_first_and_none_is_missing():
    shapes = usual_shapes(2, 15, True)
    rows = [lengths[0] - 1 for kind, lengths in shapes if kind == "rows" and len(lengths) == 1]
    assert shapes[:3] == [("prefill", (64,)), ("rows", (1,)), ("draft", (1,))]
    assert rows[:9] == [0, 5, 7, 4, 6, 3, 8, 2, 1] and rows[9:] == list(range(9, 16))
    assert len(set(shapes)) == len(shapes) - 4, "each prefill is run twice"
    for cap in range(16):
        assert sorted(lengths[0] - 1 for kind, lengths in usual_shapes(1, cap, False) if kind == "rows") == list(range(cap + 1))


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
