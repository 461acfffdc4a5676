"""One request on the inside of the engine: its tokens, what it holds, how far it is.

Made by `Engine.submit` and from then on owned by the engine thread; other threads only read its numbers. The last token
of a running sequence has been drawn and not been computed: `tokens[num_computed:]` is what the next pass takes.

    status      slot, blocks    tokens[num_computed:]
    WAITING     none            the prompt
    PREFILLING  held            the rest of the prompt
    RUNNING     held            the newest token, after it the ids that a guide forced
    FINISHED    none            anything
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from q27app.engine.request import DraftCount, FinishReason, Request, RequestStats, Reuse, TokenEvent
from q27app.errors import Q27Error

Deliver = Callable[[TokenEvent], None]


class Status(Enum):
    WAITING = "waiting"
    PREFILLING = "prefill"
    RUNNING = "decode"
    FINISHED = "finished"


class TokenCounts:
    """How often each token was generated, as growing arrays: ids int32 [n] distinct, counts int32 [n]."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        self._places: dict[int, int] = {}

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    def arrays(self, more: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, counts), with the tokens `more` counted as well."""
        size = len(self._places)
        if not more:
            return self._ids[:size], self._counts[:size]
        new = [token for token in dict.fromkeys(more) if token not in self._places]
        ids = np.concatenate([self._ids[:size], np.array(new, np.int32)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(new), np.int32)])
        places = {token: size + index for index, token in enumerate(new)}
        for token in more:
            counts[self._places.get(token, places.get(token, 0))] += 1
        return ids, counts


@dataclass(eq=False)
class Sequence:
    """limit: most tokens to generate, the window considered. stops: positions where a prefill chunk must end."""

    request: Request
    deliver: Deliver
    limit: int
    tokens: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    slot: int = -1
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    stops: tuple[int, ...] = ()
    drafts: list[int] = field(default_factory=list)
    is_diverted: bool = False
    """Of the newest pass's run not everything became text, or more than it did."""
    draft_state: Any = None
    suffix_index: Any = None
    draft_counts: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Source -> how many drafts were made and accepted at each depth."""
    counts: TokenCounts | None = None
    prompt_logits: np.ndarray | None = None
    reuse: Reuse | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        params = self.request.params
        if params.presence_penalty or params.frequency_penalty:
            self.counts = TokenCounts()

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.num_generated

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def append(self, tokens: tuple[int, ...]) -> None:
        """Generated tokens become part of the text."""
        self.tokens.extend(tokens)
        if self.counts is not None:
            for token in tokens:
                self.counts.add(token)
        if tokens and self.first_token_at is None:
            self.first_token_at = time.monotonic()

    def count_drafts(self, source: str, first: int, num_drafted: int, num_accepted: int) -> None:
        """Drafts of one source at the depths from `first` on were verified (0 = the first of a pass), the first ones accepted."""
        drafted, accepted = self.draft_counts.setdefault(source, ([], []))
        for values, count in ((drafted, num_drafted), (accepted, num_accepted)):
            values.extend([0] * (first + num_drafted - len(values)))
            values[first:first + count] = [value + 1 for value in values[first:first + count]]

    def stats(self) -> RequestStats:
        """Final figures, as of now."""
        now = time.monotonic()
        admitted = now if self.admitted_at is None else self.admitted_at
        prefilled = now if self.prefilled_at is None else self.prefilled_at
        return RequestStats(
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_generated=self.num_generated,
            queue_ms=(admitted - self.submitted_at) * 1e3,
            prefill_ms=(prefilled - admitted) * 1e3,
            decode_ms=(now - prefilled) * 1e3,
            num_steps=self.num_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            drafts=tuple(DraftCount(source, tuple(drafted), tuple(accepted))
                         for source, (drafted, accepted) in sorted(self.draft_counts.items())),
            reuse=self.reuse,
        )

    def final_event(self, reason: FinishReason, error: Q27Error | None = None) -> TokenEvent:
        return TokenEvent(self.request.id, finish=reason, stats=self.stats(), error=error)

    def describe(self) -> dict[str, Any]:
        """What /status says about it. Any thread."""
        now, first = time.monotonic(), self.first_token_at
        num_generated = max(0, self.num_generated)
        speed = (num_generated - 1) / (now - first) if first is not None and now > first else 0.0
        return {
            "id": self.request.id,
            "client": self.request.client,
            "phase": self.status.value,
            "num_prompt": self.num_prompt,
            "num_cached": self.num_cached,
            "num_computed": self.num_computed,
            "num_generated": num_generated,
            "slot": self.slot,
            "tokens_per_s": round(max(0.0, speed), 2),
            "first_token_ms": None if first is None else round((first - self.submitted_at) * 1e3, 1),
        }
