"""Calls that the model began and never ended: they do not run, and an answer of nothing else is not silent."""

from __future__ import annotations

import pytest

from tests.chat.test_stream import READ, SHELL, parse, parsed


def test_a_started_call_is_recorded_and_not_shown():
    found, parser = parse("Go.\n" + READ[:-30])
    assert found == [("text", "Go.\n")]
    assert parser.is_unfinished and len(parser.missed) == 1 and parser.finish_reason("stop") == "stop"


STARTED = {
    "wrapped": READ[:-30],
    "wrapped JSON": '<tool_call>\n{"name":"Shell","arguments":{"cmd":"x',
    "bare": '<function=Shell>\n<parameter=cmd>\nls',
}


@pytest.mark.parametrize("name", STARTED)
def test_an_answer_of_a_started_call_alone_is_not_silent(name):
    text = STARTED[name]
    found, parser = parse(text)
    assert found == [("text", text)]
    assert parser.is_unfinished and parser.num_calls == 0 and parser.finish_reason("stop") == "stop"
    assert parsed(f"<think>why</think>\n\n{text}") == [("reasoning", "why"), ("text", text)]
    assert parse(text, is_cut=True)[0] == []
    assert parsed(f"{SHELL}\n{text}") == [("Shell", {"cmd": "ls"})]
