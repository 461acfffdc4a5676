"""A start tells what it spent its time with."""

from __future__ import annotations

import logging
import re

import pytest

from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.phases import Phases
from q27app.weights.synthetic import synthesize


def test_phases_follow_each_other():
    phases = Phases()
    first, second = phases.end("a"), phases.end("b")
    assert phases.seconds == {"a": first, "b": second} and abs(phases.total - first - second) < 1e-6
    assert re.fullmatch(r"\d+\.\d\d s: a \d+\.\d\d, b \d+\.\d\d", str(phases))


@pytest.mark.parametrize("warms_up", [False, True])
def test_one_line_says_how_long_each_phase_took_and_what_was_run(tmp_path, caplog, warms_up):
    path = synthesize(tmp_path / "nano.q27", "nano", "chain", "q4s")
    config = EngineConfig(model=path, backend="numpy", context=256, slots=1, max_draft=1, warm_up=warms_up)
    with caplog.at_level(logging.INFO, "q27app.engine"):
        loaded = open_model(config, lambda share: None)
    loaded.close()
    (line,) = [record.getMessage() for record in caplog.records if "ready after" in record.getMessage()]
    for name in ("backend", "weights", "kernels and state", "cache", "warm-up", "states from disk"):
        assert re.search(rf"\b{name} \d+\.\d\d", line), line
    assert loaded.info["start"] in line and ("shapes" in line) is warms_up
    assert not warms_up or re.search(r"\b[1-9]\d* were run and \d+ recorded, 0 are left", line), line
