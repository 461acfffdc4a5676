"""From token events to deltas, and from deltas to a whole answer. Pure state machines, no I/O.

`Translation` belongs to one request: it detokenises, hands the text to chat's parser, names log probabilities, counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from q27app.chat.types import Delta, ToolCall, Usage
from q27app.engine.request import FinishReason, TokenEvent, TokenLogprobs
from q27app.errors import Q27Error

if TYPE_CHECKING:
    from q27app.chat.stream import DeltaParser
    from q27app.chat.tokenizer import Tokenizer


class Translation:
    """One request's way from tokens to deltas.

    parser: splits channels, reads calls, cuts at stop strings. must_call: an answer without a call, that no limit
    cut, is an error.
    """

    def __init__(self, tokenizer: Tokenizer, parser: DeltaParser, must_call: bool = False) -> None:
        from q27app.chat.tokenizer import Detokenizer

        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._parser = parser
        self._must_call = must_call
        self._logprobs: list[dict[str, Any]] = []
        self.num_generated = 0
        self.num_reasoning = 0

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def num_missed(self) -> int:
        """Things that looked like a call and could not be read as one."""
        return len(self._parser.missed)

    @property
    def missed(self) -> list[str]:
        """Their texts, bounded."""
        return self._parser.missed

    @property
    def rescues(self) -> Counter[str]:
        """Calls that had to be repaired before they could be read, by kind of mistake."""
        return self._parser.rescues

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that has ended the text."""
        return self._parser.stop_sequence

    def feed(self, event: TokenEvent) -> list[Delta]:
        """The deltas that an event's tokens make."""
        texts = [self._detokenizer.push((token,)) for token in event.tokens]
        if not event.logprobs and not self._parser.may_turn_at(joined := "".join(texts)):
            num_drawn = len(texts) - sum(event.forced)
            self.num_generated += num_drawn
            self.num_reasoning += num_drawn if self._parser.channel == "reasoning" else 0
            return self._with_logprobs(self._parser.feed(joined)) if joined else []
        deltas: list[Delta] = []
        for index, text in enumerate(texts):
            is_forced = index < len(event.forced) and event.forced[index]
            channel = self._parser.channel
            self.num_generated += not is_forced
            self.num_reasoning += not is_forced and channel == "reasoning"
            if channel == "text" and index < len(event.logprobs):
                self._logprobs.append(self._named(event.logprobs[index]))
            if text:
                deltas += self._with_logprobs(self._parser.feed(text))
        return deltas

    def finish(self, event: TokenEvent, num_prompt: int) -> list[Delta]:
        """The last deltas, "finish" at the end. Raises the event's error, or Q27Error if a forced call is missing.

        event: the one whose `finish` is set; its tokens must have been fed.
        """
        if event.error is not None:
            raise event.error
        text = self._detokenizer.flush()
        is_cut = event.finish is FinishReason.LENGTH
        deltas = self._with_logprobs((self._parser.feed(text) if text else []) + self._parser.finish(is_cut))
        if self._must_call and not self.num_calls and not is_cut:
            raise Q27Error("the model made no call of an offered tool although tool_choice requires one.")
        usage = Usage(
            num_prompt, event.stats.num_cached if event.stats else 0, self.num_generated, self.num_reasoning
        )
        last = Delta(
            "finish",
            finish=self._parser.finish_reason("length" if is_cut else "stop"),
            stop_sequence=self._parser.stop_sequence,
            usage=usage,
            stats=event.stats,
            is_cut=is_cut,
        )
        return [*deltas, last]

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """Gives the waiting log probabilities to the first piece of text."""
        for index, delta in enumerate(deltas):
            if delta.kind == "text" and self._logprobs:
                deltas[index] = replace(delta, logprobs=tuple(self._logprobs))
                self._logprobs = []
        return deltas

    def _named(self, entry: TokenLogprobs) -> dict[str, Any]:
        best = [self._one(token, value) for token, value in zip(entry.top_ids, entry.top_logprobs)]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": best}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(float(logprob), -9999.0), "bytes": list(raw)}


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind joined: one wake-up makes one write."""
    result: list[Delta] = []
    group: list[Delta] = []
    for delta in deltas:
        if group and not _is_same_stretch(group[0], delta):
            result.append(_joined(group))
            group = []
        group.append(delta)
    if group:
        result.append(_joined(group))
    return result


def _is_same_stretch(left: Delta, right: Delta) -> bool:
    if left.kind != right.kind or left.index != right.index or left.kind not in ("text", "reasoning", "tool_args"):
        return False
    if left.call is None or right.call is None:
        return left.kind != "tool_args"
    return left.call.id == right.call.id


def _joined(group: list[Delta]) -> Delta:
    if len(group) == 1:
        return group[0]
    logprobs = tuple(entry for delta in group for entry in delta.logprobs)
    return replace(group[0], text="".join(delta.text for delta in group), logprobs=logprobs)


@dataclass
class CallBlock:
    """A finished tool call of an answer. parsed: its arguments as an object, or the text if it is none."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    parsed: Any = None

    @property
    def arguments(self) -> str:
        """The JSON text, as the model wrote it where it wrote JSON."""
        if self.pieces:
            return "".join(self.pieces)
        return self.parsed if isinstance(self.parsed, str) else json.dumps(self.parsed or {}, ensure_ascii=False)


@dataclass
class Answer:
    """A whole answer. blocks: text (str) and calls in the order of generation."""

    reasoning: str = ""
    blocks: list[str | CallBlock] = field(default_factory=list)
    finish: str = "stop"
    is_cut: bool = False
    stop_sequence: str | None = None
    usage: Usage = field(default_factory=Usage)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    others: list[Answer] = field(default_factory=list)
    """Of the first of several answers: the rest, in order."""

    @property
    def text(self) -> str:
        return "".join(block for block in self.blocks if isinstance(block, str))

    @property
    def calls(self) -> list[CallBlock]:
        return [block for block in self.blocks if isinstance(block, CallBlock)]


async def collect(deltas: AsyncIterator[Delta]) -> Answer:
    """Read deltas to their end: the first answer, which holds the others. Raises what they raise."""
    collectors: dict[int, _Collector] = {}
    async for delta in deltas:
        if delta.index not in collectors:
            collectors[delta.index] = _Collector()
        collectors[delta.index].take(delta)
    answers = [collectors[index].finish() for index in sorted(collectors)] or [Answer()]
    answers[0].others = answers[1:]
    return answers[0]


class _Collector:
    """One answer, as it arrives."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._pieces: list[str] = []
        self._reasoning: list[str] = []

    def take(self, delta: Delta) -> None:
        answer = self._answer
        if delta.kind == "reasoning":
            self._reasoning.append(delta.text)
        elif delta.kind == "text":
            self._pieces.append(delta.text)
            answer.logprobs += delta.logprobs
        elif delta.kind == "finish":
            answer.finish, answer.stop_sequence = delta.finish or "stop", delta.stop_sequence
            answer.usage, answer.is_cut = delta.usage or answer.usage, delta.is_cut
        elif delta.call is not None:
            self._flush()
            _collect_call(answer, delta, delta.call)

    def finish(self) -> Answer:
        self._flush()
        self._answer.reasoning = "".join(self._reasoning)
        return self._answer

    def _flush(self) -> None:
        if self._pieces:
            self._answer.blocks.append("".join(self._pieces))
            self._pieces = []


def _collect_call(answer: Answer, delta: Delta, call: ToolCall) -> None:
    if delta.kind == "tool_start":
        answer.blocks.append(CallBlock(call.id, call.name))
        return
    block = next(block for block in reversed(answer.calls) if block.id == call.id)
    if delta.kind == "tool_args":
        block.pieces.append(delta.text)
    else:
        block.parsed = call.arguments
