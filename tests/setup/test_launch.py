"""What each client is given: address, key, names, window, time-outs; nothing of the user's own is touched."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from q27app.errors import UsageError
from q27app.setup.launch import CLIENTS, Daemon, plan_launch, timeout_s

DAEMON = Daemon("http://127.0.0.1:8027", "secret", "qwen", 131_072, ({"slug": "qwen", "context_window": 131_072},))
FOLDER = Path("/state/clients")


def test_claude_gets_address_names_window_and_silence():
    plan = plan_launch("claude", DAEMON, FOLDER, ["-p", "say hi"])
    environment = plan.environment
    assert (plan.program, plan.arguments, plan.files) == ("claude", ("-p", "say hi"), {})
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8027"
    assert (environment["ANTHROPIC_AUTH_TOKEN"], environment["ANTHROPIC_API_KEY"]) == ("secret", "")
    assert {value for name, value in environment.items() if "MODEL" in name} == {"qwen"}
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert int(environment["API_TIMEOUT_MS"]) == 655_000
    assert environment["DISABLE_TELEMETRY"] == environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_codex_gets_settings_that_are_toml_and_a_catalogue_in_our_own_folder():
    plan = plan_launch("codex", DAEMON, FOLDER, ["exec", "say hi"])
    flags, rest = plan.arguments[:-2], plan.arguments[-2:]
    assert rest == ("exec", "say hi") and set(flags[::2]) == {"-c"}
    settings = tomllib.loads("\n".join(flags[1::2]))
    provider = settings["model_providers"]["q27app"]
    assert (settings["model"], settings["model_provider"], settings["model_context_window"]) == ("qwen", "q27app", 131072)
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8027/v1", "responses")
    assert plan.environment == {provider["env_key"]: "secret"} and "secret" not in " ".join(plan.arguments)
    assert settings["analytics"] == {"enabled": False}
    path = Path(settings["model_catalog_json"])
    assert path.is_relative_to(FOLDER) and json.loads(plan.files[path])["models"][0]["slug"] == "qwen"


def test_opencode_gets_one_inline_configuration():
    plan = plan_launch("opencode", DAEMON, FOLDER)
    settings = json.loads(plan.environment["OPENCODE_CONFIG_CONTENT"])
    provider = settings["provider"]["q27app"]
    assert settings["model"] == "q27app/qwen" and provider["options"]["apiKey"] == "secret"
    assert provider["models"]["qwen"]["limit"] == {"context": 131_072, "output": 32_000}


@pytest.mark.parametrize("client", CLIENTS)
def test_without_a_key_or_a_loaded_model_a_client_still_starts(client):
    plan = plan_launch(client, Daemon("http://127.0.0.1:1", "", "demo"), FOLDER)
    assert "none" in json.dumps(plan.environment) and plan.files == {}
    assert "CONTEXT" not in " ".join(plan.environment) and "context" not in " ".join(plan.arguments)


def test_time_outs_have_bounds():
    assert [timeout_s(window) for window in (0, 131_072, 1 << 30)] == [600, 655, 7200]


def test_an_unknown_client_is_named():
    with pytest.raises(UsageError, match="'vim'"):
        plan_launch("vim", DAEMON, FOLDER)
