"""Requests of the held-out sets tell which of the declared tools they mean, by words that the others lack."""

from __future__ import annotations

import gzip
import json

import pytest

from q27app.bench.demo_eval import cases_path
from tests.bench.training_rooms import training_module


@pytest.fixture(scope="module")
def rule():
    with training_module("curriculum.held_out") as module:
        yield module


def declared(name: str, description: str, *keys: str) -> dict:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {"properties": properties}}}


def asked(rule, text: str, called: str, *tools: dict):
    from curriculum.example import Example, Step

    return rule.is_told(Example("tool_calls", (Step("user", text), Step("assistant", "", None, ({"name": called, "arguments": {}},))), {}, tools=tools))


@pytest.mark.parametrize("text, told", [
    ("Freeze one pipeline.", True), ("Freeze it.", False), ("Please warm the pipelines.", True), ("quota is 5", True), ("Do something.", False),
])
def test_a_request_needs_words_that_others_lack(rule, text, told):
    tools = declared("pipeline_freeze", "Freezes a pipeline", "quota"), declared("freeze_voucher", "Freezes a voucher", "format")
    assert asked(rule, text, "pipeline_freeze", *tools) is told


def test_two_tools_of_one_name_are_never_told_apart(rule):
    tools = declared("freeze_voucher", "Freezes a voucher"), declared("voucherFreeze", "Freezes the voucher")
    assert asked(rule, "Freeze the voucher.", "freeze_voucher", *tools) is False


def test_the_sets_keep_the_rule(rule):
    from curriculum.example import Example, Step

    count = 0
    for line in map(json.loads, gzip.decompress(cases_path().read_bytes()).splitlines()):
        if line["task"] in ("tool_calls", "tool_results"):
            messages = [*line["messages"], line["expected"]]
            steps = tuple(Step(entry["role"], entry["text"], None, tuple(entry.get("calls", ()))) for entry in messages)
            assert rule.is_told(Example(line["task"], steps, {}, tools=tuple(line["tools"]))), messages
            count += 1
    assert count > 300
