"""A scripted agent for the engine's double: which call comes next follows from the tool results in the prompt."""

from __future__ import annotations

import json
import threading
from typing import Any

Step = tuple[str, str, dict[str, Any]]
"""Text before the call, the tool's name, its arguments."""


class Agent:
    """tool: a tool whose declaration marks a turn of the agent; other requests (titles, probes) get a short text.

    steps: one call after the other; then `last`. num_turns: how many turns of the agent were answered.
    """

    def __init__(self, tokenizer: Any, dialect: str, tool: str, steps: list[Step], last: str) -> None:
        self._tokenizer, self._dialect, self._tool, self._steps, self._last = tokenizer, dialect, tool, steps, last
        self._lock = threading.Lock()
        self.num_turns = 0
        self.prompts: list[str] = []

    def answer(self, request: Any) -> list[Any]:
        """The script of a request."""
        prompt = self._tokenizer.decode(request.prompt)
        declared = prompt.partition("</tools>")[0]
        if not any(f'"name":{blank}"{self._tool}"' in declared for blank in ("", " ")):
            return ["A title"]
        with self._lock:
            self.num_turns += 1
            self.prompts.append(prompt)
        place = prompt.count("<tool_response>\n")
        if place >= len(self._steps):
            return [self._last[:4], 0.02, self._last[4:]]
        text, name, arguments = self._steps[place]
        body = self._call(name, arguments)
        return [text, 0.02, body[: len(body) // 3], 0.02, body[len(body) // 3 :]]

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._dialect == "json":
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
