"""What crosses the thread border between the daemon's loop and the engine, both ways. Immutable.

A request is token ids, sampling parameters and a guide; the engine knows no text. Whatever happens, a request's
`deliver` receives exactly one `TokenEvent` whose `finish` is not None, and nothing after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

import numpy as np

from q27app.errors import Q27Error


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"            # an end-of-text token, or the guide said so
    LENGTH = "length"        # max_tokens or the window is used up
    CANCELLED = "cancelled"  # the client left or asked for it
    ERROR = "error"          # `TokenEvent.error` says what happened


class Decision(Protocol):
    """What a guide says about the tokens that it was just shown.

    keep: how many of them stay; the rest is dropped as if it had never been drawn.
    force: token ids that follow the kept ones, whatever the model would say ("" = none).
    finish: end the request after the kept and forced tokens, for this reason; None to go on.
    """

    keep: int
    force: tuple[int, ...]
    finish: str | None


class Guide(Protocol):
    """What acts between two steps. Pure: bounded time, no I/O; called on the engine thread only."""

    def advance(self, tokens: Seq[int]) -> Decision:
        """Show newly accepted tokens (one or more, end-of-text tokens included), in order."""
        ...

    # is_open: bool, optional: `mask` gives None for any prefix until `advance` is called again (see `is_open`).
    # may_divert: bool, optional: `advance`, shown one token more, may well drop it or force others and go on; without it, it may.
    # Where it was False and that happens, the answer's state is computed again.

    def mask(self, prefix: Seq[int]) -> np.ndarray | None:
        """Allowed ids after everything advanced so far plus `prefix` (drafts of this step).

        Returns uint32 [ceil(vocab_size / 32)], bit i % 32 of word i // 32 set if id i is allowed; None = all.
        """
        ...


def is_open(guide: Guide | None) -> bool:
    """Nothing constrains what is drawn next: there is no guide, or it says so. One that fails here is asked for its mask, where its
    mistakes end its own request."""
    try:
        return guide is None or bool(getattr(guide, "is_open", False))
    except Exception:
        return False


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Order: penalties, grammar mask, temperature, top_k, top_p, min_p (on scaled logits)."""

    temperature: float = 0.0
    """0 is greedy: the highest logit, the lowest id on a tie."""
    top_k: int = 0
    """Keep the k highest, ties with the k-th included; 0 = off."""
    top_p: float = 1.0
    """Smallest set of highest probabilities whose mass reaches top_p, ties at the threshold included."""
    min_p: float = 0.0
    """Keep p >= min_p * p_max."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated at least once."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token was generated."""
    logprobs: int | None = None
    """None: none. n >= 0: the drawn token's log probability and the n best others, from the raw logits."""
    seed: int = 0
    """64-bit. With the absolute position it names the Gumbel vector of a draw; nothing else enters."""
    max_tokens: int = 8192
    """Most tokens to generate, at least 0; the window may end it sooner."""
    ignore_eos: bool = False
    """Go on past end-of-text tokens (benchmarks, constructed checkpoints)."""


@dataclass(frozen=True)
class TokenLogprobs:
    """token's log probability and the best alternatives: ids and values, best first."""

    token: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Reuse:
    """What of a prompt was not computed again. possible: what an earlier request and its answer held of it.

    kind: of the snapshot, "" without one. reason: "" if at least half of what was possible was reused, else "new" (nothing
    like it was there), "diverged" (the prompt leaves the earlier text early) or "not_kept" (its state was not there (any
    more)). shared: tokens that both begin with; expected, given: the ids after them, -1 = none."""

    num_tokens: int = 0
    kind: str = ""
    possible: int = 0
    reason: str = ""
    shared: int = 0
    expected: int = -1
    given: int = -1


@dataclass(frozen=True)
class DraftCount:
    """Drafts of one source ("mtp", "suffix") by depth: entry 0 counts the first draft of each pass."""

    source: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class RequestStats:
    """Final figures of one request. Times in milliseconds."""

    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafts: tuple[DraftCount, ...] = ()
    reuse: Reuse | None = None


@dataclass(frozen=True)
class Request:
    """One generation. `deliver` is in `Engine.submit`, not here: this object is plain data."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    guide: Guide | None = None
    eos_ids: tuple[int, ...] = ()
    """Ids that end the generation unless params.ignore_eos; they are not part of the output."""
    prompt_logits: bool = False
    """Also return the logits of every prompt position in the first event (`generate --dump-logits`)."""
    cache: bool = True
    stable_len: int = 0
    """Prompt tokens that the next turn will send again verbatim; 0 = unknown."""
    system_len: int = 0
    """Tokens of the system + tools block; 0 = unknown."""
    turn_len: int = 0
    """Prompt tokens before its newest message; 0 = unknown."""
    is_background: bool = False
    """Nobody waits for it: it only leaves its state in the prefix cache."""
    client: str = ""
    """For status and logs: API and peer."""

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """The prompt as int32 [n], made once and not to be changed: a long one takes milliseconds. Raises OverflowError for what can be no id,
        MemoryError."""
        ids = np.array(array("i", self.prompt), np.int32)
        ids.flags.writeable = False
        return ids


@dataclass(frozen=True)
class TokenEvent:
    """Something happened to a request.

    tokens: newly generated ids, in order, end-of-text not included. forced: as many flags; True for ids that a guide
    forced. prefilled: prompt tokens computed so far (progress events have no tokens). Exactly one event has `finish`.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    forced: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefilled: int | None = None
    finish: FinishReason | None = None
    stats: RequestStats | None = None
    error: Q27Error | None = None
    prompt_logits: np.ndarray | None = None
