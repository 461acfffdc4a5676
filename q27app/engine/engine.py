"""Engine: one thread that owns backend, state, pools and sequences, behind a door that any thread may use.

    any thread      submit, cancel, load, unload, drain, status, close
    engine thread   read the inbox, obey orders, `Stepper.step`; again

The two share `_inbox` and, behind `_lock`, the state, the live sequences and the counters. Every accepted request gets
exactly one final event: from the scheduler while the thread lives, from `_die` if it ends. When nothing runs the thread
waits for the inbox, at most IDLE_S, and stamps its heartbeat, also without a model.

    state      unloaded -> loading -> ready -> draining -> unloaded, on orders; failed: the model could not be loaded at
               start, or the thread has died; closed
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any

from q27app.engine.limits import check_request
from q27app.engine.loading import EngineConfig, Loaded, OpenModel, check_config, loading_error, open_model as open_real_model
from q27app.engine.request import Request
from q27app.engine.sequence import Deliver, Sequence, Status
from q27app.engine.status import EngineStatus, Meter
from q27app.engine.stepper import Stepper, deliver, end_unserved
from q27app.errors import BadRequest, EngineDied, GpuError, Overloaded, Q27Error

log = logging.getLogger("q27app.engine")

IDLE_S = 5.0
CLOSE_TIMEOUT_S = 60.0
MAX_RETRY_S = 60


class _Closing(Exception):
    """Loading is given up because the engine is being closed."""


class Engine:
    """See the module. open_model: makes what runs, for tests."""

    def __init__(self, config: EngineConfig, open_model: OpenModel | None = None) -> None:
        check_config(config)
        self.config = config
        self._open_model = open_model or open_real_model
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._state = "unloaded"
        self._progress = 0.0
        self._error: Q27Error | None = None
        self._has_died = False
        self._was_ready = False
        self._last_order = "load"
        self._live: dict[str, Sequence] = {}
        self._meter = Meter()
        self._heartbeat = time.monotonic()
        self._is_closing = False
        self._loaded: Loaded | None = None
        # the engine thread's own
        self._orders: deque[tuple[str, Future]] = deque()
        self._stepper: Stepper | None = None

    # any thread

    def start(self) -> None:
        """Start the thread and begin to load the model; `status` tells how that goes."""
        with self._lock:
            assert self._thread is None and not self._is_closing, "an engine is started once"
            self._thread = threading.Thread(target=self._main, name="q27app-engine", daemon=True)
            self._order_locked("load")
            self._thread.start()

    @property
    def max_context(self) -> int | None:
        """Window of a request, tokens; None without a model."""
        loaded = self._loaded
        return None if loaded is None else loaded.plan.max_context

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. deliver(TokenEvent) is called on the engine thread and must neither block nor raise.

        Raises, before anything is queued: EngineDied; Overloaded while there is no model, while draining, or with a full
        queue; BadRequest or ContextTooLong for a request that cannot be served.
        """
        with self._lock:
            loaded = self._ready_locked()
        limit = check_request(request, loaded.vocab_size, loaded.plan.max_context)
        sequence = Sequence(request, deliver, limit)
        with self._lock:
            if self._ready_locked() is not loaded:
                raise Overloaded("the model has just been loaded anew.", "Try again.", 1)
            if len(self._live) >= loaded.plan.num_slots + self.config.max_queue:
                self._meter.count_request(is_refused=True)
                raise Overloaded(f"{loaded.plan.num_slots} requests run and {self.config.max_queue} wait, no more are taken.",
                                 "Try again later.", self._retry_locked(loaded.plan.num_slots))
            if request.id in self._live:
                raise BadRequest(f"a request {request.id[:80]!r} is already in work.", param="id")
            self._live[request.id] = sequence
            self._meter.count_request()
            self._inbox.put(("submit", sequence))

    def cancel(self, request_id: str) -> bool:
        """End a request soon, wherever it is; False if there is none of this name (any more)."""
        with self._lock:
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._inbox.put(("cancel", sequence))
            return sequence is not None

    def settle(self, tokens: Seq[int], system_len: int = 0) -> None:
        """The next turn of a conversation will probably begin with these tokens: compute their state while nobody waits.

        A hint; one that cannot be used is dropped."""
        with self._lock:
            loaded = self._loaded
            if self._state != "ready" or loaded is None or loaded.prefix_cache is None:
                return
            if 0 < len(tokens) <= loaded.plan.max_context and 0 <= min(tokens) and max(tokens) < loaded.vocab_size:
                self._inbox.put(("settle", (tuple(tokens), system_len)))

    def reconfigure(self, config: EngineConfig) -> None:
        """What the next load opens; max_queue counts at once. Raises UsageError."""
        check_config(config)
        with self._lock:
            self.config = config

    def load(self) -> Future:
        """Make the engine ready, also after `drain`. The future ends when it is, or with what went wrong."""
        return self._order("load")

    def unload(self) -> Future:
        """Refuse new requests, let the others finish, then give all memory back."""
        return self._order("unload")

    def drain(self) -> Future:
        """Refuse new requests; the future ends when the others have finished."""
        return self._order("drain")

    def verify(self) -> Future:
        """Compare the weights in memory with what they were when they had been loaded. The future's value: {"weights": n,
        "seconds": s}. A difference ends the engine: what it computes cannot be trusted."""
        with self._lock:
            loaded = self._ready_locked()
            if not loaded.checksums:
                raise BadRequest("the weights' checksums were not kept.", "Start with --verify-weights, or set kernels.verify_weights.")
            return self._order_locked("verify")

    def status(self) -> EngineStatus:
        """A snapshot."""
        with self._lock:
            sequences, loaded = list(self._live.values()), self._loaded
            held = [sequence for sequence in sequences if sequence.status in (Status.PREFILLING, Status.RUNNING)]
            return EngineStatus(
                state=self._state,
                load_progress=self._progress,
                error=self._error,
                model=dict(loaded.info) if loaded else {},
                plan=loaded.plan.to_dict() if loaded else {},
                running=[sequence.describe() for sequence in held],
                waiting=sum(sequence.status is Status.WAITING for sequence in sequences),
                counters=self._meter.counters(),
                rates=self._meter.rates(),
                drafts=loaded.drafter.to_dict() if loaded and loaded.drafter else {},
                cache=loaded.prefix_cache.to_dict() if loaded and loaded.prefix_cache else {},
                heartbeat_age_s=round(max(0.0, time.monotonic() - self._heartbeat), 3),
            )

    def close(self) -> None:
        """End every request, give everything back, end the thread. Waits; may be called again."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
            self._inbox.put(("close", None))
            if thread is None:
                self._state = "closed"
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                log.error("the engine thread has not ended within %.0f s; it is left behind", CLOSE_TIMEOUT_S)
            with self._lock:
                self._state = "closed"

    # inside, any thread, lock held

    def _ready_locked(self) -> Loaded:
        if self._has_died or self._state == "failed":
            raise EngineDied(f"the engine has failed: {self._error}", "Restart the daemon.")
        if self._state != "ready" or self._loaded is None or self._is_closing:
            raise Overloaded(f"the model is not ready: {self._state}.", "Try again later; /ready says when.")
        return self._loaded

    def _retry_locked(self, num_slots: int) -> int:
        """Seconds until a request has probably ended."""
        return min(MAX_RETRY_S, max(1, round(self._meter.request_seconds() / num_slots)))

    def _order(self, kind: str) -> Future:
        with self._lock:
            return self._order_locked(kind)

    def _order_locked(self, kind: str) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()   # whoever waits may leave; the order is obeyed and its end told all the same
        self._last_order = self._last_order if kind == "verify" else kind
        if self._has_died or self._is_closing or self._thread is None:
            why = "is not started" if self._thread is None else "has ended"
            future.set_exception(EngineDied(f"the engine {why}: {self._error or self._state}"))
            return future
        if kind == "load" and self._loaded is None:
            self._state, self._progress, self._error = "loading", 0.0, None
        elif kind in ("unload", "drain") and self._state == "ready":
            self._state = "draining"
        self._inbox.put(("order", (kind, future)))
        return future

    # engine thread

    def _main(self) -> None:
        try:
            while not self._is_closing:
                self._read_inbox(0.0 if self._is_busy() or self._orders_ready() or self._has_spare_work() else IDLE_S)
                self._heartbeat = time.monotonic()
                self._obey()
                if self._stepper is not None:
                    self._stepper.step()
            self._shut_down()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._die(error)

    def _read_inbox(self, timeout_s: float) -> None:
        """Everything that has arrived; waits for the first message if a timeout is given."""
        try:
            kind, value = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                self._receive(kind, value)
                kind, value = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _receive(self, kind: str, value: Any) -> None:
        if kind == "order":
            self._orders.append(value)
        elif kind == "submit" and self._stepper is not None:
            self._stepper.add(value)
        elif kind == "submit":
            self._end_unserved(value, Overloaded("the model was unloaded before the request began.", "Try again later; /ready says when."))
        elif kind == "cancel" and self._stepper is not None:
            self._stepper.cancel(value)
        elif kind == "settle" and self._stepper is not None:
            self._stepper.settle(*value)

    def _is_busy(self) -> bool:
        return self._stepper is not None and self._stepper.has_work

    def _has_spare_work(self) -> bool:
        return self._stepper is not None and self._stepper.has_spare_work

    def _forget(self, sequence: Sequence) -> None:
        """The request has ended; its name is free again before its receiver knows."""
        with self._lock:
            self._live.pop(sequence.request.id, None)

    def _end_unserved(self, sequence: Sequence, error: Q27Error) -> None:
        event = end_unserved(sequence, error)
        self._forget(sequence)
        self._meter.count_event(sequence, event)
        deliver(sequence, event)

    # orders: load, unload, drain, one after the other

    def _orders_ready(self) -> bool:
        """Loading and verifying begin at once, the others wait until nobody runs."""
        return bool(self._orders) and (self._orders[0][0] in ("load", "verify") or not self._is_busy())

    def _obey(self) -> None:
        while self._orders_ready():
            kind, future = self._orders.popleft()
            if kind == "load":
                self._load(future)
            elif kind == "verify":
                self._verify(future)
            elif kind == "unload":
                self._unload()
                future.set_result(None)
            else:
                future.set_result(None)

    def _load(self, future: Future) -> None:
        try:
            if self._loaded is None:
                with self._lock:
                    self._state = "loading"
                self._install(self._open_model(self.config, self._report))
        except _Closing:
            future.set_exception(EngineDied("the engine was closed while it loaded."))
            return
        except Exception as problem:   # whatever it is, nothing of that model is there, and another may be loaded
            error = loading_error(problem)
            with self._lock:
                self._state, self._error = "unloaded" if self._was_ready else "failed", error
            future.set_exception(error)
            return
        with self._lock:
            self._state = "ready" if self._last_order == "load" else "draining"
            self._progress, self._error, self._was_ready = 1.0, None, True
        self._meter.count_load()
        future.set_result(None)

    def _verify(self, future: Future) -> None:
        loaded, started = self._loaded, time.monotonic()
        if loaded is None:
            future.set_exception(Overloaded("the model was unloaded meanwhile."))
            return
        now = loaded.model.backend.checksums()
        changed = [name for (name, before), (_, after) in zip(loaded.checksums, now, strict=True) if before != after]
        if changed:
            error = GpuError(f"{len(changed)} of {len(now)} weights in memory are not what was loaded: {', '.join(changed[:3])[:300]}.",
                             "Restart the daemon; if it comes back, the card's memory or another program is at fault.")
            with self._lock:   # whoever waits for the future finds the engine failed
                self._state, self._error, self._has_died = "failed", error, True
            future.set_exception(error)
            raise error
        future.set_result({"weights": len(now), "seconds": round(time.monotonic() - started, 3)})

    def _report(self, share: float) -> None:
        """Progress of loading; gives up when the engine is closed."""
        self._heartbeat = time.monotonic()
        self._progress = min(1.0, max(0.0, share))
        if self._is_closing:
            raise _Closing

    def _install(self, loaded: Loaded) -> None:
        self._stepper = Stepper(loaded, self._meter, self._forget, self.config.checks_pools)
        with self._lock:
            self._loaded = loaded

    def _unload(self) -> None:
        with self._lock:
            loaded, self._loaded = self._loaded, None
            self._state = "failed" if self._has_died else "unloaded"
            self._progress = 0.0
        if self._stepper is not None and not self._has_died:
            self._stepper.end_spare()
        self._stepper = None
        if loaded is not None:
            if self._has_died and loaded.prefix_cache is not None:
                loaded.prefix_cache.give_up()
            loaded.close()
            del loaded
            gc.collect()

    # ends

    def _shut_down(self) -> None:
        """close() was called: requests end with Overloaded, orders with EngineDied."""
        self._read_inbox(0.0)
        if self._stepper is not None:
            self._stepper.end_all()
        self._fail_orders(EngineDied("the engine has been closed."))
        self._unload()
        with self._lock:
            self._state = "closed"

    def _fail_orders(self, error: EngineDied) -> None:
        for _, future in self._orders:
            future.set_exception(error)
        self._orders.clear()

    def _die(self, cause: BaseException) -> None:
        """The thread ends. Everybody who waits for something gets it now: an EngineDied."""
        log.critical("the engine died", exc_info=cause)
        message = str(cause) if isinstance(cause, Q27Error) else f"{type(cause).__name__}: {cause}"
        error = EngineDied(f"the engine died: {message[:500]}", "Restart the daemon; the log has the details.")
        error.__cause__ = cause
        with self._lock:
            self._state, self._error, self._has_died = "failed", error, True
        if self._stepper is not None:
            self._stepper.abandon()
        for sequence in list(self._live.values()):
            self._end_unserved(sequence, error)
        while not self._inbox.empty():
            kind, value = self._inbox.get_nowait()
            if kind == "order":
                self._orders.append(value)
        self._fail_orders(error)
        try:
            self._unload()
        except BaseException:
            log.exception("the dead engine's memory could not be given back")
