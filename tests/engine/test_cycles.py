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


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.long)])
def test_memory_does_not_grow(tmp_path, count):
    synthesize(tmp_path / "nano.q27", "nano")
    found = turns(EngineConfig(tmp_path / "nano.q27", "numpy", context=1024, slots=1), count, resident)
    assert growth(found, 3) < ALLOWED, [turn.unloaded >> 20 for turn in found]
