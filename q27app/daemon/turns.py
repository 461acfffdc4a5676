"""What is done about an answer after it: its token run is kept for replay, and the next turn's beginning is settled.

`Turn` collects one answer as the client sees it. `Turns` belongs to the daemon; `ended` is called on the loop; in
the executor the next turn is rendered in the forms that it may take, the likely one first:

    the answer calls tools    results follow: the reasoning of the loop stays
    it does not               a new question follows: templates drop old reasoning

and each with and without the answer's reasoning, which some clients send back and some do not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from q27app.chat.prompt import TURN_START
from q27app.chat.replay import Replay, last_opener
from q27app.chat.types import ChatRequest, Delta, Message, ReasoningPart, TextPart, ToolCallPart
from q27app.engine.request import Request, TokenEvent
from q27app.errors import Q27Error

if TYPE_CHECKING:
    from q27app.chat.prompt import Rendered
    from q27app.daemon.daemon import Daemon

log = logging.getLogger("q27app.daemon")

MAX_FORMS = 3
MAX_ACTIVE = 8
"""With more requests in flight nobody will be idle soon."""


@dataclass
class Turn:
    """An answer as it grows. is_plain: text, then calls, nothing after them, nothing cut or repaired."""

    chat: ChatRequest
    request: Request
    tokens: list[int] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[ToolCallPart] = field(default_factory=list)
    is_plain: bool = True
    has_ended: bool = False

    def feed(self, event: TokenEvent, deltas: Sequence[Delta]) -> None:
        self.tokens += event.tokens
        for delta in deltas:
            if delta.kind == "reasoning":
                self.reasoning.append(delta.text)
            elif delta.kind == "text":
                self.text.append(delta.text)
                self.is_plain &= not (self.calls and delta.text.strip())
            elif delta.kind == "tool_end" and delta.call is not None:
                self.calls.append(ToolCallPart(delta.call))
            elif delta.kind == "finish":
                self.has_ended = True
                self.is_plain &= not delta.is_cut and delta.stop_sequence is None

    def message(self, with_reasoning: bool = True) -> Message:
        """The answer as a client would send it back."""
        reasoning, text = "".join(self.reasoning), "".join(self.text)
        parts: list = [ReasoningPart(reasoning)] if reasoning and with_reasoning else []
        parts += [TextPart(text)] if text else []
        return Message("assistant", (*parts, *self.calls))


class Turns:
    """Owner of the replay store."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.replay = Replay(daemon.tokenizer)

    def ended(self, turn: Turn, is_exact: bool) -> None:
        """An answer is complete. is_exact: what the client was told is what the tokens say, nothing was repaired."""
        daemon = self._daemon
        if turn.chat.prompt is not None or not turn.has_ended:
            return
        if is_exact and turn.is_plain:
            self.replay.keep(turn.message(), turn.request.prompt, turn.tokens)
        if turn.chat.num_answers > 1 or len(daemon.active) > MAX_ACTIVE:
            return
        try:
            daemon.executor.submit(self._settle, turn)
        except RuntimeError:
            return  # the daemon is shutting down

    def _settle(self, turn: Turn) -> None:
        try:
            for tokens, system_len in self.next_prefixes(turn):
                self._daemon.engine.settle(tokens, system_len)
        except Exception:  # nobody waits for it
            log.exception("the next turn of request %s could not be prepared", turn.request.id)

    def next_prefixes(self, turn: Turn) -> list[tuple[tuple[int, ...], int]]:
        """(tokens, tokens of the system block) of what the next turn may begin with, the likely one first."""
        found: list[tuple[tuple[int, ...], int]] = []
        keeps = sends_reasoning_back(turn.chat)
        for with_reasoning in (keeps, not keeps) if turn.reasoning else (keeps,):
            for tokens, system_len in self._forms(turn, turn.message(with_reasoning)):
                if all(tokens != known for known, _ in found):
                    found.append((tokens, system_len))
        return found[:MAX_FORMS]

    def _forms(self, turn: Turn, answer: Message) -> Iterator[tuple[tuple[int, ...], int]]:
        loop = self._rendered(turn.chat, (*turn.chat.messages, answer))
        if turn.calls and loop is not None:
            yield loop.tokens[:loop.stable_len], loop.system_len
        asked = self._rendered(turn.chat, (*turn.chat.messages, answer, Message("user", (TextPart("."),))))
        if asked is not None:
            yield asked.tokens[:newest_turn(asked, self._daemon)], asked.system_len

    def _rendered(self, chat: ChatRequest, messages: tuple[Message, ...]) -> Rendered | None:
        from q27app.daemon.prepare import render

        try:
            return render(self._daemon, replace(chat, messages=messages))
        except Q27Error:
            return None


def newest_turn(prompt: Rendered, daemon: Daemon) -> int:
    """Tokens of a prompt before its newest message; 0 if that cannot be told."""
    return max(0, last_opener(prompt.tokens[:prompt.stable_len], daemon.tokenizer.control_ids.get(TURN_START)))


def sends_reasoning_back(chat: ChatRequest) -> bool:
    """Whether this client probably sends the answer's reasoning back: as it did before, else as its API's clients do."""
    answers = [message for message in chat.messages if message.role == "assistant"]
    if answers:
        return any(isinstance(part, ReasoningPart) for part in answers[-1].parts)
    return chat.dialect != "chat"
