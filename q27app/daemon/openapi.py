"""The OpenAPI document of the daemon: one table of routes, from which the document is written.

Request schemas name the fields that are read, with their types as clients send them; unknown fields are ignored
everywhere, so every object is open. Each body has an example that is answered with 2xx.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from q27app import __version__

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": OBJECT}
TEXT_OR_LIST: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": TEXT, "content": {"oneOf": [TEXT, OBJECTS]}},
}
MESSAGES: Schema = {"type": "array", "minItems": 1, "items": MESSAGE}
IDS: Schema = {"type": "array", "items": COUNT}
SAMPLER: dict[str, Schema] = {
    "model": TEXT, "stream": FLAG, "temperature": NUMBER, "top_p": NUMBER, "top_k": COUNT, "min_p": NUMBER,
    "seed": {"type": "integer"},
}
OPENAI: dict[str, Schema] = {
    **SAMPLER, "max_tokens": COUNT, "stop": TEXT_OR_LIST, "n": {"type": "integer", "minimum": 1, "maximum": 16},
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "stream_options": OBJECT, "response_format": OBJECT,
}
CHAT: dict[str, Schema] = {
    **OPENAI, "messages": MESSAGES, "max_completion_tokens": COUNT, "logprobs": FLAG, "top_logprobs": COUNT,
    "tools": OBJECTS, "tool_choice": {"oneOf": [TEXT, OBJECT]}, "parallel_tool_calls": FLAG, "reasoning_effort": TEXT,
    "chat_template_kwargs": OBJECT,
}
ANTHROPIC: dict[str, Schema] = {
    **SAMPLER, "messages": MESSAGES, "max_tokens": COUNT, "system": {"oneOf": [TEXT, OBJECTS]}, "tools": OBJECTS,
    "tool_choice": OBJECT, "stop_sequences": {"type": "array", "items": TEXT}, "thinking": OBJECT, "metadata": OBJECT,
    "output_config": OBJECT,
}
RESPONSES: dict[str, Schema] = {
    **SAMPLER, "input": {"oneOf": [TEXT, OBJECTS]}, "instructions": TEXT, "max_output_tokens": COUNT, "tools": OBJECTS,
    "tool_choice": {"oneOf": [TEXT, OBJECT]}, "parallel_tool_calls": FLAG, "reasoning": OBJECT, "text": OBJECT,
    "include": {"type": "array", "items": TEXT},
}
HI: list[Schema] = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Route:
    """fields: of the JSON body, None = there is none. needs: those that must be there. reply: keys of a 200's object,
    or a media type. names: parameters in the path."""

    method: str
    path: str
    summary: str
    reply: tuple[str, ...] | str
    fields: dict[str, Schema] | None = None
    needs: tuple[str, ...] = ()
    example: Schema = field(default_factory=dict)
    names: tuple[str, ...] = ()


ROUTES = (
    Route("post", "/v1/chat/completions", "OpenAI Chat Completions", ("id", "object", "choices", "usage"), CHAT,
          ("messages",), {"messages": HI}),
    Route("post", "/v1/completions", "OpenAI Completions", ("id", "object", "choices", "usage"),
          {**OPENAI, "prompt": {"oneOf": [TEXT, IDS, {"type": "array", "items": {"oneOf": [TEXT, IDS]}}]}, "logprobs": COUNT}, ("prompt",), {"prompt": "hi"}),
    Route("post", "/v1/responses", "OpenAI Responses", ("id", "object", "status", "output", "usage"), RESPONSES,
          ("input",), {"input": "hi"}),
    Route("post", "/v1/messages", "Anthropic Messages", ("id", "type", "role", "content", "stop_reason", "usage"),
          ANTHROPIC, ("messages", "max_tokens"), {"messages": HI, "max_tokens": 9}),
    Route("post", "/v1/messages/count_tokens", "Tokens of a Messages request", ("input_tokens",), ANTHROPIC,
          ("messages",), {"messages": HI}),
    Route("get", "/v1/models", "What is served", ("object", "data", "models")),
    Route("get", "/v1/models/{id}", "The model under any name", ("id", "object"), names=("id",)),
    Route("post", "/tokenize", "Text to ids", ("tokens",), {"content": TEXT, "parse_special": FLAG, "with_pieces": FLAG},
          ("content",), {"content": "hi"}),
    Route("post", "/detokenize", "Ids to text", ("content",), {"tokens": IDS}, ("tokens",), {"tokens": [1, 2]}),
    Route("post", "/apply-template", "Messages to a prompt", ("prompt", "tokens"), CHAT, ("messages",),
          {"messages": HI}),
    Route("get", "/", "Name and version", ("name", "version", "status")),
    Route("get", "/health", "Whether the daemon lives", ("status", "state")),
    Route("get", "/ready", "Whether the model answers", ("ready", "state")),
    Route("get", "/status", "Everything that is known", ("version", "requests", "engine")),
    Route("get", "/metrics", "Metrics for Prometheus", "text/plain"),
    Route("get", "/openapi.json", "This document", ("openapi", "paths")),
    Route("get", "/admin/events", "What happens, as events", "text/event-stream"),
    Route("post", "/admin/load", "Load the model", ("state",), {"wait": FLAG}, (), {"wait": True}),
    Route("post", "/admin/unload", "Unload the model", ("state",), {"wait": FLAG}, (), {"wait": True}),
    Route("post", "/admin/reload", "Read the configuration again", ("live", "model", "refused", "error")),
    Route("post", "/admin/cancel/{id}", "End a request", ("id", "cancelled"), {}, names=("id",)),
)


def document() -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.0.3",
        "info": {"title": "q27app", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(route: Route) -> Schema:
    operation: Schema = {
        "summary": route.summary,
        "responses": {"200": _reply(route), "default": {"description": "An error in the dialect of the route",
                                                        "content": {"application/json": {"schema": OBJECT}}}},
    }
    if route.names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in route.names
        ]
    if route.fields is not None:
        schema: Schema = {"type": "object", "properties": route.fields}
        if route.needs:
            schema["required"] = list(route.needs)
        content = {"application/json": {"schema": schema, "example": route.example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _reply(route: Route) -> Schema:
    if isinstance(route.reply, str):
        return {"description": route.summary, "content": {route.reply: {"schema": TEXT}}}
    schema = {"type": "object", "required": list(route.reply)}
    content: Schema = {"application/json": {"schema": schema}}
    if route.fields is not None and "stream" in route.fields and route.path != "/v1/messages/count_tokens":
        content["text/event-stream"] = {"schema": TEXT}
    return {"description": route.summary, "content": content}
