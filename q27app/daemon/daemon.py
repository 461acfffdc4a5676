"""What all handlers share, and the record of each request in flight.

Owner of everything here: the loop thread. The engine is behind its thread-safe door; tokenizer and template are
immutable and may be used from the executor too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from q27app.daemon.capture import Capture
from q27app.daemon.hub import Hub
from q27app.daemon.inbox import Bell
from q27app.daemon.access import load_keys
from q27app.daemon.machine import Machine
from q27app.daemon.residence import Residence
from q27app.daemon.turns import Turns
from q27app.errors import Overloaded, Q27Error
from q27app.metrics import Metrics

if TYPE_CHECKING:
    from q27app.chat.grammar import Constraints
    from q27app.chat.template import Template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.config import Config
    from q27app.daemon.reload import Reloaded
    from q27app.engine.engine import Engine
    from q27app.engine.request import RequestStats

log = logging.getLogger("q27app.requests")

HEARTBEAT_LIMIT_S = 120.0
"""Age of the engine's last sign of life at which it counts as hung."""
EXTRA_ACTIVE = 256
"""Requests that may be in flight beside those that wait: running, being read, being rendered, being written."""
MIN_EXPLAINED = 256
"""Tokens of an earlier text from which on it is worth a log line that they were computed again."""
NUM_WORKERS = 2
"""Threads that render and tokenise long prompts."""


@dataclass
class RequestRecord:
    """One request for an answer, from its head to its last byte. `finish` is "" until it has ended."""

    id: str
    dialect: str
    client: str
    received_at: float
    model: str = ""
    phase: str = "reading"
    """reading | waiting (for the model) | rendering | queued | prefill | decode"""
    num_prompt: int = 0
    num_cached: int = 0
    num_prefilled: int = 0
    num_generated: int = 0
    num_reasoning: int = 0
    num_calls: int = 0
    num_missed: int = 0
    rescues: Counter[str] = field(default_factory=Counter)
    """Calls that were repaired, by kind of mistake."""
    missed: list[str] = field(default_factory=list)
    """Texts that looked like a call and could not be read as one; bounded."""
    body: dict[str, Any] | None = None
    """What was asked for, as it came; kept only where requests are captured."""
    engine_ids: list[str] = field(default_factory=list)
    """Its requests in the engine, one for each answer."""
    seed: int | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish: str = ""
    has_ended: bool = False
    """True once the engine has delivered its final event."""
    give_up: Callable[[], None] | None = None
    """Ends what is waited for before it is in the engine: the model, its prompt's tokens."""
    is_cancelled: bool = False
    cancelled_by: Q27Error | None = None
    """What its client is told; None: it was the operator, or nobody is told."""
    stats: Any = None

    @property
    def first_token_ms(self) -> float | None:
        return None if self.first_token_at is None else (self.first_token_at - self.received_at) * 1e3

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate, the first token excluded; None while there are fewer than two."""
        if self.first_token_at is None or self.num_generated < 2 or self.last_token_at == self.first_token_at:
            return None
        return (self.num_generated - 1) / (self.last_token_at - self.first_token_at)

    def to_dict(self) -> dict[str, Any]:
        """For /status and events."""
        return {
            "id": self.id,
            "api": self.dialect,
            "client": self.client,
            "model": self.model,
            "phase": self.phase,
            "age_s": round(time.monotonic() - self.received_at, 3),
            "num_prompt": self.num_prompt,
            "num_cached": self.num_cached,
            "num_prefilled": self.num_prefilled,
            "num_generated": self.num_generated,
            "num_reasoning": self.num_reasoning,
            "num_tool_calls": self.num_calls,
            "num_missed_calls": self.num_missed,
            "rescued_calls": dict(self.rescues),
            "first_token_ms": _rounded(self.first_token_ms),
            "tokens_per_s": _rounded(self.tokens_per_s),
            "finish": self.finish,
        }


class Daemon:
    """The shared state. engine, tokenizer, template, config: what `make_app` was given."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, template: Template, config: Config) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.boot_id = secrets.token_hex(5)
        self.started_at = time.time()
        self.hub = Hub()
        self.active: dict[str, RequestRecord] = {}
        self.is_draining = False
        self.executor = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="q27app-text")
        self.machine = Machine(self.executor)
        self.metrics = Metrics(lambda: self.engine.status().to_dict(), lambda: self.machine.latest)
        self.capture = _open_capture(config)
        self.verified: tuple[float, dict[str, Any]] | None = None
        """When the weights were last compared, and what came of it."""
        self._counter = itertools.count(1)
        self._lock = threading.Lock()
        self.turns = Turns(self)
        self.residence = Residence(self)
        self.keys = load_keys(config)
        self.reread: Callable[[], Config] | None = None
        """Gives the configuration as it stands now, for a reload."""
        self.reloading = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self.last_reload: Reloaded | None = None
        self._constraints: tuple[int, Constraints] | None = None
        self._bell: Bell | None = None

    def bell(self) -> Bell:
        """What tells the running loop that answers have arrived. On the loop."""
        if self._bell is None:
            self._bell = Bell()
        return self._bell

    def constraints(self) -> Constraints:
        """The compiler of answer forms for the served vocabulary. Any thread; the first call takes about a second."""
        from q27app.chat.grammar import Constraints

        size = int(self.engine.status().model.get("vocab_size") or self.tokenizer.vocab_size)
        with self._lock:
            if self._constraints is None or self._constraints[0] != size:
                self._constraints = (size, Constraints(self.tokenizer, size))
            return self._constraints[1]

    def install(self, config: Config, tokenizer: Tokenizer, template: Template) -> None:
        """Another model, with its configuration and texts. Nobody is in the engine."""
        self.config, self.tokenizer, self.template = config, tokenizer, template
        self.turns, self._constraints = Turns(self), None

    @property
    def model_id(self) -> str:
        """The name under which the model is listed: its file's name without .q27."""
        path = Path(self.config.model.path)
        return path.stem if path.suffix == ".q27" else path.name

    def next_id(self) -> str:
        """Unique across restarts."""
        return f"{self.boot_id}{next(self._counter):x}"

    def begin(self, request_id: str, dialect: str, client: str) -> RequestRecord:
        """Open the record of a request for an answer. Raises Overloaded while draining or over the limit."""
        limit = self.config.server.max_queue + EXTRA_ACTIVE
        if len(self.active) >= limit:
            raise Overloaded(f"{limit} requests are in flight.", "Try again later; server.max_queue sets the limit.")
        if self.is_draining:
            raise shutting_down()
        record = RequestRecord(request_id, dialect, client, time.monotonic())
        self.active[record.id] = record
        self.metrics.active.inc()
        return record

    def cancel(self, record: RequestRecord, error: Q27Error | None = None) -> None:
        """End a request, in the engine or before it has come there, once, unless it has ended by itself. error: see
        `RequestRecord.cancelled_by`."""
        if not (record.has_ended or record.is_cancelled):
            record.is_cancelled, record.cancelled_by = True, error
            if record.give_up is not None:
                record.give_up()
            for name in record.engine_ids:
                self.engine.cancel(name)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """It goes on whether or not anybody waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def end(self, record: RequestRecord) -> None:
        """Close the record: metrics, one log line, one event, and its file where requests are captured. Never raises: the reply has
        been sent."""
        del self.active[record.id]
        self.residence.touch()
        try:
            self._tell(record)
        except Exception:
            log.exception("request %s has ended, and not all of that could be told", record.id)

    def _tell(self, record: RequestRecord) -> None:
        self._count(record)
        fields = record.to_dict() | _ending(record.stats)
        if self.capture is not None:
            kept = {**fields, "received": round(time.time() - fields["age_s"], 3), "seed": record.seed,
                    "missed": record.missed, "body": record.body}
            self.executor.submit(self.capture.write, record.id, kept)
        self.hub.publish("request", **fields)
        line = {
            "id": record.id,
            "api": record.dialect,
            "client": record.client,
            "prompt": record.num_prompt,
            "cached": record.num_cached,
            "generated": record.num_generated,
            "reasoning": record.num_reasoning,
            "calls": record.num_calls,
            "missed": record.num_missed,
            "rescued": ",".join(f"{mode}:{count}" for mode, count in sorted(record.rescues.items())) or 0,
            "first_token_ms": fields["first_token_ms"],
            "tok/s": fields["tokens_per_s"],
            "accepted/step": fields["accepted_per_step"],
            "drafts": _drafts_of(record.stats),
            "seed": record.seed,
            "finish": record.finish,
        }
        log.info("%s", " ".join(f"{name}={value}" for name, value in line.items()))
        self._explain_reuse(record)

    def _explain_reuse(self, record: RequestRecord) -> None:
        """Name the reason, and the token that the prompt left the earlier text at, where half of it was computed again."""
        reuse = None if record.stats is None else record.stats.reuse
        if reuse is None or reuse.reason in ("", "new") or reuse.possible < MIN_EXPLAINED:
            return
        expected, given = (self.tokenizer.token_name(token) if token >= 0 else "(end)"
                           for token in (reuse.expected, reuse.given))
        log.info("id=%s reused %d of %d possible tokens, reason=%s: token %d is %r (%d), the earlier text had %r (%d)", record.id,
                 reuse.num_tokens, reuse.possible, reuse.reason, reuse.shared, given, reuse.given, expected, reuse.expected)

    def _count(self, record: RequestRecord) -> None:
        metrics, api = self.metrics, record.dialect
        metrics.active.dec()
        outcome = record.finish.partition(":")[0]
        metrics.requests.labels(api, outcome).inc()
        metrics.request_seconds.labels(api).observe(time.monotonic() - record.received_at)
        if outcome == "disconnected":
            metrics.disconnects.labels(record.phase).inc()
        if record.first_token_ms is not None:
            metrics.ttft_seconds.labels(api).observe(record.first_token_ms / 1e3)
        metrics.prompt_tokens.inc(record.num_prompt if record.phase in ("prefill", "decode") else 0)
        reuse = None if record.stats is None else record.stats.reuse
        metrics.cached_tokens.labels((reuse.kind if reuse else "") or "none").inc(record.num_cached)
        metrics.generated_tokens.inc(record.num_generated)
        metrics.reasoning_tokens.inc(record.num_reasoning)
        rescued = min(record.num_calls, record.rescues.total())
        metrics.tool_calls.labels("clean").inc(record.num_calls - rescued)
        metrics.tool_calls.labels("rescued").inc(rescued)
        for mode, count in record.rescues.items():
            metrics.tool_rescues.labels(mode).inc(count)
        metrics.tool_calls.labels("refused").inc(record.num_missed)
        if record.stats is not None:
            metrics.queue_seconds.observe(record.stats.queue_ms / 1e3)
            metrics.prefill_seconds.inc(record.stats.prefill_ms / 1e3)
            metrics.decode_seconds.inc(record.stats.decode_ms / 1e3)
            metrics.drafted_tokens.inc(record.stats.num_drafted)
            metrics.accepted_tokens.inc(record.stats.num_accepted)

    def trouble(self) -> str:
        """Why the daemon cannot be called alive, or ""."""
        status = self.engine.status()
        if status.state in ("failed", "closed"):
            return str(status.error or f"the engine is {status.state}.")
        age = status.heartbeat_age_s or 0.0
        if status.state == "ready" and age > HEARTBEAT_LIMIT_S:
            return f"the engine thread has given no sign of life for {age:.0f} s (limit {HEARTBEAT_LIMIT_S:.0f} s)."
        return ""


def shutting_down() -> Overloaded:
    """What whoever comes while the daemon drains is told, and whoever has not ended when that is over."""
    return Overloaded("the daemon is shutting down.", "Try again when it is back.", retry_after_s=10)


def _drafts_of(stats: RequestStats | None) -> str | int:
    """"source:accepted/drafted,..." or 0."""
    counts = () if stats is None else stats.drafts
    return ",".join(f"{count.source}:{sum(count.accepted)}/{sum(count.drafted)}" for count in counts) or 0


def _ending(stats: RequestStats | None) -> dict[str, Any]:
    """What is known of a request only after it: drafts, and what of its prompt was reused, from where, or why not."""
    if stats is None:
        return {"accepted_per_step": 0.0}
    figures: dict[str, Any] = {"accepted_per_step": round(stats.num_accepted / max(1, stats.num_steps), 2)}
    for name in ("queue_ms", "prefill_ms", "decode_ms"):
        figures[name] = _rounded(getattr(stats, name, None))
    if stats.reuse is not None:
        figures |= {"reuse_from": stats.reuse.kind, "reuse_possible": stats.reuse.possible, "reuse_missed": stats.reuse.reason}
    return figures


def _open_capture(config: Config) -> Capture | None:
    server = config.server
    return Capture(Path(server.capture).expanduser(), server.capture_mb << 20) if server.capture else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


DAEMON = web.AppKey("daemon", Daemon)
REQUEST_ID: Any = web.RequestKey("id", str) if hasattr(web, "RequestKey") else "q27app.id"
"""Where a request's id is kept; typed keys for requests are younger than the oldest aiohttp that we take."""
