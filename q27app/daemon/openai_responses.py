"""The OpenAI Responses dialect: POST /v1/responses, as Codex speaks it. Stateless: every request carries its history.

responses_tools.py and responses_input.py read a request, responses_output.py writes the answer.
"""

from __future__ import annotations

from q27app.chat.types import ChatRequest
from q27app.daemon import fields
from q27app.daemon.responses_input import messages_of
from q27app.daemon.responses_output import events, render
from q27app.daemon.responses_tools import tool_choice_of, tools_of
from q27app.errors import BadRequest

__all__ = ["NAME", "events", "parse", "render"]

NAME = "responses"
_LOGPROBS = "message.output_text.logprobs"
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


def parse(body: fields.Object) -> ChatRequest:
    """The request in a body. Raises BadRequest naming the field. Unknown fields are ignored."""
    for key in _STATEFUL:
        if body.get(key):
            raise BadRequest(
                f"{key}: not supported, nothing is kept between requests.", "Send the whole input each time.", key
            )
    tools = tools_of(body)
    return ChatRequest(
        messages=messages_of(body, tools),
        tools=tools,
        tool_choice=tool_choice_of(body, tools),
        thinking=fields.thinking(body),
        sampling=fields.sampling(body, fields.integer(body, "max_output_tokens"), _logprobs(body)),
        stop=fields.stop_strings(body, "stop"),
        stream=fields.boolean(body, "stream") or False,
        include_usage=True,
        model=fields.string(body, "model") or "",
        answer_schema=fields.answer_schema(fields.mapping(body, "text").get("format"), "text.format"),
        dialect=NAME,
    )


def _logprobs(body: fields.Object) -> int | None:
    include = body.get("include")
    if not isinstance(include, list) or _LOGPROBS not in include:
        return None
    count = fields.integer(body, "top_logprobs") or 0
    if not 0 <= count <= fields.MAX_LOGPROBS:
        raise BadRequest(f"top_logprobs: {count} is outside 0 to {fields.MAX_LOGPROBS}.", param="top_logprobs")
    return count
