"""Drills about parameters: what they ask has one answer among the tools that are declared."""

from __future__ import annotations

import json
import random

import pytest

from tests.bench.training_rooms import training_module


@pytest.fixture(scope="module")
def drills():
    with training_module("curriculum.tool_drills") as module:
        yield module


def _takes(example):
    return {tool["function"]["name"]: set(tool["function"]["parameters"]["properties"]) for tool in example.tools}


def test_whose_a_parameter_is_has_one_answer(drills):
    rng, asked = random.Random(5), 0
    for _ in range(60):
        example = drills.whose(rng)
        takes = _takes(example)
        for question, answer in zip(example.steps[::2], example.steps[1::2], strict=True):
            if answer.text.startswith("It is "):
                name = answer.text.removeprefix("It is ").removesuffix(".")
                said = [key for key in takes[name] if key in question.text]
                assert any(sum(key in keys for keys in takes.values()) == 1 for key in said), (question.text, takes)
                asked += 1
            else:
                name = next(name for name in takes if answer.text.startswith(f"{name} takes "))
                told = answer.text.removeprefix(f"{name} takes ").removesuffix(".").replace(" and ", ", ").split(", ")
                assert set(told) == takes[name]
    assert asked > 100


def test_a_keyed_request_names_a_parameter_of_its_tool_alone(drills):
    rng, told, total = random.Random(6), 0, 0
    for _ in range(80):
        example = drills.keyed_drill(rng)
        takes = _takes(example)
        for request, call in zip(example.steps, example.steps[1:], strict=False):
            if request.role == "user":
                (found,) = call.calls
                others = set().union(*(keys for name, keys in takes.items() if name != found["name"]))
                total += 1
                told += any(key.replace("_", " ") in request.text for key in set(found["arguments"]) - others)
                json.dumps(found)
    assert total > 120
    assert told > 0.9 * total  # the rest are tools whose every given name another one has, and values that tell by themselves
