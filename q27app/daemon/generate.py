"""ChatRequest in, deltas out: where text meets token ids. Shared by all dialects.

`open_generation` prepares and submits (prepare.py), all of it before the first byte of a reply. Leaving its `async with`
early, for whatever reason, cancels the request in the engine exactly once. Several answers to one request are as many
requests in the engine; their deltas come as they arrive, told apart by `index`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from q27app.chat.types import ChatRequest, Delta, Usage
from q27app.daemon.answer import merged
from q27app.daemon.failures import Cancelled
from q27app.daemon.inbox import Inbox, joined
from q27app.daemon.prepare import Choice, prepare
from q27app.engine.request import FinishReason, TokenEvent
from q27app.errors import Q27Error

if TYPE_CHECKING:
    from q27app.daemon.daemon import Daemon, RequestRecord

CROWD = 32
PACE_S = 0.001
"""With more than CROWD requests in flight, a stream that has written waits PACE_S for each of them and then writes what has
come: the loop makes about 1 / PACE_S writes a second, spread out, and whoever is new gets a first byte in time."""


@asynccontextmanager
async def open_generation(
    daemon: Daemon, chat: ChatRequest, record: RequestRecord
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Submit `chat`; yields the iterator of its deltas, "start" first, then pings and pieces, "finish" last (one for
    each answer).

    Raises BadRequest, ContextTooLong, Overloaded, EngineDied before anything was submitted. The iterator raises the
    error that ends an answer.
    """
    choices = await _prepared(daemon, chat, record)
    inbox = Inbox(on_overflow=lambda: daemon.cancel(record), bell=daemon.bell())
    try:
        for choice in choices:
            daemon.engine.submit(choice.request, inbox.deliver)
            record.engine_ids.append(choice.request.id)
        record.phase = "queued"
        daemon.hub.publish("request_started", id=record.id, api=record.dialect, num_prompt=record.num_prompt)
        yield _deltas(daemon, {choice.request.id: choice for choice in choices}, inbox, record)
    finally:
        daemon.cancel(record)


async def _prepared(daemon: Daemon, chat: ChatRequest, record: RequestRecord) -> list[Choice]:
    """See `prepare`. Whoever is cancelled meanwhile is told so at once."""
    try:
        async with asyncio.timeout(None) as scope:
            record.give_up = lambda: scope.reschedule(asyncio.get_running_loop().time())
            choices = await prepare(daemon, chat, record)
    except TimeoutError:
        if not record.is_cancelled:
            raise
    finally:
        record.give_up = None
    if record.is_cancelled:
        raise _why_cancelled(record)
    return choices


async def _deltas(
    daemon: Daemon, choices: dict[str, Choice], inbox: Inbox, record: RequestRecord
) -> AsyncIterator[Delta]:
    interval = daemon.config.server.ping_interval_s
    yield Delta("start", usage=Usage(num_prompt=record.num_prompt))
    spoke_at = time.monotonic()
    while not record.has_ended:
        if record.phase == "decode" and (pause := pause_s(len(daemon.active))):
            await asyncio.sleep(pause)
        events = joined(await inbox.take(spoke_at + interval - time.monotonic()))
        if inbox.has_overflowed:
            raise Q27Error("the client reads too slowly: the answer is too far ahead of it.")
        deltas, failure = _translated_all(daemon, events, choices, record)
        if not deltas and time.monotonic() - spoke_at >= interval:
            deltas = [Delta("ping")]
        for delta in deltas:
            yield delta
            spoke_at = time.monotonic()
        if failure is not None:
            raise failure


def pause_s(num_active: int) -> float:
    """Seconds that a stream waits before it writes again while so many requests are in flight; 0 unless they are a crowd."""
    return num_active * PACE_S * random.uniform(0.5, 1.5) if num_active > CROWD else 0.0


def _translated_all(
    daemon: Daemon, events: list[TokenEvent], choices: dict[str, Choice], record: RequestRecord
) -> tuple[list[Delta], Q27Error | None]:
    """What several events make, and the error after it: what was generated before a failure is still shown."""
    deltas: list[Delta] = []
    for event in events:
        choice = choices[event.request_id]
        try:
            fresh = _translated(daemon, event, choice, choices, record)
        except Q27Error as error:
            return merged(deltas), error
        deltas += fresh if choice.index == 0 else [replace(delta, index=choice.index) for delta in fresh]
        if choice.translation.stop_sequence is not None and not (choice.has_ended or choice.is_stopping):
            choice.is_stopping = True
            daemon.engine.cancel(choice.request.id)
    return merged(deltas), None


def _translated(
    daemon: Daemon, event: TokenEvent, choice: Choice, choices: dict[str, Choice], record: RequestRecord
) -> list[Delta]:
    """One event's deltas; keeps the record up to date. Raises the error that the event carries."""
    if event.prefilled is not None and not event.tokens and record.phase != "decode":
        record.phase, record.num_prefilled = "prefill", event.prefilled
    if event.tokens:
        now = time.monotonic()
        record.first_token_at = record.first_token_at or now
        record.last_token_at = now
        record.phase = "decode"
    translation = choice.translation
    deltas = translation.feed(event)
    if event.finish is not None:
        choice.has_ended = True
        record.has_ended = all(each.has_ended for each in choices.values())
        record.stats = event.stats
        record.num_cached = event.stats.num_cached if event.stats else 0
        record.finish = _outcome(event)
        if event.finish is FinishReason.CANCELLED and translation.stop_sequence is None:
            raise event.error or _why_cancelled(record)
        deltas += translation.finish(event, record.num_prompt)
        record.finish = deltas[-1].finish or record.finish
    choice.turn.feed(event, deltas)
    if choice.turn.has_ended:
        daemon.turns.ended(choice.turn, not translation.rescues and not translation.num_missed)
    _count(record, choices)
    return deltas


def _why_cancelled(record: RequestRecord) -> Q27Error:
    return record.cancelled_by or Cancelled("the request was cancelled by the operator.")


def _count(record: RequestRecord, choices: dict[str, Choice]) -> None:
    """The record's figures, over all answers."""
    made = [choice.translation for choice in choices.values()]
    record.num_generated = sum(each.num_generated for each in made)
    record.num_reasoning = sum(each.num_reasoning for each in made)
    record.num_calls = sum(each.num_calls for each in made)
    if any(each.missed or each.rescues for each in made):
        record.num_missed = sum(each.num_missed for each in made)
        record.missed = [text for each in made for text in each.missed]
        record.rescues = sum((each.rescues for each in made), Counter())


def _outcome(event: TokenEvent) -> str:
    if event.error is not None:
        return f"error:{event.error.code}"
    return event.finish.value if event.finish is not None else ""
