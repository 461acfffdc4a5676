"""The pure parts: stop strings, merging, tolerant readers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q27app.chat.types import Delta, Thinking, ToolCall
from q27app.daemon import fields
from q27app.daemon.answer import collect, merged
from q27app.errors import BadRequest


async def test_neighbours_of_one_kind_are_merged_and_calls_stay_apart():
    first, second = ToolCall("1", "f", {}), ToolCall("2", "f", {})
    deltas = [
        Delta("text", "a"),
        Delta("text", "b"),
        Delta("reasoning", "c"),
        Delta("tool_start", call=first),
        Delta("tool_args", "{", call=first),
        Delta("tool_args", "}", call=first),
        Delta("tool_end", call=first),
        Delta("tool_start", call=second),
        Delta("tool_end", call=second),
        Delta("finish", finish="tool_calls"),
    ]
    assert [delta.kind for delta in merged(deltas)] == [
        "text",
        "reasoning",
        "tool_start",
        "tool_args",
        "tool_end",
        "tool_start",
        "tool_end",
        "finish",
    ]

    async def iterate():
        for delta in deltas:
            yield delta

    answer = await collect(iterate())
    assert (answer.text, answer.reasoning, answer.finish) == ("ab", "c", "tool_calls")
    assert [call.arguments for call in answer.calls] == ["{}", "{}"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, Thinking()),
        ({"enable_thinking": True, "thinking_token_budget": 5}, Thinking(True, None, 5)),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, Thinking(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Thinking(True, None, 1024)),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, Thinking(None, "xhigh")),
        ({"reasoning_effort": "minimal"}, Thinking(None, "low")),
        ({"reasoning_effort": "none"}, Thinking(False)),
        ({"reasoning": {"effort": "medium", "enabled": True}}, Thinking(True, "medium")),
        ({"budget_tokens": -7}, Thinking(None, None, -1)),
        ({"enable_thinking": "yes", "thinking": "hard", "reasoning_effort": 3, "budget_tokens": None}, Thinking()),
    ],
)
def test_every_spelling_of_thinking_is_understood(body, expected):
    assert fields.thinking(body) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8192.0, 8192),
        (10**30, 2**31 - 1),
        (-(10**30), -(2**31)),
        ("8", None),
        (None, None),
        (True, None),
        ([], None),
        (10**400, None),
        (7.9, 7),
    ],
)
def test_integers_are_read_tolerantly(value, expected):
    assert fields.integer({"x": value}, "x") == expected


@given(
    st.dictionaries(
        st.sampled_from(
            ["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "ignore_eos"]
        ),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.sampled_from(["", "1", "hot"]),
            st.lists(st.integers(), max_size=2),
        ),
    )
)
def test_no_sampling_field_is_ever_an_error(body):
    sampling = fields.sampling(body, None)
    assert sampling.temperature is None or 0 <= sampling.temperature <= 100
    assert sampling.top_p is None or 0 < sampling.top_p <= 1
    assert sampling.seed is None or 0 <= sampling.seed < 2**64


def test_lone_surrogates_become_replacement_characters():
    assert fields.decode_body(b'{"a\\ud800": ["\\udfff x", "\\ud83d\\ude00"]}') == {
        "a\ufffd": ["\ufffd x", "\U0001f600"]
    }


def test_depth_is_bounded_below_the_recursion_limit():
    assert fields.decode_body(b'{"a":' + b"[" * 254 + b"]" * 254 + b"}")
    with pytest.raises(BadRequest, match="256 levels"):
        fields.decode_body(b'{"a":' + b"[" * 256 + b"]" * 256 + b"}")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.booleans())
def test_tokens_read_in_runs_give_what_single_ones_give(tokenizer, lengths, starts_reasoning):
    from q27app.chat.stream import DeltaParser
    from q27app.daemon.answer import Translation
    from q27app.engine.request import FinishReason, TokenEvent

    text = 'why {"a": 1}</think>\n\nso <b> {"name": "x <think>" 1} é <think>again</think>done'
    tokens = tokenizer.encode(text, control=True)

    def outcome(runs: list[int]) -> tuple:
        translation = Translation(tokenizer, DeltaParser((), None, "reasoning" if starts_reasoning else "text"))
        deltas, at = [], 0
        for length in [*runs, len(tokens)]:
            run, at = tuple(tokens[at : at + length]), at + length
            deltas += translation.feed(TokenEvent("a", run, tuple(token % 5 == 0 for token in run)))
        deltas += translation.finish(TokenEvent("a", finish=FinishReason.STOP), 1)
        kinds = [(delta.kind, delta.text) for delta in merged(deltas)]
        return kinds, translation.num_generated, translation.num_reasoning

    assert outcome(lengths) == outcome([1] * len(tokens))
