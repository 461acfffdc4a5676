"""Where reuse of computed prefixes plugs in: what admission asks, and what it tells.

Recurrent state cannot be rewound, so a prefix is reusable only where a snapshot of its end was kept. Blocks are shared by
reference, recurrent state is copied into the new sequence's slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from q27app.engine.request import FinishReason, Request
from q27app.engine.sequence import Sequence


@dataclass(frozen=True)
class Match:
    """A place to resume from.

    num_tokens: positions that need not be computed, a multiple of 64 below the prompt's length. blocks: int32
    [num_tokens / 64], in use; the sequence becomes one more owner. restore(slot): fills the slot with the state there.
    """

    num_tokens: int
    blocks: np.ndarray
    restore: Callable[[int], None]


class PrefixCache(Protocol):
    """Called on the engine thread between two passes."""

    def match(self, request: Request) -> Match | None:
        """The longest reusable prefix, compared token by token. It stays valid until the next call of any method."""
        ...

    def prepares(self, request: Request, wait_s: float) -> bool:
        """A state for this request is on its way into memory: `match` it later. Waits at most wait_s seconds for that."""
        ...

    def stops(self, request: Request) -> Seq[int]:
        """Multiples of 64 at which a prefill chunk shall end, because a snapshot is wanted there."""
        ...

    def lend(self, sequence: Sequence, positions: Seq[int]) -> list[tuple[int, int]]:
        """(position, slot) of as many of these stops of the sequence, from the first on, as there are slots of snapshots for: the
        pass that is made puts the states there, and no chunk has to end. `computed` or `ended` follows."""
        ...

    def computed(self, sequence: Sequence) -> None:
        """A prefill chunk of this sequence has ended at `num_computed`: the time to take a snapshot. What was lent holds one."""
        ...

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is about to give back its slot and blocks. After an error its state is not to be trusted."""
        ...

    def settles(self, tokens: np.ndarray) -> bool:
        """Whether a snapshot of exactly these tokens, int32 [n], is kept; if so it counts as the end of a turn from now on."""
        ...

    def reclaim(self, num_blocks: int, num_slots: int) -> None:
        """Give up snapshots until this many blocks and slots are free, as far as that is possible."""
        ...

    @property
    def has_spare_work(self) -> bool:
        """There is something to do while nobody waits."""
        ...

    def spare_step(self) -> None:
        """Do a bounded part of it."""
        ...

    def give_up(self) -> None:
        """The engine has died: what it computed last is not to be trusted, nothing more of it is written anywhere."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """For /status; any thread."""
        ...

    def owned_blocks(self) -> Iterable[np.ndarray]:
        """For checks: the blocks of each snapshot."""
        ...

    def owned_slots(self) -> Iterable[int]:
        """For checks: the slots of snapshots on the device."""
        ...
