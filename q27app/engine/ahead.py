"""The decode pass behind one that is under way, started before anybody knows what that one draws: its tokens are the draws, which
the device puts in place. Between two such passes the device does not wait for the host.

A pass may be started so where nothing that is drawn decides what it computes: nobody waits, nobody will have drafts, and every part is
a plain row whose guide, if there is one, takes what is drawn as it is or ends the answer, as far as can be told. A sequence that turns
out to have ended has a row in vain: its slot and blocks may have another owner by then, but whatever that one does comes later on the
device. Only states that prefill computed are kept, so the row leaves nothing behind. Where a guide begins to constrain what is drawn,
as at the end of reasoning, the row is drawn again with its mask (`Scheduler.constrain`). Where it diverts an answer all the same,
which is rare, the answer's state is computed again (`Scheduler.rewind`).
"""

from __future__ import annotations

from q27app.engine.request import Guide, is_open
from q27app.engine.scheduler import Scheduler
from q27app.engine.work import Part, Work
from q27app.kernels.batch import in_flight


def work_after(scheduler: Scheduler, work: Work) -> Work | None:
    """The pass behind `work`, which was started; None where it has to wait for it."""
    if work.phase != "decode" or scheduler.waiting or scheduler.prefilling:
        return None
    alive = [(row, part) for row, part in enumerate(work.parts) if not part.is_void]
    if not alive or len(alive) != len(scheduler.running) or not all(_is_plain(part) for _, part in alive):
        return None
    if scheduler.drafter is not None and not scheduler.drafter.rests([part.sequence for _, part in alive]):
        return None
    parts = [Part(part.sequence, part.start + 1, [in_flight(row)]) for row, part in alive if part.sequence.room > 1]
    return Work("decode", parts) if parts else None


def _is_plain(part: Part) -> bool:
    """Its one row is the newest token, and what it draws changes nothing about how the next one is drawn."""
    request = part.sequence.request
    return (part.draws and len(part.tokens) == 1 and not part.num_drafts and part.sequence.counts is None
            and request.params.logprobs is None and not request.prompt_logits and _lets_go(request.guide))


def _lets_go(guide: Guide | None) -> bool:
    """What is drawn will stay, unless the answer ends."""
    try:
        return guide is None or (is_open(guide) and not getattr(guide, "may_divert", True))
    except Exception:   # it is shown what was drawn, and its mistakes end its own request there
        return False
