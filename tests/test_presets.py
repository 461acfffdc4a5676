"""Presets and the sampler's flags: what wins over what."""

from __future__ import annotations

import pytest

from q27app.cli import run
from q27app.config import config_path, load_config
from q27app.errors import EXIT_USAGE, UsageError
from q27app.paths import ensured


@pytest.fixture
def served(monkeypatch):
    """Configurations that `q27app serve` would have run with."""
    from q27app.daemon import serve

    seen = []
    monkeypatch.setattr(serve, "serve", lambda config, *rest: seen.append(config) or 0)
    return seen


def test_a_preset_sets_what_is_set_nowhere_else(monkeypatch):
    ensured(config_path().parent)
    config_path().write_text("[sampling]\ntop_k = 7\n")
    monkeypatch.setenv("Q27APP_SAMPLING__MIN_P", "0.5")
    config = load_config({"sampling.preset": "agentic", "sampling.temperature": "0.25"})
    sampling, reasoning = config.sampling, config.reasoning
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p) == (0.25, 7, 0.5, 0.95)
    assert (reasoning.default, reasoning.budget) == ("on", "none")
    origins = {key: str(config.origins[f"sampling.{key}"]).split()[0] for key in ("temperature", "top_k", "min_p", "top_p")}
    assert origins == {"temperature": "flag", "top_k": "file", "min_p": "environment", "top_p": "preset"}


def test_without_a_preset_the_defaults_are_greedy_and_do_not_think():
    config = load_config()
    assert (config.sampling.temperature, config.reasoning.default) == (0.0, "off")


def test_the_reference_preset_is_exact_and_alone():
    model = load_config({"sampling.preset": "reference"}).model
    assert (model.kv, model.draft, model.slots, model.fast_head) == ("exact", "off", 1, False)


def test_an_unknown_preset_is_refused():
    with pytest.raises(UsageError, match="agentic"):
        load_config({"sampling.preset": "fast"})


def test_the_flags_of_serve_reach_the_configuration(served):
    arguments = ["serve", "--preset", "agentic", "--temp", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1",
                 "--no-think", "--think-budget", "100", "--no-request-think", "--api-key", "a", "--api-key", "b",
                 "--capture", "kept", "--fast-head"]
    assert run(arguments) == 0
    config = served[0]
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.5, 0.9, 5)
    assert (config.sampling.min_p, config.server.api_keys, config.server.capture) == (0.1, ("a", "b"), "kept")
    assert config.model.fast_head
    reasoning = config.reasoning
    assert (reasoning.default, reasoning.budget, reasoning.request_thinking) == ("off", 100, False)


def test_a_flag_that_is_out_of_bounds_is_named(served, capsys):
    assert run(["serve", "--temp", "hot"]) == EXIT_USAGE
    assert "--temp" in capsys.readouterr().err
    assert run(["serve", "--think-budget", "0"]) == EXIT_USAGE
    assert served == []


def test_the_model_cards_samplers_are_presets():
    found = {name: load_config({"sampling.preset": name}) for name in ("card", "card-coding", "card-instruct")}
    samplers = {name: (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k, config.sampling.min_p,
                       config.sampling.presence_penalty, config.reasoning.default) for name, config in found.items()}
    assert samplers == {"card": (1.0, 0.95, 20, 0.0, 0.0, "on"), "card-coding": (0.6, 0.95, 20, 0.0, 0.0, "on"),
                        "card-instruct": (0.7, 0.8, 20, 0.0, 1.5, "off")}
