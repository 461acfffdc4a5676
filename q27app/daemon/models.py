"""GET /v1/models: what is served, in the forms that OpenAI's, Anthropic's and Codex' clients read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from q27app.daemon.daemon import DAEMON
from q27app.daemon.replies import json_response

if TYPE_CHECKING:
    from q27app.daemon.daemon import Daemon

INSTRUCTIONS = """\
You are a coding agent that works in the user's terminal through tools. Work on the user's task until it is done.

- Look before you change: read the files that matter, follow the conventions that you find there.
- Run commands with the shell tool. Edit files with apply_patch where it is offered, small patches rather than whole files.
- Never invent the result of a tool. When a command fails, read its output and try another way.
- Do what was asked and nothing beside it. Never commit, push, or delete what is not yours unless you are told to.
- Check your work with the project's own tests or a short command before you say that it is done.
- Answer briefly: what you did, what you saw, what is left."""
"""Codex sends a model's base instructions as its first message; these are ours."""

EFFORTS = (
    ("none", "No thinking before the answer"),
    ("low", "Short thinking"),
    ("medium", "Thinking as the model was trained to"),
    ("high", "Long thinking"),
)
MAX_OUTPUT_TOKENS = 10_000
"""Tokens of a tool's output that Codex keeps."""


def entry(daemon: Daemon, name: str) -> dict[str, Any]:
    """The model under any name, as OpenAI and Anthropic list it."""
    created = int(daemon.started_at)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "owned_by": "q27app",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "context_window": daemon.engine.max_context,
    }


def catalogue_entry(name: str, window: int | None, thinks: bool) -> dict[str, Any]:
    """The model as Codex' catalogue describes one. window: tokens, None = not known yet. thinks: by default."""
    return {
        "slug": name,
        "display_name": name,
        "description": "Served by q27app on this machine",
        "default_reasoning_level": "medium" if thinks else "none",
        "supported_reasoning_levels": [{"effort": level, "description": text} for level, text in EFFORTS],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": True,
        "supports_reasoning_summary_parameter": True,
        "default_reasoning_summary": "auto",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": MAX_OUTPUT_TOKENS},
        "supports_parallel_tool_calls": True,
        "supports_image_detail_original": False,
        "context_window": window,
        "max_context_window": window,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    daemon = request.app[DAEMON]
    name = daemon.model_id
    listed = entry(daemon, name)
    catalogue = catalogue_entry(name, daemon.engine.max_context or None, daemon.config.reasoning.default == "on")
    return json_response(
        {
            "object": "list",
            "data": [listed],
            "models": [catalogue],
            "has_more": False,
            "first_id": name,
            "last_id": name,
        }
    )


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/ID: any name is served."""
    return json_response(entry(request.app[DAEMON], request.match_info["id"]))
