"""No body, however odd, is more than a refusal: the three parsers against made-up JSON."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.chat.types import ChatRequest, ToolResultPart
from q27app.daemon import anthropic, openai_chat, openai_completions
from q27app.errors import BadRequest

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
WORDS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "user",
        "assistant",
        "system",
        "tool",
        "function",
        "name",
        "arguments",
        "input",
        "tool_use",
        "tool_result",
        "thinking",
        "image",
        "tool_calls",
        "parameters",
        "input_schema",
        "budget_tokens",
        "mode",
        "tools",
        "allowed_tools",
        "any",
        "auto",
        "required",
        "enabled",
        "{}",
        "id",
        "description",
        "is_error",
    ]
)
JSON = st.recursive(
    st.one_of(SCALARS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=3)), inner, max_size=4)
    ),
    max_leaves=20,
)
KEYS = st.sampled_from(
    [
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "stop",
        "stop_sequences",
        "stream",
        "stream_options",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "prompt",
        "parallel_tool_calls",
        "response_format",
        "reasoning",
        "output_config",
        "chat_template_kwargs",
        "model",
        "metadata",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(WORDS, SCALARS),
            "content": JSON,
            "tool_calls": JSON,
            "tool_call_id": SCALARS,
            "reasoning_content": JSON,
        },
    ),
    max_size=3,
)
BODIES = st.builds(
    lambda body, messages: {**body, "messages": messages},
    st.dictionaries(KEYS, JSON, max_size=6),
    st.one_of(MESSAGES, JSON),
)


@pytest.mark.parametrize("dialect", [anthropic, openai_chat, openai_completions])
def test_any_body_is_a_request_or_a_refusal(dialect):
    @settings(max_examples=60, deadline=None)
    @given(BODIES)
    def check(body):
        try:
            request = dialect.parse(body)
        except BadRequest as error:
            assert error.message and error.param
        else:
            assert isinstance(request, ChatRequest) and request.dialect == dialect.NAME
            assert all(
                isinstance(part, object) and message.role in ("system", "user", "assistant", "tool")
                for message in request.messages
                for part in message.parts
            )

    check()


def test_order_of_parts_is_kept():
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                    {"type": "text", "text": "two"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}],
                    },
                ],
            }
        ]
    }
    (message,) = anthropic.parse(body).messages
    assert [part.text for part in message.parts] == ["one", "two", "three"]
    assert isinstance(message.parts[2], ToolResultPart) and message.parts[2].call_id == "t2"


def test_broken_arguments_of_the_history_are_kept_as_text():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    (part,) = openai_chat.parse(body).messages[0].parts
    assert part.call.arguments == '{"a": '
