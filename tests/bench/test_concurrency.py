"""What streams get together while all of them generate."""

from __future__ import annotations

import pytest

from q27app.bench.concurrency import steady_rate
from q27app.bench.exchange import Exchange


def stream(started: float, first: float, count: int, each: float, tokens: int) -> Exchange:
    arrivals = [first + index * each for index in range(count)]
    return Exchange(started, arrivals, arrivals[-1] if arrivals else first, num_tokens=tokens)


def test_the_steady_rate_leaves_out_the_wait_for_first_tokens_and_the_last_ones_alone():
    early, late = stream(10.0, 0.1, 101, 0.01, 101), stream(10.0, 0.6, 101, 0.01, 202)
    assert steady_rate([early, late]) == pytest.approx(100 + 200, rel=0.03)
    assert steady_rate([early]) == pytest.approx(100, rel=0.01)


def test_streams_that_never_generate_together_have_no_steady_rate():
    assert steady_rate([stream(0.0, 0.1, 10, 0.01, 10), stream(5.0, 0.1, 10, 0.01, 10)]) is None
    assert steady_rate([stream(0.0, 0.1, 10, 0.01, 10), Exchange(0.0)]) is None
    assert steady_rate([]) is None
