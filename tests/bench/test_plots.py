"""Pictures of reports, and what is said where they cannot be drawn."""

from __future__ import annotations

import json

import pytest

from q27app.bench import plots
from q27app.cli import run

from .openai_double import OpenAIDouble


def test_without_the_library_nothing_is_measured(capfd, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with OpenAIDouble() as server:
        assert run(["bench", "concurrency", "--url", server.url, "--streams", "1", "--plot", "x.png"]) == 2
        assert server.bodies == []
    assert "q27app[bench]" in capfd.readouterr().err


def test_a_report_is_drawn_at_once_or_later(capfd, tmp_path):
    pytest.importorskip("matplotlib")
    with OpenAIDouble() as server:
        assert run(["bench", "concurrency", "--url", server.url, "--streams", "1,2", "--plot", str(tmp_path / "now.png"), "--json"]) == 0
    printed = capfd.readouterr().out
    (tmp_path / "report").write_text("first words\n" + printed)
    assert run(["bench", "plot", str(tmp_path / "report"), str(tmp_path / "later.png")]) == 0
    assert (tmp_path / "now.png").read_bytes()[:4] == (tmp_path / "later.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("content", ["", "words", "[1]", "{}", json.dumps({"bench": "soak", "rows": [1]}), json.dumps({"bench": "speed", "rows": []})])
def test_what_is_no_report_is_refused(capfd, tmp_path, content):
    pytest.importorskip("matplotlib")
    (tmp_path / "report").write_text(content)
    assert run(["bench", "plot", str(tmp_path / "report"), str(tmp_path / "x.png")]) == 2
    assert "Traceback" not in capfd.readouterr().err


ROWS = {
    "speed": [{"server": "a", "test": "depth 0", "num_prompt": 40, "decode_per_s": 9.0}, {"server": "a", "test": "depth 100",
              "num_prompt": 100, "decode_per_s": 8.0, "prefill_per_s": 70.0}],
    "concurrency": [{"server": "a", "streams": 1, "aggregate_per_s": 9.0, "first_p50_ms": None}],
    "turns": [{"server": "a", "turn": 1, "first_ms": 20.0, "wall_s": 1.0}],
    "needle": [{"length": 4096, "depth_0": 100.0, "depth_50": None}],
    "fidelity": [{"candidate": "c", "mean_kl": 1e-3, "low": 5e-4, "high": 2e-3, "p99": 0.0, "max": 0.1}, {"candidate": "d", "mean_kl": 0.0}],
    "kernels": [{"pass": "1 rows", "stage": "down", "bytes": 100, "flops": 400, "tflop_per_s": 0.5}, {"pass": "1 rows", "stage": "whole pass"}],
}


@pytest.mark.parametrize("name", plots.PAINTERS)
def test_every_bench_has_its_picture(tmp_path, name):
    pytest.importorskip("matplotlib")
    report = {"bench": name, "stamp": {"card": "none"}, "rows": ROWS[name], "settings": {"depths": [0, 50]},
              "peaks": {"gb_per_s": 100.0, "tflop_per_s": 5.0}}
    plots.draw(report, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 5000
