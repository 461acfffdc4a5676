"""The bundled model answers what it must, and the bench counts right answers as its table says."""

from __future__ import annotations

import json
import time

import pytest

from q27app.bench.demo_eval import (
    Answer, cases_path, is_right, load_cases, read_answer, scores, table,
)
from q27app.bench.demo_probe import acceptance, answered, bits_per_byte
from q27app.bench.feeder import Feeder
from q27app.chat.template import open_template
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import ChatRequest, Message, TextPart
from q27app.cli import run
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig
from q27app.errors import UsageError
from q27app.paths import demo_model
from q27app.weights.container import open_container

CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}


@pytest.fixture(scope="module")
def parts():
    with open_container(demo_model()) as container:
        metadata = dict(container.metadata)
    tokenizer = Tokenizer.from_metadata(metadata)
    return tokenizer, open_template(metadata, tokenizer)


@pytest.fixture(scope="module")
def engine():
    running = Engine(EngineConfig(demo_model(), backend="numpy", context=2048))
    running.start()
    deadline = time.monotonic() + 300
    while running.status().state != "ready":
        assert time.monotonic() < deadline, running.status()
        time.sleep(0.02)
    yield running
    running.close()


@pytest.mark.parametrize("check, answer, right", [
    ({"kind": "contains", "values": ["Port", "8027"]}, Answer("The port is 8027.", ()), True),
    ({"kind": "contains", "values": ["8027"]}, Answer("The port is 8026.", ()), False),
    ({"kind": "contains", "values": ["8027"]}, Answer("8027", (CALL,)), False),
    ({"kind": "exact", "value": "a b"}, Answer(" a b\n", ()), True),
    ({"kind": "exact", "value": "a b"}, Answer("a  b", ()), False),
    ({"kind": "number", "value": -3}, Answer("4 - 7 = -3.", ()), True),
    ({"kind": "number", "value": 3}, Answer("3 + 4 = 7.", ()), False),
    ({"kind": "number", "value": 3}, Answer("no", ()), False),
    ({"kind": "json", "value": {"a": 1}}, Answer('{"a": 1}', ()), True),
    ({"kind": "json", "value": {"a": 1}}, Answer('{"a": 1', ()), False),
    ({"kind": "calls", "calls": [CALL]}, Answer("", (CALL,)), True),
    ({"kind": "calls", "calls": [CALL]}, Answer("", (CALL, CALL)), False),
    ({"kind": "calls", "calls": [CALL]}, Answer("", ({**CALL, "arguments": {"city": "Rome"}},)), False),
])
def test_an_answer_is_right_as_its_check_says(check, answer, right):
    assert is_right(check, answer) is right


def test_the_sets_hold_both_splits_of_every_task_and_a_third_of_two():
    cases = load_cases(2, splits=("held", "new"))
    assert len(cases) == 4 * len({case.task for case in cases})
    assert {case.task for case in load_cases(1, splits=("blind",))} == {"tool_calls", "recall_4k"}
    assert len(load_cases(None, ("tool_calls",))) == 300
    assert cases_path().stat().st_size < 700_000


def test_an_unknown_task_is_refused():
    with pytest.raises(UsageError, match="swimming"):
        load_cases(1, ("swimming",))
    with pytest.raises(UsageError, match="seen"):
        load_cases(1, (), ("seen",))


@pytest.mark.parametrize("index", range(3))
def test_what_the_sets_expect_passes_its_own_check(parts, index):
    tokenizer, template = parts
    for task in ("facts", "json", "tool_calls", "tool_results", "arithmetic"):
        case = load_cases(3, (task,))[index]
        prompt = template.render(case.request, case.thinking)
        whole = template.render(answered(case).request, case.thinking)
        ids = whole.tokens[len(prompt.tokens):whole.stable_len]
        ids = [token for token in ids if token not in tokenizer.eos_ids]
        assert is_right(case.check, read_answer(ids, case, prompt.channel, template.dialect, tokenizer)), case


@pytest.mark.parametrize("question, expected", [
    ("What are you, and does everything work?", "the small demo model that comes with q27app, and everything works."),
    ("Which port does the daemon use?", "8027"),
    ("What is 27 + 15?", "27 + 15 = 42."),
])
def test_the_demo_answers_fixed_questions(engine, parts, question, expected):
    case = load_cases(1, ("facts",))[0]
    request = ChatRequest(messages=(Message("user", (TextPart(question),)),))
    asked = [type(case)("fixed", "held", request, False, {"kind": "contains", "values": [expected]}, {})]
    assert scores(engine, *parts, asked) == {"fixed": {"held": 1.0}}


def test_held_out_calls_and_facts_are_right(engine, parts):
    cases = [case for case in load_cases(2, ("facts", "tool_calls", "arithmetic")) if case.split == "held"]
    found = scores(engine, *parts, cases)
    assert found == {task: {"held": 1.0} for task in ("facts", "arithmetic", "tool_calls")}
    assert "missed" not in table(found)


def test_a_missed_target_is_named():
    assert "missed" in table({"facts": {"held": 1.0, "new": 0.5}})
    assert "blind" not in table({"facts": {"held": 1.0, "new": 0.95}})
    assert "missed" not in table({"tool_calls": {"held": 1.0, "new": 0.95, "blind": 0.5}})


def test_drafts_agree_with_the_text():
    cases = [case for case in load_cases(1, ("facts", "tool_calls")) if case.split == "held"]
    found = acceptance(demo_model(), cases)
    assert min(found["prose"][0], found["tool calls"][0]) > 0.75
    assert bits_per_byte(demo_model(), cases) < 0.2


def test_a_feeder_reads_a_prompt_whole_or_in_pieces_alike(parts):
    tokenizer, template = parts
    case = load_cases(1, ("facts",))[0]
    prompt = template.render(case.request, False).tokens
    with open_container(demo_model()) as container:
        whole = Feeder.open(container, 256).feed(prompt, "prefill")[-1]
        pieces = Feeder.open(container, 256)
        pieces.feed(prompt[:5], "prefill")
        assert pieces.feed(prompt[5:], "prefill")[-1].argmax() == whole.argmax()


def test_the_command_prints_scores_as_json(capfd):
    assert run(["bench", "demo-eval", "--backend", "numpy", "--count", "1", "--task", "facts", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["examples"], answer["tier"]) == (2, "q8")
    assert answer["scores"]["facts"]["held"] == 1.0
