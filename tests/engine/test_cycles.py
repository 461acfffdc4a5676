"""Loading and unloading again and again leaves nothing behind; the card's turn is tests/gpu/operations.py."""

from __future__ import annotations

import psutil
import pytest

from q27app.engine.loading import EngineConfig
from q27app.weights.synthetic import synthesize
from tests.gpu.operations import growth, turns

ALLOWED = 8 << 20
"""Bytes that an allocator may keep: a leak of the nano's weights would be over 100 MB in 50 turns."""


def resident() -> int:
    return psutil.Process().memory_info().rss


def check(tmp_path, count):
    synthesize(tmp_path / "nano.q27", "nano")
    found = turns(EngineConfig(tmp_path / "nano.q27", "numpy", context=1024, slots=1), count, resident)
    assert growth(found, 3) < ALLOWED, [turn.unloaded >> 20 for turn in found]


def test_a_few_turns_leave_nothing_behind(tmp_path):
    check(tmp_path, 6)


@pytest.mark.long
def test_fifty_turns_leave_nothing_behind(tmp_path, long_scale):
    check(tmp_path, max(10, round(50 * long_scale)))
