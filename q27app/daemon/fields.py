"""Tolerant readers of a request body, and the fields that several dialects share.

For numbers, booleans and strings: missing, null and wrong-typed all mean "absent" (None). What cannot be honoured and
would change the answer is refused with a `BadRequest` that names the field; unknown fields are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from q27app.chat.types import Sampling, Thinking
from q27app.errors import BadRequest

INT_LIMIT = 2**31 - 1
MAX_DEPTH = 256
MAX_MESSAGES = 20_000
MAX_TOOLS = 1_024
MAX_STOPS = 16
MAX_STOP_CHARS = 65_536
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_CHARS = 65_536
MAX_PARAMETERS_CHARS = 262_144
"""Of one tool. Forms that are enforced are held to MAX_SCHEMA_CHARS."""

_LOW, _HIGH = ("low", "minimal"), ("high", "xhigh", "max", "ultracode", "extreme")
_OFF = ("none", "off", "disabled")

Object = Mapping[str, Any]


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; lone surrogates become U+FFFD. Raises BadRequest if it is none or too deep."""
    try:
        body = _decode_json(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the request body is not valid JSON.", "Send one JSON object in UTF-8.") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the request body is a JSON {kind_of(body)}, expected an object.")
    _check_depth(body)
    return body


def _decode_json(raw: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        text = raw.decode("utf-8-sig", "replace")   # some shells put a mark in front
        return _without_surrogates(json.loads(text, parse_constant=_refuse, parse_float=_finite))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise BadRequest(f"the request body is nested more than {MAX_DEPTH} levels deep.")


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "value")


def number(body: Object, key: str) -> float | None:
    """A finite number, or None."""
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def integer(body: Object, key: str) -> int | None:
    """A number cut to a whole one within 32 bits, or None."""
    value = number(body, key)
    return None if value is None else max(-INT_LIMIT - 1, min(INT_LIMIT, int(value)))


def boolean(body: Object, key: str) -> bool | None:
    """True, False or None."""
    value = body.get(key)
    return value if isinstance(value, bool) else None


def string(body: Object, key: str) -> str | None:
    """A string, or None."""
    value = body.get(key)
    return value if isinstance(value, str) else None


def mapping(body: Object, key: str) -> Object:
    """An object, or an empty one."""
    value = body.get(key)
    return value if isinstance(value, dict) else {}


def messages_of(body: Object) -> list[Any]:
    """`messages` as a non-empty list; raises BadRequest otherwise."""
    messages = body.get("messages")
    if messages is None:
        raise BadRequest("messages: Field required", param="messages")
    if not isinstance(messages, list):
        raise BadRequest(f"messages: expected an array, found {kind_of(messages)}.", param="messages")
    if not messages:
        raise BadRequest("messages: at least one message is required.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages: {len(messages)} entries, at most {MAX_MESSAGES} are allowed.", param="messages")
    return messages


def declared_tools(body: Object) -> list[Any]:
    """`tools` as a list, () if absent; bounded."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return []
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools: {len(tools)} entries, at most {MAX_TOOLS} are allowed.", param="tools")
    return tools


def stop_strings(body: Object, key: str) -> tuple[str, ...]:
    """One string or a list of them; empty ones are dropped. Raises BadRequest over the limits."""
    value = body.get(key)
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    stops = tuple(item for item in found if isinstance(item, str) and item)
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise BadRequest(
            f"{key}: {len(stops)} strings of {sum(map(len, stops))} characters; at most {MAX_STOPS} strings "
            f"of {MAX_STOP_CHARS} characters in all are allowed.",
            param=key,
        )
    return stops


def sampling(body: Object, max_tokens: int | None, logprobs: int | None = None) -> Sampling:
    """The sampler's fields. temperature <= 0 is greedy, a top_p outside (0, 1] is off."""
    temperature = number(body, "temperature")
    top_p, min_p, top_k = number(body, "top_p"), number(body, "min_p"), integer(body, "top_k")
    seed = number(body, "seed")
    return Sampling(
        temperature=None if temperature is None else min(100.0, max(0.0, temperature)),
        top_k=None if top_k is None else max(0, top_k),
        top_p=None if top_p is None else top_p if 0 < top_p <= 1 else 1.0,
        min_p=None if min_p is None else min(1.0, max(0.0, min_p)),
        presence_penalty=_penalty(body, "presence_penalty"),
        frequency_penalty=_penalty(body, "frequency_penalty"),
        seed=None if seed is None else int(body["seed"]) % 2**64,
        max_tokens=None if max_tokens is None else max(0, max_tokens),
        logprobs=logprobs,
        ignore_eos=boolean(body, "ignore_eos") or False,
    )


def _penalty(body: Object, key: str) -> float | None:
    value = number(body, key)
    return None if value is None else min(100.0, max(-100.0, value))


def refuse_unsupported(body: Object) -> None:
    """Fields that would change the answer and that nothing here implements; raises BadRequest naming the field."""
    best_of = integer(body, "best_of")
    if best_of is not None and best_of != num_choices(body):
        raise BadRequest(f"best_of: {best_of} is not supported, only the number of answers.", param="best_of")
    if mapping(body, "logit_bias"):
        raise BadRequest("logit_bias: not supported.", "Leave it out.", "logit_bias")


def num_choices(body: Object) -> int:
    """`n`, how many answers are wanted. Raises BadRequest outside its bounds."""
    count = integer(body, "n")
    if count is not None and not 1 <= count <= MAX_CHOICES:
        raise BadRequest(f"n: {count} answers to one request, expected 1 to {MAX_CHOICES}.", param="n")
    return 1 if count is None else count


def answer_schema(form: Any, where: str) -> dict[str, Any] | None:
    """The schema that a response_format (OpenAI), text.format (Responses) or output_format (Anthropic) asks for.

    None for free text. Raises BadRequest for other kinds, and for a schema over the limits.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = mapping(form, "json_schema").get("schema", form.get("schema"))
        if not isinstance(schema, dict):
            raise BadRequest(f"{where}: json_schema needs a schema, an object.", param=where)
        check_schema(schema, where, MAX_SCHEMA_CHARS)
        return schema
    if form is None or kind == "text":
        return None
    raise BadRequest(
        f"{where}: type {str(kind)[:40]!r} is not supported, expected text, json_object or json_schema.", param=where
    )


def check_schema(schema: Any, where: str, max_chars: int = MAX_PARAMETERS_CHARS) -> None:
    """Raises BadRequest for a schema that is too large or too deep."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise BadRequest(f"{where}: the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=where)
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    size = len(json.dumps(schema))
    if size > max_chars:
        raise BadRequest(f"{where}: the schema has {size} characters, at most {max_chars} are allowed.", param=where)


def thinking(body: Object) -> Thinking:
    """Every client spelling of "think or not, how hard, how long" as one; a later spelling wins.

    enable_thinking, thinking_token_budget; the same in chat_template_kwargs; thinking.{type, budget_tokens};
    reasoning.* and output_config.*; reasoning_effort.
    """
    enabled, budget = boolean(body, "enable_thinking"), integer(body, "thinking_token_budget")
    kwargs, block = mapping(body, "chat_template_kwargs"), mapping(body, "thinking")
    enabled = _first(boolean(kwargs, "enable_thinking"), enabled)
    budget = _first(integer(kwargs, "thinking_budget"), budget)
    if block.get("type") in ("enabled", "disabled"):
        enabled = block["type"] == "enabled"
    budget = _first(integer(block, "budget_tokens"), budget)
    for group in (mapping(body, "reasoning"), mapping(body, "output_config")):
        disabled = boolean(group, "disabled")
        enabled = _first(None if disabled is None else not disabled, boolean(group, "enabled"), enabled)
        budget = _first(integer(group, "output_budget_tokens"), integer(group, "budget_tokens"), budget)
    budget = _first(integer(body, "budget_tokens"), budget)
    effort = None
    for group in (body, kwargs, mapping(body, "reasoning"), mapping(body, "output_config")):
        for key in ("reasoning_effort", "effort", "output_effort"):
            word = string(group, key) if key != "effort" or group is not body else None
            effort = _first(word, effort)
    word = (effort or "").lower()
    if word in _OFF:
        enabled = False
    level = "low" if word in _LOW else "xhigh" if word in _HIGH else "medium" if word == "medium" else None
    return Thinking(enabled, level, None if budget is None else max(-1, budget))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def unseen(kind: Any) -> str:
    """What stands for a part of a tool's result that is not text. What a person sent is refused instead: they can send something else,
    while a refused result would end an agent's session."""
    return "[an image that this model cannot see]" if "image" in str(kind) else "[a file that this model cannot read]"


def not_text(kind: Any, where: str) -> BadRequest:
    """The refusal of what a person sent."""
    return BadRequest(f"{where}: {str(kind)[:40]} content is not supported; this model reads text only.",
                      "Go back to before it or begin a new conversation, as the whole of one is sent with each turn.", where)


def content_text(content: Any, where: str, text_kinds: tuple[str, ...], is_result: bool = False) -> str:
    """A string, or the text of its parts; "" for anything else. Raises BadRequest for parts that are not text, unless it is the result
    of a tool."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in text_kinds:
            texts.append(string(part, "text") or "")
        elif kind == "refusal":
            texts.append(string(part, "refusal") or "")
        elif isinstance(part, dict) and is_result:
            texts.append(unseen(kind))
        elif isinstance(part, dict):
            raise not_text(kind, f"{where}[{index}]")
    return "".join(texts)
