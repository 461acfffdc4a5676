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
