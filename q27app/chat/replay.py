"""Token-exact turns: an answer that a client sends back becomes the tokens that were generated, not another spelling.

Re-rendered text may tokenise otherwise, and a call's JSON may come back with other blanks and another order of keys. So the
run of each answer is kept under a fingerprint of what it means (text without outer blanks, calls as JSON values; reasoning
apart), and put into later prompts in place of the rendered turn. A turn that the client changed has another fingerprint.
Thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from q27app.chat.conversation import calls_of, reasoning_of, text_of
from q27app.chat.prompt import TURN_END, TURN_START, Rendered
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import Message

MAX_RUNS = 4096
MAX_TOKENS = 4_000_000
HEADER = b"assistant\n"


@dataclass(frozen=True)
class Run:
    """tokens: of the whole turn, from the token after its opener to before its end. reasoning: its text, blanks cut off."""

    tokens: tuple[int, ...]
    reasoning: str


def fingerprint(message: Message) -> bytes:
    """Of an answer's text and calls."""
    calls = [[call.name, call.arguments] for call in calls_of(message)]
    text = json.dumps([text_of(message).strip(), calls], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Replay:
    """The runs of late; the least recently used ones go first."""

    def __init__(self, tokenizer: Tokenizer, max_runs: int = MAX_RUNS, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer, self._max_runs, self._max_tokens = tokenizer, max_runs, max_tokens
        self._runs: OrderedDict[bytes, Run] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()
        ids = tokenizer.control_ids
        self._open, self._close, self._think_end = ids.get(TURN_START), ids.get(TURN_END), ids.get("</think>")
        self.num_replayed = 0

    def keep(self, message: Message, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Remember an answer: `message` is what clients were told, generated: its tokens without the end-of-text token."""
        start = last_opener(prompt, self._open)
        if self._open is None or start < 0 or self._open in generated or self._close in generated:
            return
        run = Run((*prompt[start + 1:], *generated), (reasoning_of(message) or "").strip())
        key = fingerprint(message)
        with self._lock:
            old = self._runs.pop(key, None)
            self._num_tokens += len(run.tokens) - (len(old.tokens) if old else 0)
            self._runs[key] = run
            while len(self._runs) > self._max_runs or self._num_tokens > self._max_tokens:
                _, gone = self._runs.popitem(last=False)
                self._num_tokens -= len(gone.tokens)

    def applied(self, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        """The same prompt with the turns that are known as they were generated."""
        answers = [message for message in messages if message.role == "assistant"]
        spans = self._spans(rendered) if answers and self._runs else []
        if len(spans) != len(answers):
            return rendered
        tokens: list[int] = []
        done = 0
        for (start, stop), message in zip(spans, answers, strict=True):
            turn = self._turn(rendered.tokens[start:stop], message)
            tokens += rendered.tokens[done:start]
            tokens += rendered.tokens[start:stop] if turn is None else turn
            done = stop
        grown = len(tokens) - done
        return replace(rendered, tokens=(*tokens, *rendered.tokens[done:]), stable_len=rendered.stable_len + grown)

    def _spans(self, rendered: Rendered) -> list[tuple[int, int]]:
        """(start, stop) of the inside of each assistant turn of the history."""
        tokens, spans, place = rendered.tokens, [], rendered.system_len
        while self._open is not None and self._close is not None:
            try:
                start = tokens.index(self._open, place, rendered.stable_len) + 1
                stop = tokens.index(self._close, start, rendered.stable_len)
            except ValueError:
                break
            if self._bytes(tokens[start:start + len(HEADER)]).startswith(HEADER):
                spans.append((start, stop))
            place = stop
        return spans

    def _turn(self, turn: Sequence[int], message: Message) -> list[int] | None:
        """What stands in place of a rendered turn; None if nothing is known about it."""
        key = fingerprint(message)
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                return None
            self._runs.move_to_end(key)
            self.num_replayed += 1
        kept_at, shown_at = self._thinking_end(run.tokens), self._thinking_end(turn)
        if kept_at is None and shown_at is None:
            return list(run.tokens)
        if kept_at is None:
            return None
        head, body = run.tokens[:kept_at], run.tokens[kept_at:]
        if shown_at is not None:
            reasoning = (reasoning_of(message) or "").strip()
            is_whole = reasoning == run.reasoning and bool(reasoning) == (self._shown(turn[:shown_at]) != "")
            return [*(head if is_whole else turn[:shown_at]), *body]
        header, blank = self._length(turn, HEADER), self._length(body, b"\n\n")
        if header is None or (blank is None and self._bytes(body[:1]).startswith(b"\n")):
            return None
        return [*turn[:header], *body[blank or 0:]]

    def _length(self, tokens: Sequence[int], text: bytes) -> int | None:
        """How many tokens at the beginning are exactly this text; None if none are."""
        sizes = range(1, min(len(tokens), len(text)) + 1)
        return next((size for size in sizes if self._bytes(tokens[:size]) == text), None)

    def _thinking_end(self, tokens: Sequence[int]) -> int | None:
        """Place after the first </think>, None without one."""
        if self._think_end is None or self._think_end not in tokens:
            return None
        return tokens.index(self._think_end) + 1

    def _shown(self, head: Sequence[int]) -> str:
        """The reasoning of a turn's head; the tags give bytes or none, as the vocabulary has it."""
        text = self._bytes(head).removeprefix(HEADER).decode("utf-8", "replace")
        return text.removeprefix("<think>").removesuffix("</think>").strip()

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, tokens))


def last_opener(tokens: Sequence[int], opener: int | None) -> int:
    """Place of the last turn's opener, -1 without one."""
    return next((place for place in range(len(tokens) - 1, -1, -1) if tokens[place] == opener), -1)
