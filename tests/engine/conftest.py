"""Engines on the toy model, closed after each test."""

from __future__ import annotations

import pytest

from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig
from tests.engine.toy import load_toy
from tests.engine.waiting import until


@pytest.fixture
def open_engine():
    """open_engine(loaded or error or function, config options) -> a started engine; ready unless ready=False."""
    engines = []

    def make(loaded=None, ready=True, max_queue=64, **options):
        source = load_toy(**options) if loaded is None else loaded
        opens = source if callable(source) else lambda config, progress: source
        engine = Engine(EngineConfig(model="toy.q27", max_queue=max_queue, checks_pools=True), opens)
        engines.append(engine)
        engine.start()
        if ready:
            until(lambda: engine.status().state == "ready")
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive() and engine.status().state == "closed"
