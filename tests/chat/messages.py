"""Short ways to write messages and tools."""

from __future__ import annotations

from typing import Any

from q27app.chat.types import Message, TextPart, Tool


def message(role: str, *parts: Any) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def make_tool(name: str, description: str = "", required: tuple[str, ...] = (), **types: Any) -> Tool:
    """A declared function; types: property -> JSON type."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, description, parameters, {"type": "function", "function": function})
