"""Settling: what a turn generated is prefilled while nobody waits, so that the next turn finds it in exact state.

Decode computes positions with other rounding than prefill, so its state is never kept. A task is the token prefix that
the next turn will probably begin with; it runs as a background sequence without an answer, and gives way to any request
after at most one pass, leaving what it has computed. Owned by the engine thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque

from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.engine.scheduler import Scheduler
from q27app.engine.sequence import Sequence
from q27app.kernels.batch import BLOCK_POSITIONS

MAX_TASKS = 8


class Settler:
    """Tasks in order of arrival; when there are too many the oldest goes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: deque[Request] = deque(maxlen=MAX_TASKS)
        self._numbers = itertools.count(1)
        self._sequence: Sequence | None = None

    def add(self, tokens: tuple[int, ...], system_len: int) -> None:
        """Queue a prefix; less than a block of it is nothing to keep."""
        size = len(tokens) // BLOCK_POSITIONS * BLOCK_POSITIONS
        if size:
            name = f"settle-{next(self._numbers)}"
            params = SamplingParams(max_tokens=0)
            self._tasks.append(Request(name, tokens[:size], params, system_len=system_len, is_background=True))

    @property
    def is_running(self) -> bool:
        return self._sequence is not None and not self._sequence.is_finished

    @property
    def has_work(self) -> bool:
        return self.is_running or bool(self._tasks)

    def begin(self) -> None:
        """Start the next task that is not covered yet, if none runs. Nobody else may have work."""
        cache = self._scheduler.prefix_cache
        while self._tasks and not self.is_running and cache is not None:
            request = self._tasks.popleft()
            with contextlib.suppress(MemoryError):   # nobody has asked for it
                if not cache.settles(request.prompt_ids):
                    self._sequence = Sequence(request, lambda event: None, 0)
                    self._scheduler.add(self._sequence)

    def preempt(self) -> None:
        """A request has come: stop, and go on later with what is left then."""
        if self.is_running:
            assert self._sequence is not None
            if len(self._tasks) < MAX_TASKS:
                self._tasks.appendleft(self._sequence.request)
            self._scheduler.finish(self._sequence, FinishReason.CANCELLED)
        self._sequence = None
