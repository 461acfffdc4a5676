"""One iteration of the engine on a loaded model: admit -> next pass -> start -> finish -> cut -> commit -> apply -> deliver.

Receivers wake other threads, which then want the interpreter. On a device that computes by itself they do that while it does: what a
step brought is delivered after the next step's decode pass was started; only a first token goes out before its successors are drafted.
Owned by the engine thread. What a step raises:

    Q27Error                              ends the requests of that pass: nothing else was touched by it
    GpuError, EngineDied, anything else   is passed on, and ends the engine
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from q27app.engine.ahead import work_after
from q27app.engine.cut import Cut, cut_run
from q27app.engine.loading import Loaded
from q27app.engine.prefix_cache import Match
from q27app.engine.request import FinishReason, TokenEvent
from q27app.engine.runner import Pass, Runner
from q27app.engine.scheduler import Scheduler
from q27app.engine.sequence import Sequence, Status
from q27app.engine.settle import Settler
from q27app.engine.status import Meter
from q27app.engine.warm_up import WarmUp
from q27app.engine.work import Work
from q27app.errors import EngineDied, GpuError, Overloaded, Q27Error

log = logging.getLogger("q27app.engine")


class Stepper:
    """forget(sequence): called before the final event of a request is handed out."""

    def __init__(self, loaded: Loaded, meter: Meter, forget: Callable[[Sequence], None], checks_pools: bool) -> None:
        needs_mtp = loaded.drafter is not None and loaded.drafter.needs_mtp
        self._scheduler = Scheduler(loaded.slots, loaded.blocks, loaded.prefill_chunk, loaded.vocab_size,
                                    loaded.drafter, loaded.prefix_cache)
        go_ahead = loaded.drafter.go_ahead if loaded.drafter is not None and needs_mtp else None
        self._runner = Runner(loaded.model, loaded.state, loaded.vocab_size, needs_mtp, go_ahead)
        self._drafter, self._cache = loaded.drafter, loaded.prefix_cache
        self._settler, self._warm_up = Settler(self._scheduler), loaded.warm_up
        self._meter, self._forget, self._checks_pools = meter, forget, checks_pools
        self._lost: list[Sequence] = []
        self._behind: Pass | None = None
        """Started behind the pass that was finished last."""
        if self._warm_up is not None:
            self._take_prices(self._warm_up)

    def _take_prices(self, warm_up: WarmUp) -> None:
        """A size's first run loads its kernels, its second one tells the price."""
        for rows, times in warm_up.prefill_ms.items():
            if len(times) > 1:
                self._scheduler.pace.record(rows, times.pop())

    @property
    def has_work(self) -> bool:
        """Somebody waits for something."""
        return len(self._scheduler.sequences()) > self._settler.is_running

    @property
    def has_spare_work(self) -> bool:
        """There is something to do while nobody waits."""
        return self._settler.has_work or self._cache is not None and self._cache.has_spare_work or self._warms_up

    @property
    def _warms_up(self) -> bool:
        return self._warm_up is not None and self._warm_up.has_work

    def add(self, sequence: Sequence) -> None:
        self._settler.preempt()
        self._scheduler.add(sequence)

    def settle(self, tokens: tuple[int, ...], system_len: int) -> None:
        """The next turn of a conversation probably begins with these: compute their state when there is time."""
        if self._cache is not None:
            with contextlib.suppress(MemoryError):   # a hint
                self._settler.add(tokens, system_len)

    def end_spare(self) -> None:
        """Stop what runs while nobody waits."""
        self._settler.preempt()
        self._deliver_all()

    def cancel(self, sequence: Sequence) -> None:
        """Ends it now; slot and blocks are free for the next step."""
        if not sequence.is_finished:
            self._scheduler.finish(sequence, FinishReason.CANCELLED)

    def end_all(self) -> None:
        """The engine is being closed."""
        for sequence in self._scheduler.sequences():
            self._scheduler.finish(sequence, FinishReason.ERROR, Overloaded("the engine is shutting down.", "Try again when it is back."))
        self._deliver_all()
        self._check()

    def step(self) -> None:
        """One pass, if anybody has work, and everything that follows from it; else a step of the spare work."""
        if not self.has_work:
            self._use_spare_time()
        for sequence, match in self._scheduler.admit():
            self._open(sequence, match)
        if self._behind is not None and all(part.is_void for part in self._behind.work.parts):
            self._behind = None
        work = self._scheduler.next_work() if self._behind is None else self._behind.work
        if work is not None:
            started, fresh = time.monotonic(), self._runner.num_fresh
            self._run(work)
            self._count(work, (time.monotonic() - started) * 1e3, self._runner.num_fresh == fresh)
        self._end_lost()
        has_first_token = work is not None and work.phase == "prefill" and any(part.draws for part in work.parts)
        if has_first_token or not (self._runner.is_ahead and self._scheduler.decodes_next):
            self._deliver_all()
        self._check()

    def _use_spare_time(self) -> None:
        """Settle what the next turns begin with; when that is done write to the disk; then warm up."""
        if not self._settler.is_running:
            self._settler.begin()
        if self._settler.is_running:
            return
        if self._cache is not None and self._cache.has_spare_work:
            self._cache.spare_step()
        elif self._warm_up is not None and self._warm_up.has_work:
            self._warm_up.step()
            self._take_prices(self._warm_up)

    def _count(self, work: Work, ms: float, is_usual: bool) -> None:
        """is_usual: the pass took what the next ones of its shape will."""
        rows = sum(len(part.tokens) for part in work.parts)
        if work.phase == "prefill":
            self._scheduler.pace.record(rows, ms)
        elif self._drafter is not None and is_usual:
            self._drafter.passed(rows, ms)
        self._meter.count_pass(work.phase == "prefill", rows)

    def _open(self, sequence: Sequence, match: Match | None) -> None:
        try:
            self._runner.open(sequence.slot, None if match is None else match.restore)
        except (GpuError, EngineDied):
            raise
        except Q27Error as error:
            self._scheduler.finish(sequence, FinishReason.ERROR, error)

    def _run(self, work: Work) -> None:
        try:
            running, self._behind = self._take_behind() or self._runner.start(work), None
            if self._runner.is_ahead:
                self._start_behind(work)
                self._deliver()
                if work.phase == "prefill" and self._drafter is not None:
                    self._drafter.prompts_end([part.sequence for part in work.parts if part.draws and not part.is_void])
            drawn = self._runner.finish(running)
            vocab_size = self._scheduler.vocab_size
            cuts: list[Cut | None] = [cut_run(part.sequence, result.tokens, vocab_size)
                                      if result.tokens and not part.is_void else None
                                      for part, result in zip(work.parts, drawn, strict=True)]
            if work.is_deferred and not work.commits_what_is_accepted:
                self._runner.commit(work.rows_to_commit(cuts))
            self._scheduler.apply(work, drawn, cuts)
            self._rewind_diverted()
        except (GpuError, EngineDied):
            raise
        except Q27Error as error:
            log.exception("a %s pass of %d requests failed", work.phase, len(work.parts))
            for part in work.parts:
                if not part.sequence.is_finished:
                    self._scheduler.finish(part.sequence, FinishReason.ERROR, error)

    def _take_behind(self) -> Pass | None:
        """The pass that is under way, drawn as the guides want it by now."""
        if self._behind is not None and self._scheduler.constrain(self._behind.work):
            self._runner.draw(self._behind)
        return self._behind

    def _start_behind(self, work: Work) -> None:
        """Start the pass after this one, if it is known already."""
        following = work_after(self._scheduler, work)
        if following is not None:
            self._behind = self._runner.start_behind(following)

    def _rewind_diverted(self) -> None:
        """The pass that was started behind computes what was drawn, also where a guide has put something else in its place."""
        for part in self._behind.work.parts if self._behind is not None else ():
            if part.sequence.is_diverted and not part.sequence.is_finished:
                self._open(part.sequence, self._scheduler.rewind(part.sequence))

    def _deliver(self) -> None:
        """Hand out the events, in order. A receiver that raises loses its request: `_end_lost` cancels it."""
        events = self._scheduler.events
        while events:
            sequence, event = events.popleft()
            if not self.hand_out(sequence, event):
                self._lost.append(sequence)

    def _end_lost(self) -> None:
        """No pass is under way."""
        while self._lost:
            self.cancel(self._lost.pop())

    def _deliver_all(self) -> None:
        """No pass is under way."""
        while self._scheduler.events:
            self._deliver()
            self._end_lost()

    def hand_out(self, sequence: Sequence, event: TokenEvent) -> bool:
        """Deliver one event; False if its receiver raised."""
        if event.finish is not None:
            self._forget(sequence)
        self._meter.count_event(sequence, event)
        return deliver(sequence, event)

    def abandon(self) -> None:
        """The engine has died: hand out what had been decided before."""
        while self._scheduler.events:
            self.hand_out(*self._scheduler.events.popleft())

    def _check(self) -> None:
        if self._checks_pools:
            self._scheduler.check()


def deliver(sequence: Sequence, event: TokenEvent) -> bool:
    """Call the request's receiver, which is foreign code and must not end the engine; False if it raised."""
    try:
        sequence.deliver(event)
        return True
    except Exception:
        log.exception("the receiver of request %s failed", event.request_id)
        return False


def end_unserved(sequence: Sequence, error: Q27Error) -> TokenEvent:
    """The final event of a sequence that no scheduler holds (any more)."""
    sequence.status = Status.FINISHED
    return sequence.final_event(FinishReason.ERROR, error)
