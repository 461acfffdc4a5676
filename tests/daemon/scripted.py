"""A scripted double of the engine: the same door as the real one, tokens from a list, faults on demand."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from q27app.engine.loading import EngineConfig
from q27app.engine.request import FinishReason, Request, RequestStats, TokenEvent, TokenLogprobs
from q27app.errors import BadRequest, EngineDied, Overloaded, Q27Error

Step = str | float | threading.Event | BaseException
"""A text to say, seconds or an event to wait for, or an error to die of."""


@dataclass
class ScriptedStatus:
    state: str = "ready"
    load_progress: float = 1.0
    error: Any = None
    model: dict = field(default_factory=lambda: {"name": "scripted"})
    plan: dict = field(default_factory=lambda: {"max_context": 4096, "num_slots": 1})
    running: list = field(default_factory=list)
    waiting: int = 0
    counters: dict = field(default_factory=lambda: {"steps": 7})
    heartbeat_age_s: float = 0.0

    def to_dict(self) -> dict:
        return {**asdict(self), "error": None if self.error is None else str(self.error)}


class ScriptedEngine:
    """script: steps, or a function from the request to steps. prefill_s: length of a prefill, or what ends it. slots: so many run
    at once.

    Owner of the counters: tests read them once things are quiet.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Sequence[Step] | Callable[[Request], Sequence[Step]] = ("Hello", "!"),
        prefill_s: float | threading.Event = 0.0,
        slots: int = 1,
        max_context: int | None = 65_536,
        max_queue: int = 64,
    ) -> None:
        self.tokenizer, self.script, self.prefill_s, self.max_context = tokenizer, script, prefill_s, max_context
        self.slots, self.max_queue = slots, max_queue
        self.state = ScriptedStatus()
        self.config = EngineConfig()
        self.requests: list[Request] = []
        self.settled: list[tuple[tuple[int, ...], int]] = []
        self.cancels: list[str] = []
        self.verifies: dict | Exception = {}
        self.verified = 0
        self.num_running = 0
        self.said = 0
        self._seen: list[tuple[int, ...]] = []
        self._waiting: deque[tuple[Request, Callable[[TokenEvent], None]]] = deque()
        self._live: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(slots)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None:
        with self._work:
            self._is_closed = True
            for cancelled in self._live.values():
                cancelled.set()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(5)

    def verify(self) -> Future:
        """What `verifies` says: a value, or an error that is raised or ends the future."""
        future: Future = Future()
        self.verified += 1
        if isinstance(self.verifies, BadRequest):
            raise self.verifies
        if isinstance(self.verifies, Exception):
            future.set_exception(self.verifies)
            self.state.state, self.state.error = "failed", self.verifies
        else:
            future.set_result(self.verifies)
        return future

    def reconfigure(self, config: EngineConfig) -> None:
        self.config = config

    def load(self) -> Future:
        return self._become("ready")

    def unload(self) -> Future:
        return self._become("unloaded")

    def _become(self, state: str) -> Future:
        self.state.state = state
        future: Future = Future()
        future.set_result(None)
        return future

    def status(self) -> ScriptedStatus:
        with self._lock:
            self.state.waiting = len(self._waiting)
            self.state.running = [{"id": name} for name in self._live][: self.num_running]
            return self.state

    def settle(self, tokens: Any, system_len: int = 0) -> None:
        """What the daemon believes the next turn begins with."""
        self.settled.append((tuple(tokens), system_len))

    def submit(self, request: Request, deliver: Callable[[TokenEvent], None]) -> None:
        with self._work:
            if self.state.state == "failed":
                raise EngineDied(str(self.state.error))
            if self.state.state != "ready" or len(self._waiting) >= self.max_queue:
                raise Overloaded(f"the queue of {self.max_queue} is full.", retry_after_s=3)
            self.requests.append(request)
            self._live[request.id] = threading.Event()
            self._waiting.append((request, deliver))
            self._work.notify()

    def cancel(self, request_id: str) -> bool:
        with self._work:
            if request_id not in self._live:
                return False
            self.cancels.append(request_id)
            self._live[request_id].set()
            return True

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._live and not self._waiting

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                request, deliver = self._waiting.popleft()
                self.num_running += 1
            cancelled = self._live[request.id]
            event = self._play(request, deliver, cancelled)
            with self._work:
                self.num_running -= 1
                del self._live[request.id]
            deliver(event)

    def _play(
        self, request: Request, deliver: Callable[[TokenEvent], None], cancelled: threading.Event
    ) -> TokenEvent:
        num_cached = max((_shared(old, request.prompt) for old in self._seen), default=0)
        num_cached = min(num_cached, len(request.prompt) - 1)
        self._seen.append(request.prompt)
        if cancelled.is_set():
            return self._end(request, FinishReason.CANCELLED, num_cached, 0)
        deliver(TokenEvent(request.id, prefilled=num_cached))
        if _is_cut_short(self.prefill_s, cancelled):
            return self._end(request, FinishReason.CANCELLED, num_cached, 0)
        deliver(TokenEvent(request.id, prefilled=len(request.prompt)))
        return self._decode(request, deliver, cancelled, num_cached)

    def _decode(
        self, request: Request, deliver: Callable[[TokenEvent], None], cancelled: threading.Event, num_cached: int
    ) -> TokenEvent:
        count = 0
        for step in self.script(request) if callable(self.script) else self.script:
            if isinstance(step, (float, threading.Event)) and _is_cut_short(step, cancelled) or cancelled.is_set():
                return self._end(request, FinishReason.CANCELLED, num_cached, count)
            if isinstance(step, BaseException):
                error = step if isinstance(step, Q27Error) else EngineDied(str(step))
                return self._end(request, FinishReason.ERROR, num_cached, count, error)
            if isinstance(step, str):
                try:
                    reason, tokens, forced = self._accept(request, step, request.params.max_tokens - count)
                except Q27Error as error:  # as the engine does: a guide's refusal ends its own request
                    return self._end(request, FinishReason.ERROR, num_cached, count, error)
                count += len(tokens)
                self.said += len(tokens)
                if tokens:
                    logprobs = tuple(TokenLogprobs(token, -0.25, (token,), (-0.25,)) for token in tokens)
                    deliver(
                        TokenEvent(
                            request.id, tokens, forced, logprobs if request.params.logprobs is not None else ()
                        )
                    )
                if reason is not None:
                    return self._end(request, reason, num_cached, count)
        return self._end(request, FinishReason.STOP, num_cached, count)

    def _accept(
        self, request: Request, text: str, room: int
    ) -> tuple[FinishReason | None, tuple[int, ...], tuple[bool, ...]]:
        """What the guide and the limit leave of a step: (why it ends or None, tokens, forced flags)."""
        tokens = tuple(self.tokenizer.encode(text, control=True))
        is_cut = len(tokens) >= room
        tokens = tokens[: max(0, room)]
        if request.guide is None:
            return FinishReason.LENGTH if is_cut else None, tokens, (False,) * len(tokens)
        decision = request.guide.advance(tokens)
        kept, forced = tokens[: decision.keep], tuple(decision.force)
        reason = FinishReason(decision.finish) if decision.finish else FinishReason.LENGTH if is_cut else None
        return reason, kept + forced, (False,) * len(kept) + (True,) * len(forced)

    @staticmethod
    def _end(
        request: Request, reason: FinishReason, num_cached: int, count: int, error: Q27Error | None = None
    ) -> TokenEvent:
        stats = RequestStats(
            num_prompt=len(request.prompt),
            num_cached=num_cached,
            num_generated=count,
            prefill_ms=1.0,
            decode_ms=2.0,
            num_steps=max(1, count),
        )
        return TokenEvent(request.id, finish=reason, stats=stats, error=error)


class StubbornEngine(ScriptedEngine):
    """Says its text unless the request's guide forbids it; then something that is allowed, the end first.

    step: tokens that it draws before the guide sees them, as a verified run of drafts.
    """

    PREFERRED = b'}]"1:,{[etrufalsn0'

    def __init__(self, tokenizer: Any, text: str, step: int = 1, **options: Any) -> None:
        self._wanted, self._step = tuple(tokenizer.encode(text, control=True)), step
        self._likes = [*tokenizer.eos_ids, *(tokenizer.encode(bytes([code]).decode())[0] for code in self.PREFERRED)]
        super().__init__(tokenizer, (), **options)

    def _decode(self, request: Request, deliver: Any, cancelled: threading.Event, num_cached: int) -> TokenEvent:
        said: list[int] = []
        try:
            while len(said) < request.params.max_tokens:
                run: list[int] = []
                for _ in range(self._step):
                    place = len(said) + len(run)
                    mask = request.guide.mask(run)
                    run.append(self._draw(self._wanted[place] if place < len(self._wanted) else None, mask))
                    if run[-1] in self.tokenizer.eos_ids:
                        break
                decision = request.guide.advance(run)
                fresh = (*run[: decision.keep], *decision.force)
                said += fresh
                if fresh:
                    deliver(TokenEvent(request.id, fresh, (False,) * len(fresh)))
                if decision.finish is not None:
                    return self._end(request, FinishReason(decision.finish), num_cached, len(said))
        except Q27Error as error:
            return self._end(request, FinishReason.ERROR, num_cached, len(said), error)
        return self._end(request, FinishReason.LENGTH, num_cached, len(said))

    def _draw(self, wanted: int | None, mask: Any) -> int:
        if mask is None:
            return self.tokenizer.eos_ids[0] if wanted is None else wanted
        allowed = [token for token in range(self.tokenizer.vocab_size) if mask[token // 32] >> (token % 32) & 1]
        if wanted in allowed:
            return wanted
        return next((token for token in self._likes if token in allowed), allowed[0])


class TickingEngine(ScriptedEngine):
    """One thread for all requests, as the real one: each tick brings every running request its next token.

    text: what each says, a token a tick. tick_s: length of a tick.
    """

    def __init__(self, tokenizer: Any, text: str, tick_s: float, slots: int, max_queue: int) -> None:
        self.text, self.tick_s = text, tick_s
        super().__init__(tokenizer, slots=0, max_queue=max_queue)
        self.requests = deque(maxlen=64)  # type: ignore[assignment]
        self.slots = slots
        self._threads = [threading.Thread(target=self._tick_forever, daemon=True)]
        self._threads[0].start()

    def _tick_forever(self) -> None:
        tokens = tuple(self.tokenizer.encode(self.text))
        running: list[list[Any]] = []
        while not self._is_closed:
            started = time.monotonic()
            with self._lock:
                while self._waiting and len(running) < self.slots:
                    running.append([*self._waiting.popleft(), 0])
            for entry in running:
                self._tick(entry, tokens)
            running = [entry for entry in running if entry[2] >= 0]
            self.num_running = len(running)
            time.sleep(max(0.0, self.tick_s - (time.monotonic() - started)))

    def _tick(self, entry: list[Any], tokens: tuple[int, ...]) -> None:
        request, deliver, count = entry
        reason = FinishReason.STOP if count == len(tokens) else None
        if self._live[request.id].is_set():
            reason = FinishReason.CANCELLED
        if reason is None:
            request.guide.advance(tokens[count : count + 1])
            deliver(TokenEvent(request.id, tokens[count : count + 1], (False,)))
            entry[2] += 1
            return
        entry[2] = -1
        with self._lock:
            del self._live[request.id]
        deliver(self._end(request, reason, 0, count))


def _is_cut_short(pause: float | threading.Event, cancelled: threading.Event) -> bool:
    """Wait so long, or for that; True as soon as the request is cancelled."""
    if isinstance(pause, float):
        return cancelled.wait(pause)
    while not pause.is_set():
        if cancelled.wait(0.002):
            return True
    return False


def _shared(old: Sequence[int], new: Sequence[int]) -> int:
    return next(
        (index for index, (left, right) in enumerate(zip(old, new)) if left != right), min(len(old), len(new))
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """True as soon as `condition` holds; False after the timeout. For threads."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
