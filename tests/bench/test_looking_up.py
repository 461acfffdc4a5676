"""Lines that look a tool up: they are written where a parameter's name alone tells it, and end at the tool that is called."""

from __future__ import annotations

import random
import re

import pytest

from tests.bench.training_rooms import training_module


@pytest.fixture(scope="module")
def room():
    with training_module("curriculum.looking_up") as module:
        yield module


def declare(name, about, *keys):
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (declare("wind_clock", "Winds the clock", "hours", "force"), declare("ring", "Rings"),
         declare("seat_people", "Gives places to visitors", "visitors_total", "at", "when"))
CALL = {"name": "seat_people", "arguments": {"visitors_total": 8, "at": "the wall", "when": "noon"}}


def test_the_lines_go_down_to_the_tool_that_has_the_word(room):
    lines = "Which tool takes visitors_total?\nwind_clock: force, hours\nring: nothing\nseat_people: at, visitors_total"
    assert room.looked_up("Squeeze in by the wall: 8 visitors_total, noon", TOOLS, CALL) == lines
    assert room.looked_up("Squeeze in by the wall: 8 visitors total, noon", TOOLS, CALL) == lines
    assert room.looked_up("Squeeze in when noon: 8", TOOLS, CALL).endswith("seat_people: at, visitors_total, when")


@pytest.mark.parametrize("text", ["Seat 8 visitors_total at noon.", "8 visitors_total: seat_people", "A place for 8 visitors_total at noon"])
def test_a_tool_that_its_own_words_tell_is_called_at_once(room, text):
    assert room.looked_up(text, TOOLS, CALL) == ""


def test_nothing_is_looked_up_for_one_tool_or_without_a_parameter_or_for_a_tool_known_by_heart(room):
    assert room.looked_up("8 visitors_total by noon", TOOLS[2:], CALL) == ""
    assert room.looked_up("Squeeze 8 in by noon", TOOLS, CALL) == ""
    known = declare("get_weather", "Current weather of a city", "city")
    assert room.looked_up("city Oslo?", (*TOOLS, known), {"name": "get_weather", "arguments": {"city": "Oslo"}}) == ""


def test_a_word_that_another_tool_has_too_and_a_word_within_a_word_tell_nothing(room):
    tools = (*TOOLS, declare("other", "Does more", "when"))
    assert "takes at?" in room.looked_up("Squeeze in when at", tools, CALL)
    assert room.looked_up("Squeeze in whenever, flat", TOOLS, CALL) == ""


def test_words_of_the_values_do_not_tell_the_tool(room):
    call = CALL | {"arguments": CALL["arguments"] | {"at": "a seat"}}
    assert room.looked_up("Squeeze in at a seat, 8 visitors_total, noon", TOOLS, call) != ""


def test_lines_of_drills_follow_from_their_declarations(room):
    rng, looked = random.Random(3), 0
    for _ in range(60):
        drill = room.lookup_drill(rng)
        takes = {tool["function"]["name"]: sorted(tool["function"]["parameters"]["properties"]) for tool in drill.tools}
        for step in room.with_looking_up(drill.steps, drill.tools):
            if step.calls and step.text:
                first, *lines = step.text.split("\n")
                key = re.fullmatch(r"Which tool takes (.+)\?", first)[1]
                assert [line.split(": ")[0] for line in lines] == list(takes)[:len(lines)]
                assert lines[-1].split(": ")[0] == step.calls[0]["name"] and lines[-1].endswith(key) and key in step.calls[0]["arguments"]
                assert [name for name, keys in takes.items() if key in keys] == [step.calls[0]["name"]]
                looked += 1
    assert looked > 80


def test_lines_go_into_the_thought_where_there_is_one(room):
    from curriculum.example import Step

    steps = (Step("user", "Squeeze in when noon"), Step("assistant", "", "I need seat_people for this.", (CALL,)))
    found = room.with_looking_up(steps, TOOLS)[1]
    assert found.text == "" and found.reasoning.startswith("Which tool takes when?\n") and found.reasoning.endswith("I need seat_people for this.")


def test_the_whole_mixture_has_the_lines():
    with training_module("curriculum.mix") as mix:
        rng = random.Random(4)
        steps = [step for _ in range(120) for step in mix.conversation(rng, 512).steps if step.calls]
        assert sum("Which tool takes" in step.text for step in steps) > len(steps) / 8
