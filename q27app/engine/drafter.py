"""Where drafts come from. A drafter guesses; whether a guess becomes text is decided by the verify pass alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from q27app.engine.sequence import Sequence


def shares_of(room: int, count: int, turn: int) -> list[int]:
    """Rows that are left, shared alike by `count` sequences; who gets one more changes from turn to turn."""
    share, rest = divmod(room, count)
    return [share + ((index + turn * rest) % count < rest) for index in range(count)]


class Drafter(Protocol):
    """Called on the engine thread between two passes. What it keeps for a sequence hangs in `Sequence.draft_state`."""

    needs_mtp: bool
    """Passes shall write the draft layer's keys and values."""

    def propose(self, sequences: Seq[Sequence], limits: Seq[int]) -> Seq[Seq[int]]:
        """Guesses at what follows each sequence's last token: at most limits[i] (>= 0) ids for sequences[i], [] for none.
        An id may be `batch.in_flight`: known to the device alone.

        All sequences of the coming pass that may take drafts are asked at once, so that a draft layer reads its weights
        once for all of them.
        """
        ...

    def prompts_end(self, sequences: Seq[Sequence]) -> None:
        """The last pass of these sequences' prompts has been queued: what is to be known of a prompt before its answer's first draft can be
        looked up while the device runs."""
        ...

    def go_ahead(self, sequences: Seq[Sequence], drafted: Seq[int]) -> None:
        """A decode or verify pass of these sequences has been queued, one known row and drafted[i] drafts each. What can be begun
        now runs on the device while the host looks at the pass; see `Sequence.is_diverted` for where it was begun in vain."""
        ...

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """Whether none of them will be given drafts for the pass behind the plain one that was queued for them, whatever that
        draws. Asked once for each such pass."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What became of the sequence's last drafts."""
        ...

    def passed(self, rows: int, ms: float) -> None:
        """How long a decode or verify pass took."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """For /status."""
        ...
