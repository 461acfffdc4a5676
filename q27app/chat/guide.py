"""What acts between two steps of a generation: stop strings, reasoning budget, end-of-text in reasoning, loops.

A guide is made per request and called on the engine thread. It sees the tokens as the output parser will see them (a
private parser tells the channel), holds bounded state and does a bounded amount of work a token. Every decision falls
at a token, wherever a step ends, so the text does not depend on how many tokens a step brings.

    sees                                          decides
    a stop string complete in the answer          keep up to its token, finish "stop"; the text layer cuts inside it
    the reasoning budget used up                  keep, force the closer, go on
    end-of-text while reasoning, first time       drop it, force the closer, go on
    end-of-text otherwise                         drop it, finish "stop"
    a short period repeated very often            keep, finish "length"
    the first token after reasoning, with a       draw it again: what follows the closer is constrained, and tokens
    grammar, in the step that closed it           of the same step were drawn without
    nothing can follow by the grammar             keep, finish "stop"

Forced tokens are not shown to `advance` again: the guide accounts for them when it forces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from q27app.chat.stream import DeltaParser
from q27app.chat.tokenizer import Detokenizer, Tokenizer
from q27app.chat.types import Tool, ToolChoice

if TYPE_CHECKING:
    import numpy as np

CLOSER = "</think>"
CLOSE_TEXT = f"{CLOSER}\n\n"
MAX_PERIOD = 64
MIN_REPEATS = 20
LOOP_TOKENS = 512
LOOP_TOKENS_IN_CALL = 4096
MAX_UNREAD = 512
"""Characters that wait for the parser while nothing can come of them."""
MAX_REDONE = 2048
"""Tokens of an answer that may be computed again when the model ends inside its reasoning."""
CHECK_EVERY = 16
"""A loop is a period of at most MAX_PERIOD tokens, repeated MIN_REPEATS times and over LOOP_TOKENS tokens (a call may
well write a file of equal lines). Looked for after every CHECK_EVERY-th token."""


@dataclass(frozen=True)
class Decision:
    """keep: how many of the shown tokens stay; force: ids that follow; finish: "stop" | "length" | None to go on."""

    keep: int
    force: tuple[int, ...] = ()
    finish: str | None = None


class Grammar(Protocol):
    """A constraint on the answer, from the first token after reasoning on. is_done: nothing may follow."""

    @property
    def is_done(self) -> bool: ...

    def advance(self, tokens: Sequence[int]) -> None: ...

    def mask(self, prefix: Sequence[int]) -> np.ndarray | None: ...


class Guide:
    """The state of one generation. Owned by the engine thread.

    stop_sequence: the stop string that ended it. num_reasoning: tokens drawn while reasoning, forced ones not counted.
    is_budget_exceeded, is_loop, is_continued: what happened.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: DeltaParser,
        eos_ids: Sequence[int],
        budget: int | None,
        finds_loops: bool,
        grammar: Grammar | None,
    ) -> None:
        self._parser = parser
        self._unread = ""
        self._detokenizer = Detokenizer(tokenizer)
        self._encode = tokenizer.encode
        self._eos_ids = frozenset(eos_ids)
        self._budget = budget
        self._close_ids = tuple(tokenizer.encode(CLOSE_TEXT, control=True))
        self._finds_loops = finds_loops
        self._grammar = grammar
        self._recent: list[int] = []
        self._num_seen = 0
        self.num_reasoning = 0
        self.is_budget_exceeded = False
        self.is_continued = False
        self.is_loop = False

    @property
    def stop_sequence(self) -> str | None:
        return self._parser.stop_sequence

    @property
    def channel(self) -> str:
        """Where the next token belongs."""
        return self._parser.channel

    def advance(self, tokens: Sequence[int]) -> Decision:
        """Newly accepted tokens in order, end-of-text included. See the table above."""
        for index, token in enumerate(tokens):
            reasons = self._parser.channel == "reasoning"
            if reasons and self._budget is not None and self.num_reasoning >= self._budget:
                self.is_budget_exceeded = True
                return self._close_reasoning(index)
            if token in self._eos_ids:
                if reasons and not self.is_continued:
                    self.is_continued = True
                    return self._close_reasoning(index)
                return Decision(index, finish="stop")
            self._see(token, reasons)
            if self._parser.stop_sequence is not None:
                return Decision(index + 1, finish="stop")
            if self._finds_loops and self._is_loop():
                self.is_loop = True
                return Decision(index + 1, finish="length")
            if self._grammar is not None:
                if reasons and self._parser.channel != "reasoning" and index + 1 < len(tokens):
                    return Decision(index, force=(token,))
                if not reasons and self._grammar.is_done:
                    return Decision(index + 1, finish="stop")
        spent = self._budget is not None and self.num_reasoning >= self._budget
        if spent and self._parser.channel == "reasoning":
            self.is_budget_exceeded = True
            return self._close_reasoning(len(tokens))
        return Decision(len(tokens))

    @property
    def is_open(self) -> bool:
        """Whether nothing is constrained until `advance` is called again."""
        return self._grammar is None or self._parser.channel == "reasoning"

    @property
    def may_divert(self) -> bool:
        """Whether the next token will be followed by the closer, with the budget used up. End-of-text while reasoning is
        replaced by it too, but is rare; it counts where much would have to be computed again."""
        if self._parser.channel != "reasoning":
            return False
        is_last = self._budget is not None and self.num_reasoning + 1 >= self._budget
        return is_last or (self._num_seen > MAX_REDONE and not self.is_continued and bool(self._eos_ids))

    def mask(self, prefix: Sequence[int]) -> np.ndarray | None:
        """Allowed ids after everything shown plus `prefix`; None = all. Nothing is constrained while reasoning."""
        if self.is_open:
            return None
        return self._grammar.mask(prefix)

    def _see(self, token: int, reasons: bool) -> None:
        self.num_reasoning += reasons
        self._num_seen += 1
        if self._finds_loops:
            self._recent.append(token)
            if len(self._recent) > 2 * (LOOP_TOKENS_IN_CALL + MAX_PERIOD):
                del self._recent[: LOOP_TOKENS_IN_CALL + MAX_PERIOD]
        if self._grammar is not None and not reasons:
            self._grammar.advance((token,))
        text = self._detokenizer.push((token,))
        if text:
            self._read(text)
        if self._grammar is not None and reasons and self._parser.channel != "reasoning":
            rest = _after_closer(text)
            if rest.strip():
                self._grammar.advance(self._encode(rest, control=True))

    def _read(self, text: str) -> None:
        """Shows the parser a text, at the latest when something can come of it."""
        self._unread += text
        if self._parser.may_turn_at(text) or len(self._unread) > MAX_UNREAD:
            text, self._unread = self._unread, ""
            self._parser.feed(text)

    def _close_reasoning(self, keep: int) -> Decision:
        text, self._unread = self._unread, ""
        self._parser.feed(text + self._detokenizer.flush() + CLOSE_TEXT)
        self._recent.clear()
        return Decision(keep, force=self._close_ids)

    def _is_loop(self) -> bool:
        if self._num_seen % CHECK_EVERY:
            return False
        recent = self._recent
        least = LOOP_TOKENS_IN_CALL if self._parser.channel == "tool" else LOOP_TOKENS
        if len(recent) < least:
            return False
        last = recent[-1]
        for period in range(1, MAX_PERIOD + 1):
            if recent[-1 - period] != last or recent[-1 - period // 2 - period] != recent[-1 - period // 2]:
                continue
            span = max(least, MIN_REPEATS * period)
            if len(recent) >= span and recent[len(recent) - span + period :] == recent[len(recent) - span : -period]:
                return True
        return False


def _after_closer(text: str) -> str:
    """What follows the reasoning's closer in the token that completes it; blanks there do not count as answer."""
    at = text.find(CLOSER)
    if at >= 0:
        return text[at + len(CLOSER) :]
    ends = (end for end in range(len(CLOSER), 0, -1) if CLOSER.endswith(text[:end]) and len(text) >= end)
    return text[next(ends, 0) :]


def make_guide(
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    channel: str = "text",
    budget: int | None = None,
    *,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice | None = None,
    dialect: str = "xml",
    eos_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    answer_reserve: int = 0,
    finds_loops: bool = True,
    grammar: Grammar | None = None,
) -> Guide:
    """A guide for one generation.

    channel, dialect, tools, tool_choice, stop: as the output parser gets them. budget: most tokens of reasoning, None
    or negative = no limit. max_tokens with answer_reserve: reasoning also ends early enough that the closer and
    answer_reserve tokens still fit. eos_ids: None = the tokenizer's, () = generate on past them.
    """
    limit = reasoning_limit(budget, max_tokens, answer_reserve, len(tokenizer.encode(CLOSE_TEXT, control=True)))
    parser = DeltaParser(tools, tool_choice, channel, dialect, stop, reads_calls=False)
    return Guide(tokenizer, parser, tokenizer.eos_ids if eos_ids is None else eos_ids, limit, finds_loops, grammar)


def reasoning_limit(budget: int | None, max_tokens: int | None, answer_reserve: int, close_tokens: int) -> int | None:
    """Tokens of reasoning after which it is closed by force; None = never."""
    limit = None if budget is None or budget < 0 else budget
    if max_tokens is None or answer_reserve <= 0:
        return limit
    room = max(0, max_tokens - close_tokens - answer_reserve)
    return room if limit is None else min(limit, room)
