"""What a coding client needs to work with the daemon: variables, arguments, and files of our own. Pure.

Nothing of the user's own configuration is read or changed: everything is given for one run, through the environment and
the command line. What a client can only read from a file is written below our state folder.

    claude      environment: address, key, model names, window, time-outs, telemetry off
    codex       -c settings: provider, catalogue (a file of ours), time-outs, telemetry off
    opencode    environment: one inline configuration
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q27app.errors import UsageError

NO_KEY = "none"
"""Sent where the daemon asks for no key: clients refuse to start without one."""
SLOW_PREFILL_TOKENS_PER_S = 400
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 600, 7200
"""A request may take this long: twice the time of a cold prefill of the whole window at a slow rate, and these bounds."""
MAX_OUTPUT_TOKENS = 32_000


@dataclass(frozen=True)
class Daemon:
    """What is known of the daemon. url without /v1; window: tokens, 0 = not known (no model is loaded).

    catalogue: the `models` of its /v1/models.
    """

    url: str
    key: str
    model: str
    window: int = 0
    catalogue: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Launch:
    """One run of a client. environment: what is added to the user's own. files: path -> text, to be written first."""

    program: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
    install: str = ""
    """How to get the program."""


def timeout_s(window: int) -> int:
    """Seconds that a request may take before its client gives up."""
    return max(MIN_TIMEOUT_S, min(MAX_TIMEOUT_S, 2 * window // SLOW_PREFILL_TOKENS_PER_S))


def plan_launch(client: str, daemon: Daemon, folder: Path, arguments: Sequence[str] = ()) -> Launch:
    """How to start `client`. folder: where files of ours may go. Raises UsageError for a client that is not known."""
    if client not in CLIENTS:
        raise UsageError(f"there is no client {client!r}.", f"Clients: {', '.join(CLIENTS)}.")
    return CLIENTS[client](daemon, folder, tuple(arguments))


def _claude(daemon: Daemon, folder: Path, arguments: tuple[str, ...]) -> Launch:
    limit = str(timeout_s(daemon.window) * 1000)
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
             "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    environment = {
        "ANTHROPIC_BASE_URL": daemon.url,
        "ANTHROPIC_AUTH_TOKEN": daemon.key or NO_KEY,
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(names, daemon.model),
        "API_TIMEOUT_MS": limit,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": limit,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    if daemon.window:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(daemon.window)
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(daemon.window)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(MAX_OUTPUT_TOKENS, max(1, daemon.window // 4)))
    return Launch("claude", arguments, environment, {}, "npm install -g @anthropic-ai/claude-code")


def _codex(daemon: Daemon, folder: Path, arguments: tuple[str, ...]) -> Launch:
    limit = timeout_s(daemon.window) * 1000
    catalogue = folder / "codex" / "models.json"
    provider = {
        "name": "q27app",
        "base_url": f"{daemon.url}/v1",
        "wire_api": "responses",
        "env_key": "Q27_CLIENT_KEY",
        "stream_idle_timeout_ms": limit,
        "request_max_retries": 2,
    }
    settings: dict[str, Any] = {
        "model": daemon.model,
        "model_provider": "q27app",
        **{f"model_providers.q27app.{name}": value for name, value in provider.items()},
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
        "web_search": "disabled",
    }
    files = {}
    if daemon.catalogue:
        settings["model_catalog_json"] = str(catalogue)
        files[catalogue] = json.dumps({"models": list(daemon.catalogue)}, indent=1)
    if daemon.window:
        settings["model_context_window"] = daemon.window
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    environment = {"Q27_CLIENT_KEY": daemon.key or NO_KEY}
    return Launch("codex", (*flags, *arguments), environment, files, "npm install -g @openai/codex")


def _opencode(daemon: Daemon, folder: Path, arguments: tuple[str, ...]) -> Launch:
    model: dict[str, Any] = {"name": daemon.model}
    if daemon.window:
        model["limit"] = {"context": daemon.window, "output": min(MAX_OUTPUT_TOKENS, max(1, daemon.window // 4))}
    settings = {
        "model": f"q27app/{daemon.model}",
        "small_model": f"q27app/{daemon.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "q27app": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "q27app",
                "options": {"baseURL": f"{daemon.url}/v1", "apiKey": daemon.key or NO_KEY,
                            "timeout": timeout_s(daemon.window) * 1000},
                "models": {daemon.model: model},
            }
        },
    }
    return Launch("opencode", arguments, {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}, {},
                  "npm install -g opencode-ai")


CLIENTS: dict[str, Callable[[Daemon, Path, tuple[str, ...]], Launch]] = {
    "claude": _claude, "codex": _codex, "opencode": _opencode,
}
