"""The load test of the set-up: a daemon of its own for a moment, a short answer, and what that took."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

from q27app import gpu
from q27app.child_daemon import ChildDaemon
from q27app.errors import EngineDied, Unreachable
from q27app.setup.wizard import Trial

QUESTION = "Count from one to forty in words."
NUM_TOKENS = 96


def run_trial(settings: Mapping[str, Any]) -> Trial:
    """Load the model with these settings, have it say something, measure. Raises Q27Error."""
    kept = {key: value for key, value in settings.items() if key.startswith(("model.", "engine.")) and key != "model.repos"}
    started = time.monotonic()
    with ChildDaemon(kept) as daemon:
        load_s, used = time.monotonic() - started, gpu.process_bytes(daemon.pid)
        try:
            first_at, last_at, count = _ask(daemon.port)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the daemon broke off: {error!r}. Its last words:\n{daemon.last_words()}") from error
    return Trial(max(0, count - 1) / max(last_at - first_at, 1e-9), load_s, used)


def _ask(port: int) -> tuple[float, float, int]:
    """(time of the first piece of text, of the last, tokens) of one streamed answer."""
    body = {"model": "trial", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "stream": True,
            "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    first_at, last_at, count = 0.0, 0.0, 0
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if "error" in event:
                raise EngineDied(f"the daemon broke off: {event['error']}")
            count = (event.get("usage") or {}).get("completion_tokens", count)
            deltas = [choice.get("delta", {}) for choice in event.get("choices", [])]
            if any(delta.get("content") or delta.get("reasoning_content") for delta in deltas):
                last_at = time.monotonic()
                first_at = first_at or last_at
    finally:
        connection.close()
    if not first_at:
        raise EngineDied("the model answered with no text.", "Run q27app serve and look at its log.")
    return first_at, last_at, count
