"""Scores of the bundled model on its held-out sets, through engine, template and parser, greedily.

The sets (data/demo_eval.jsonl.gz) hold tasks in two splits, neither of which occurs in training: "held" has the
training's wordings and names with other values; "new" has wordings, names and tools that no training template holds.
Calls and recall have a third, "blind": written as a person would, and never used to choose what training holds.
An example is right if its answer passes its check:

    kind      right if
    contains  every one of `values` is in the text, case ignored, and no call is made
    exact     the text is `value`, blanks at the ends ignored, and no call is made
    number    the last number in the text is `value`, and no call is made
    json      the text is JSON equal to `value`, and no call is made
    calls     the calls' names and arguments are those of `calls`, in order

`json_valid` beside the scores is the share of JSON answers that parse, equal or not.
"""

from __future__ import annotations

import gzip
import json
import queue
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q27app.chat.types import (
    ChatRequest, Message, ReasoningPart, TextPart, Tool, ToolCall, ToolCallPart, ToolResultPart,
)
from q27app.errors import EngineDied, UsageError

if TYPE_CHECKING:
    from q27app.chat.prompt import Template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.engine.engine import Engine
    from q27app.engine.request import Request

SPLITS = ("held", "new", "blind")
TARGET_SPLITS = SPLITS[:2]
MAX_TOKENS = 256
AT_ONCE = 4
TARGETS = {
    "facts": 0.90, "arithmetic": 0.95, "copying": 0.98, "recall_4k": 0.95, "tool_calls": 0.95, "json_valid": 0.98,
}
"""What the bundled model is meant to reach in TARGET_SPLITS."""


@dataclass(frozen=True)
class Case:
    """One example. request: all before the answer. check: see the module. expected: the answer it was made with."""

    task: str
    split: str
    request: ChatRequest
    thinking: bool
    check: Mapping[str, Any]
    expected: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the model said: text without reasoning, and calls as {"name", "arguments"}."""

    text: str
    calls: tuple[Mapping[str, Any], ...]


def cases_path() -> Path:
    return Path(__file__).resolve().parents[1] / "data" / "demo_eval.jsonl.gz"


def load_cases(count: int | None = None, tasks: Sequence[str] = (), splits: Sequence[str] = ()) -> list[Case]:
    """The first `count` examples of each task and split (None: all). Raises UsageError for an unknown task or split."""
    lines = [json.loads(line) for line in gzip.decompress(cases_path().read_bytes()).splitlines()]
    known = dict.fromkeys(line["task"] for line in lines)
    for task in tasks:
        if task not in known:
            raise UsageError(f"there is no task {task!r} in the held-out sets.", f"Tasks: {', '.join(known)}.")
    for split in splits:
        if split not in SPLITS:
            raise UsageError(f"there is no split {split!r} in the held-out sets.", f"Splits: {', '.join(SPLITS)}.")
    found: list[Case] = []
    seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for line in lines:
        key = line["task"], line["split"]
        seen[key] += 1
        wanted = (not tasks or line["task"] in tasks) and (not splits or line["split"] in splits)
        if wanted and (count is None or seen[key] <= count):
            found.append(Case(*key, _request(line), line["thinking"], line["check"], line["expected"]))
    return found


def _request(line: Mapping[str, Any]) -> ChatRequest:
    tools = tuple(Tool(tool["function"]["name"], tool["function"]["description"], tool["function"]["parameters"], tool)
                  for tool in line["tools"])
    return ChatRequest(messages=tuple(_message(entry) for entry in line["messages"]), tools=tools)


def _message(entry: Mapping[str, Any]) -> Message:
    if entry["role"] == "tool":
        return Message("tool", (ToolResultPart(entry["text"]),))
    parts: list[Any] = [ReasoningPart(entry["reasoning"])] if "reasoning" in entry else []
    if entry["text"]:
        parts.append(TextPart(entry["text"]))
    parts += [ToolCallPart(ToolCall("", call["name"], call["arguments"])) for call in entry.get("calls", ())]
    return Message(entry["role"], tuple(parts))


def is_right(check: Mapping[str, Any], answer: Answer) -> bool:
    """Whether an answer passes; see the module's table."""
    kind, text = check["kind"], answer.text.strip()
    if kind == "calls":
        return [(call["name"], call["arguments"]) for call in answer.calls] == [
            (call["name"], call["arguments"]) for call in check["calls"]]
    if answer.calls:
        return False
    if kind == "contains":
        return all(value.lower() in text.lower() for value in check["values"])
    if kind == "exact":
        return text == check["value"].strip()
    if kind == "number":
        numbers = re.findall(r"-?\d+", text)
        return bool(numbers) and int(numbers[-1]) == check["value"]
    assert kind == "json", f"unknown check {kind!r}"
    return parsed(text) == check["value"]


def parsed(text: str) -> Any:
    """The JSON value of a text, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def read_answer(tokens: Sequence[int], case: Case, channel: str, dialect: str, tokenizer: Tokenizer) -> Answer:
    """Generated ids as a client would see them."""
    from q27app.chat.stream import DeltaParser
    from q27app.chat.tokenizer import Detokenizer

    parser, detokenizer = DeltaParser(case.request.tools, None, channel, dialect), Detokenizer(tokenizer)
    deltas = parser.feed(detokenizer.push(tokens) + detokenizer.flush()) + parser.finish()
    text = "".join(delta.text for delta in deltas if delta.kind == "text")
    calls = tuple({"name": delta.call.name, "arguments": delta.call.arguments} for delta in deltas
                  if delta.kind == "tool_end" and delta.call is not None)
    return Answer(text, calls)


def answers(engine: Engine, tokenizer: Tokenizer, template: Template, cases: Sequence[Case],
            ) -> Iterator[tuple[Case, Answer]]:
    """Every case with its answer, as they finish; AT_ONCE run together. Raises the error that ends a request."""
    from q27app.engine.request import FinishReason, Request, SamplingParams

    inbox: queue.SimpleQueue = queue.SimpleQueue()
    waiting = list(enumerate(cases))[::-1]
    running: dict[str, tuple[Case, str, list[int]]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, case = waiting.pop()
            prompt = template.render(case.request, case.thinking)
            request: Request = Request(f"case-{number}", prompt.tokens, SamplingParams(max_tokens=MAX_TOKENS),
                                       eos_ids=tuple(tokenizer.eos_ids), client="bench")
            running[request.id] = case, prompt.channel, []
            engine.submit(request, inbox.put)
        event = inbox.get()
        case, channel, tokens = running[event.request_id]
        tokens.extend(event.tokens)
        if event.finish is FinishReason.ERROR:
            raise event.error or EngineDied("the request ended without a reason.")
        if event.finish is not None:
            del running[event.request_id]
            yield case, read_answer(tokens, case, channel, template.dialect, tokenizer)


def scores(engine: Engine, tokenizer: Tokenizer, template: Template, cases: Sequence[Case],
           progress: Callable[[int, int], None] | None = None,
           on_answer: Callable[[Case, Answer, bool], None] | None = None) -> dict[str, dict[str, float]]:
    """{task: {split: share that is right}}, with `json_valid` where there are JSON answers."""
    results: defaultdict[str, defaultdict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for done, (case, answer) in enumerate(answers(engine, tokenizer, template, cases), 1):
        right = is_right(case.check, answer)
        results[case.task][case.split].append(right)
        if case.check["kind"] == "json":
            results["json_valid"][case.split].append(parsed(answer.text.strip()) is not None)
        if on_answer is not None:
            on_answer(case, answer, right)
        if progress is not None:
            progress(done, len(cases))
    return {task: {split: sum(splits[split]) / len(splits[split]) for split in SPLITS if splits[split]}
            for task, splits in results.items()}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The scores as text, one task a line, with the target where there is one."""
    shown = [split for split in SPLITS if split in TARGET_SPLITS or any(split in splits for splits in found.values())]
    lines = [f"{'task':<14}" + "".join(f"{split:>8}" for split in shown) + f"{'target':>9}"]
    for task, splits in found.items():
        values = "".join(f"{splits[split]:>8.1%}" if split in splits else f"{'':>8}" for split in shown)
        target = f"{TARGETS[task]:>9.0%}" if task in TARGETS else ""
        missed = task in TARGETS and any(splits.get(split, 1.0) < TARGETS[task] for split in TARGET_SPLITS)
        lines.append(f"{task:<14}{values}{target}{'  missed' if missed else ''}")
    return "\n".join(lines)
