"""What of a pass's drawn tokens becomes text, and how many of its rows become state.

A pass runs, for a sequence with pending token t and drafts d1 .. dk, the rows t, d1 .. dk and draws v0 .. vk; the run
v0 .. v(n-1) is accepted, where v(i-1) == di for i < n. Row i computed the token v(i-1), so with m tokens kept the rows
0 .. m are right as far as they are in the run:

    kept m of n      rows that become state    what the next pass takes
    m == n           n                         v(n-1), then the forced ids
    m < n            m + 1                     the forced ids

With n = 1 and no drafts that is a plain decode: its one row is state already. A run ends at the first end-of-text token
and at the request's limit, whatever was accepted after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from q27app.engine.request import FinishReason
from q27app.engine.sequence import Sequence
from q27app.errors import Q27Error

log = logging.getLogger("q27app.engine")


@dataclass(frozen=True)
class Cut:
    """keep: drawn tokens that become text. force: ids that follow them. finish: why the request ends, None to go on.
    num_rows: rows of the run that become state. error: set if finish is ERROR."""

    keep: int
    force: tuple[int, ...] = ()
    finish: FinishReason | None = None
    num_rows: int = 0
    error: Q27Error | None = None


def cut_run(sequence: Sequence, drawn: Seq[int], vocab_size: int) -> Cut:
    """Decide about the accepted run `drawn`, at least one token. Shows it to the guide, so it is called once for a run."""
    request, room = sequence.request, sequence.room
    assert drawn and room > 0, (request.id, len(drawn), room)
    end = None if request.params.ignore_eos else _first_of(drawn, request.eos_ids, room)
    shown = tuple(drawn[:room] if end is None else drawn[:end + 1])
    try:
        cut = _plain(shown, end, room) if request.guide is None else _guided(sequence, shown, end, vocab_size)
    except Exception as error:  # a guide is foreign code: its mistakes end its own request
        log.exception("the guide of request %s failed", request.id)
        problem = error if isinstance(error, Q27Error) else Q27Error(f"the request's guide failed: {error!r:.200}.")
        return Cut(0, (), FinishReason.ERROR, 0, problem)
    return Cut(cut.keep, cut.force, cut.finish, min(len(drawn), cut.keep + 1))


def _first_of(drawn: Seq[int], ids: Seq[int], room: int) -> int | None:
    return next((index for index, token in enumerate(drawn[:room]) if token in ids), None)


def _plain(shown: tuple[int, ...], end: int | None, room: int) -> Cut:
    if end is not None:
        return Cut(end, finish=FinishReason.STOP)
    return Cut(len(shown), finish=FinishReason.LENGTH if len(shown) == room else None)


def _guided(sequence: Sequence, shown: tuple[int, ...], end: int | None, vocab_size: int) -> Cut:
    """The guide sees end-of-text tokens too; one that it keeps ends the request as it would without a guide."""
    guide, room = sequence.request.guide, sequence.room
    assert guide is not None
    decision = guide.advance(shown)
    keep, force = int(decision.keep), tuple(int(token) for token in decision.force)
    if not 0 <= keep <= len(shown):
        raise Q27Error(f"the request's guide keeps {keep} of {len(shown)} tokens.")
    if any(not 0 <= token < vocab_size for token in force):
        raise Q27Error(f"the request's guide forces ids {list(force)}, expected 0 to {vocab_size - 1}.")
    if decision.finish not in (None, "stop", "length"):
        raise Q27Error(f"the request's guide ends it with {decision.finish!r}, expected stop or length.")
    finish = None if decision.finish is None else FinishReason(decision.finish)
    if end is not None and keep > end:
        return Cut(end, finish=finish or FinishReason.STOP)
    if keep < len(shown) and not force and finish is None:
        raise Q27Error("the request's guide drops tokens and says neither what follows nor that the request ends.")
    force = force[:room - keep]
    if finish is None and keep + len(force) >= room:
        finish = FinishReason.LENGTH
    return Cut(keep, force, finish)
