"""Which rendering a checkpoint gets. The renderers are in template_official, template_json and template_jinja.

    name        renderer
    official    Qwen's own template, native; the default where the checkpoint carries one that equals it
    jinja       the template that the checkpoint carries, in a sandbox; the default for any other
    json, xml   ours, for checkpoints that carry none; xml for 3.8, json otherwise
    auto        the default as above
    qwen3.5, qwen3.8   one official rendering by name, whatever the checkpoint carries

A carried template is recognised by its sha256. One that is unknown is recognised by what it does: it is run over a few
conversations that touch every branch, and if its text equals a native renderer's each time, that renderer is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from q27app.chat.prompt import Rendered, Template
from q27app.chat.template_jinja import JinjaTemplate
from q27app.chat.template_json import JsonTemplate
from q27app.chat.template_official import GENERATIONS, OfficialTemplate
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import (
    ChatRequest, Message, ReasoningPart, TextPart, Tool, ToolCall, ToolCallPart, ToolResultPart,
)
from q27app.errors import ModelError, Q27Error, UsageError

__all__ = ["NAMES", "Rendered", "Template", "open_template", "recognize"]

NAMES = ("auto", "official", "jinja", "json", "xml", *GENERATIONS)

KNOWN_SOURCES = {
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": "qwen3.5",
    "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041": "qwen3.8",
}
"""sha256 of a template's text without blanks at its end -> generation."""


def open_template(metadata: Mapping[str, Any], tokenizer: Tokenizer, name: str = "auto") -> Template:
    """The renderer for a checkpoint. metadata: `tokenizer.chat_template` and `general.name` are read.

    Raises UsageError for an unknown name, ModelError where the checkpoint lacks what the name asks for.
    """
    if name not in NAMES:
        raise UsageError(f"chat template {name!r} is unknown, expected one of {', '.join(NAMES)}.")
    is_38 = is_38_name(str(metadata.get("general.name", "")))
    if name in GENERATIONS:
        return OfficialTemplate(tokenizer, name)
    if name in ("json", "xml"):
        return JsonTemplate(tokenizer, name, is_38)
    source = metadata.get("tokenizer.chat_template")
    source = source if isinstance(source, str) and source.strip() else None
    if source is None and name == "auto":
        return JsonTemplate(tokenizer, "xml" if is_38 else "json", is_38)
    if source is None:
        raise ModelError(f"the checkpoint carries no chat template, so {name!r} cannot be used.", "Use json or xml.")
    generation = recognize(source, tokenizer) if name != "jinja" else None
    if generation is not None:
        return OfficialTemplate(tokenizer, generation)
    if name == "official":
        raise ModelError("the checkpoint's chat template equals no native rendering.", "Use jinja, qwen3.5 or qwen3.8.")
    return JinjaTemplate(tokenizer, source, _dialect(source, tokenizer))


def is_38_name(name: str) -> bool:
    """True for a model that calls itself Qwen3.8 in any spelling."""
    return "qwen38" in "".join(char for char in name.lower() if char.isascii() and char.isalnum())


def recognize(source: str, tokenizer: Tokenizer) -> str | None:
    """The generation whose native renderer writes what this template writes, or None."""
    known = KNOWN_SOURCES.get(hashlib.sha256(source.rstrip().encode("utf-8", "replace")).hexdigest())
    if known is not None:
        return known
    carried = JinjaTemplate(tokenizer, source)
    for generation in GENERATIONS:
        if _writes_the_same(carried, OfficialTemplate(tokenizer, generation)):
            return generation
    return None


def _writes_the_same(carried: JinjaTemplate, native: Template) -> bool:
    try:
        return all(
            carried.plain_text(request, thinking, effort) == native.render(request, thinking, effort).text
            for request in _trials()
            for thinking, effort in ((True, None), (False, None), (True, "low"), (True, "medium"))
        )
    except Q27Error:
        return False


def _dialect(source: str, tokenizer: Tokenizer) -> str:
    """How a template writes a tool call of the history."""
    try:
        text = JinjaTemplate(tokenizer, source).render(_trials()[0], False).text
    except Q27Error:
        return "json"
    return "xml" if "<parameter=" in text else "json"


def _trials() -> list[ChatRequest]:
    """Conversations that touch every branch of the official templates."""

    def message(role: Any, *parts: Any) -> Message:
        return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))

    parameters = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    function = {"name": "look", "description": "Gets <b>it</b> & é", "parameters": parameters}
    tool = Tool("look", function["description"], parameters, {"type": "function", "function": function})
    arguments = {"z": "one\ntwo", "a": 1, "b": True, "n": None, "f": 1.5, "list": [1, "é<"], "map": {"k": None}}
    call = ToolCallPart(ToolCall("1", "look", arguments))
    empty = ToolCallPart(ToolCall("2", "look", {}))
    history = (
        message("user", "  first \n"),
        message("assistant", ReasoningPart(" why \n"), "\nanswer ", call, empty),
        message("tool", ToolResultPart(" out 1 ")),
        message("tool", ToolResultPart("")),
        message("assistant", ReasoningPart("more"), call),
        message("tool", ToolResultPart("out 2")),
        message("assistant", "<think>\ninline\n</think>\n\ndone"),
        message("user", "<tool_response>\nby hand\n</tool_response>"),
    )
    follow_up = (*history, message("assistant", "plain"), message("user", "second"))
    return [
        ChatRequest(messages=(message("system", " rules "), *follow_up), tools=(tool, tool)),
        ChatRequest(messages=history, tools=(tool,)),
        ChatRequest(messages=(message("system", ""), *history)),
        ChatRequest(messages=(message("system", "rules"), message("user", "hi"))),
        ChatRequest(messages=follow_up),
        ChatRequest(messages=(message("user", ""),)),
    ]
