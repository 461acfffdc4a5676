"""Conversations -> token ids and loss weights, by q27app's own templates, so that training and serving see equal tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from curriculum.example import Step
from curriculum.mix import Conversation
from q27app.chat.template_json import JsonTemplate
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import (
    ChatRequest, Message, ReasoningPart, TextPart, Tool, ToolCall, ToolCallPart, ToolResultPart,
)

CONTEXT_WEIGHT = 0.1
"""Of a token that the model does not write, at most; all of them together at most CONTEXT_SHARE of those it writes."""
CONTEXT_SHARE = 0.2


def message_of(step: Step) -> Message:
    if step.role == "tool":
        return Message("tool", (ToolResultPart(step.text),))
    if step.role == "user":
        return Message("user", (TextPart(step.text),))
    parts: list = [ReasoningPart(step.reasoning)] if step.reasoning is not None else []
    if step.text:
        parts.append(TextPart(step.text))
    parts += [ToolCallPart(ToolCall("", call["name"], dict(call["arguments"]))) for call in step.calls]
    return Message("assistant", tuple(parts))


def request_of(system: str | None, tools: Sequence[dict], steps: Sequence[Step]) -> ChatRequest:
    messages = () if system is None else (Message("system", (TextPart(system),)),)
    declared = tuple(Tool(tool["function"]["name"], tool["function"]["description"], tool["function"]["parameters"], tool)
                     for tool in tools)
    return ChatRequest(messages=(*messages, *map(message_of, steps)), tools=declared)


class Renderer:
    """Owns the tokenizer and one template a dialect."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.templates = {dialect: JsonTemplate(tokenizer, dialect) for dialect in ("json", "xml")}
        ids = tokenizer.control_ids
        self._start, self._end = ids["<|im_start|>"], ids["<|im_end|>"]
        self._think, self._thought = ids["<think>"], ids["</think>"]
        self._assistant = tokenizer.encode("assistant\n")
        self._no_thought = tokenizer.encode("\n\n")
        self._line = tokenizer.encode("\n")

    def training(self, conversation: Conversation, dialect: str, effort: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], weights float32 [n]) of a whole conversation, the last answer included."""
        request = request_of(conversation.system, conversation.tools, conversation.steps)
        thinks = conversation.steps[-1].reasoning is not None
        prompt, _ = self.templates[dialect].build(request, thinks, effort if thinks else None)
        ids = np.asarray(self.tokenizer.encode_pieces(prompt.pieces[:prompt._history_mark]), np.int64)
        return ids, self._weights(ids)

    def _weights(self, ids: np.ndarray) -> np.ndarray:
        """1 for what the model writes, thoughts and <|im_end|> included; less for what it is given."""
        written = np.zeros(len(ids), bool)
        header = len(self._assistant)
        ends = np.flatnonzero(ids == self._end)
        for start in np.flatnonzero(ids == self._start):
            first = start + 1 + header
            if list(ids[start + 1:first]) != self._assistant:
                continue
            end = ends[np.searchsorted(ends, start)]
            if ids[first] == self._think:
                empty = [self._think, *self._no_thought, self._thought, *self._no_thought]
                given = empty if list(ids[first:first + len(empty)]) == empty else [self._think, *self._line]
                first += len(given)
            written[first:end + 1] = True
        count = int(written.sum())
        context = min(CONTEXT_WEIGHT, CONTEXT_SHARE * count / max(1, len(ids) - count))
        return np.where(written, 1.0, context).astype(np.float32)

    def prompt(self, system: str | None, tools: Sequence[dict], steps: Sequence[Step], thinking: bool, dialect: str) -> list[int]:
        """Ids that a server would feed before the model's next answer."""
        return list(self.templates[dialect].render(request_of(system, tools, steps), thinking).tokens)
