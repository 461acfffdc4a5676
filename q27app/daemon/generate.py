"""ChatRequest in, deltas out: where text meets token ids. Shared by all dialects.

`open_generation` renders and encodes (long prompts in the executor), checks the length and submits: all of it before
the first byte of a reply, so that every refusal is an ordinary error reply. Leaving its `async with` early, for
whatever reason, cancels the request in the engine exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from q27app.chat.conversation import is_tool_forced
from q27app.chat.types import ChatRequest, Delta, TextPart, ToolResultPart, Usage
from q27app.daemon.answer import Translation, merged
from q27app.daemon.failures import Cancelled
from q27app.daemon.inbox import Inbox
from q27app.engine.request import FinishReason, Guide, Request, SamplingParams, TokenEvent
from q27app.errors import BadRequest, ContextTooLong, EngineDied, Overloaded, Q27Error

if TYPE_CHECKING:
    from q27app.chat.template import Rendered
    from q27app.config import Config
    from q27app.daemon.daemon import Daemon, RequestRecord

LONG_CHARS = 16_384
"""Prompts of more characters are rendered and encoded in the executor."""
ANSWER_RESERVE = 16
"""Tokens of an answer that a bounded reasoning leaves free."""

CROWD = 16
PACE_S = 0.001
"""With so many requests in flight, a stream gathers what comes within PACE_S for each of them before it is written:
the loop makes about 1 / PACE_S writes a second, spread out, and whoever is new gets a first byte in time."""


def wants_thinking(chat: ChatRequest, config: Config) -> tuple[bool, str | None]:
    """(whether the model shall think, effort): the server's default, the request's wish where that is obeyed; a forced
    call never thinks."""
    reasoning, wish = config.reasoning, chat.thinking
    enabled, effort = reasoning.default == "on", None if reasoning.effort == "auto" else reasoning.effort
    if reasoning.request_thinking:
        enabled = enabled if wish.enabled is None else wish.enabled
        effort = wish.effort or effort
    return enabled and not is_tool_forced(chat), effort


def reasoning_budget(chat: ChatRequest, config: Config, max_tokens: int) -> int | None:
    """Most reasoning tokens of an answer of `max_tokens`; None = unbounded."""
    wish = chat.thinking.budget if config.reasoning.request_thinking else None
    default = config.reasoning.budget
    if wish is None:
        wish = -1 if default == "none" else max_tokens // 2 if default == "auto" else int(default)
    return None if wish < 0 else wish


def render(daemon: Daemon, chat: ChatRequest) -> Rendered:
    """The prompt's tokens. Any thread. Raises BadRequest for token ids that do not exist."""
    if isinstance(chat.prompt, tuple):
        size = daemon.tokenizer.vocab_size
        bad = next((token for token in chat.prompt if not 0 <= token < size), None)
        if bad is not None:
            raise BadRequest(f"prompt: token id {bad} is outside the vocabulary of {size}.", param="prompt")
    thinking, effort = wants_thinking(chat, daemon.config)
    return daemon.template.render(chat, thinking, effort)


async def count_prompt(daemon: Daemon, chat: ChatRequest) -> int:
    """Tokens that a generation of `chat` would prefill. Neither slot nor GPU."""
    return len((await _rendered(daemon, chat)).tokens)


async def _rendered(daemon: Daemon, chat: ChatRequest) -> Rendered:
    if _num_chars(chat) <= LONG_CHARS:
        return render(daemon, chat)
    return await asyncio.get_running_loop().run_in_executor(daemon.executor, render, daemon, chat)


def _num_chars(chat: ChatRequest) -> int:
    count = len(chat.prompt or "") + sum(LONG_CHARS // 64 for _ in chat.tools)
    for message in chat.messages:
        count += 64 + sum(
            len(part.text) if isinstance(part, (TextPart, ToolResultPart)) else 256 for part in message.parts
        )
    return count


def sampling_params(chat: ChatRequest, config: Config) -> SamplingParams:
    """The request's fields over the server's defaults. Without a seed a sampled request draws one."""
    given, default = chat.sampling, config.sampling
    temperature = default.temperature if given.temperature is None else given.temperature
    seed = given.seed
    if seed is None:
        seed = secrets.randbits(63) if temperature > 0 else 0
    return SamplingParams(
        temperature=temperature,
        top_k=default.top_k if given.top_k is None else given.top_k,
        top_p=default.top_p if given.top_p is None else given.top_p,
        min_p=default.min_p if given.min_p is None else given.min_p,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        logprobs=given.logprobs,
        seed=seed,
        max_tokens=default.max_tokens if given.max_tokens is None else given.max_tokens,
        ignore_eos=given.ignore_eos,
    )


def check_length(daemon: Daemon, num_tokens: int) -> int:
    """The room that a prompt leaves for its answer. Raises Overloaded without a model, ContextTooLong, BadRequest."""
    status = daemon.engine.status()
    if status.state in ("failed", "closed"):
        raise EngineDied(daemon.trouble(), "Restart the daemon.")
    if status.state != "ready" or not daemon.engine.max_context:
        raise Overloaded(f"the model is not ready: {status.state}.", "Try again later; /ready says when.")
    window = daemon.engine.max_context
    if num_tokens == 0:
        raise BadRequest("the prompt is empty.", param="prompt")
    if num_tokens >= window:
        raise ContextTooLong(num_tokens, window - 1)
    return window - num_tokens


async def prepare(daemon: Daemon, chat: ChatRequest, record: RequestRecord) -> tuple[Request, Translation]:
    """Everything before the submit: prompt, limits, guide, translation. Raises what refuses the request."""
    record.phase = "rendering"
    prompt = await _rendered(daemon, chat)
    record.num_prompt = len(prompt.tokens)
    room = check_length(daemon, record.num_prompt)
    params = sampling_params(chat, daemon.config)
    params = replace(params, max_tokens=min(params.max_tokens, room))
    record.seed = params.seed if params.temperature > 0 else None
    guide = _make_guide(daemon, chat, prompt, params)
    request = Request(
        id=record.id,
        prompt=prompt.tokens,
        params=params,
        guide=guide,
        eos_ids=tuple(daemon.tokenizer.eos_ids),
        stable_len=prompt.stable_len,
        system_len=prompt.system_len,
        client=f"{record.dialect} {record.client}",
    )
    return request, _make_translation(daemon, chat, prompt, record)


def _make_guide(daemon: Daemon, chat: ChatRequest, prompt: Rendered, params: SamplingParams) -> Guide:
    """What acts between two steps. Raw prompts have no reasoning, and their loops are the client's business."""
    from q27app.chat.guide import make_guide

    is_raw = chat.prompt is not None
    budget = None if is_raw else reasoning_budget(chat, daemon.config, params.max_tokens)
    return make_guide(
        daemon.tokenizer,
        chat.stop,
        prompt.channel,
        budget,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        dialect=_dialect(daemon, chat),
        eos_ids=() if params.ignore_eos else None,
        max_tokens=params.max_tokens,
        answer_reserve=0 if budget is None else ANSWER_RESERVE,
        finds_loops=not (is_raw or params.ignore_eos),
    )


def _make_translation(daemon: Daemon, chat: ChatRequest, prompt: Rendered, record: RequestRecord) -> Translation:
    from q27app.chat.stream import DeltaParser

    prefix, numbers = "toolu" if chat.dialect == "messages" else "call", itertools.count()
    parser = DeltaParser(
        chat.tools,
        chat.tool_choice,
        prompt.channel,
        _dialect(daemon, chat),
        chat.stop,
        make_id=lambda: f"{prefix}_{record.id}_{next(numbers)}",
    )
    return Translation(daemon.tokenizer, parser, must_call=is_tool_forced(chat))


def _dialect(daemon: Daemon, chat: ChatRequest) -> str:
    return "raw" if chat.prompt is not None else daemon.template.dialect


@asynccontextmanager
async def open_generation(
    daemon: Daemon, chat: ChatRequest, record: RequestRecord
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Submit `chat`; yields the iterator of its deltas, "start" first, then pings and pieces, "finish" last.

    Raises BadRequest, ContextTooLong, Overloaded, EngineDied before anything was submitted. The iterator raises the
    error that ends an answer.
    """
    request, translation = await prepare(daemon, chat, record)
    inbox = Inbox(on_overflow=lambda: daemon.cancel(record))
    daemon.engine.submit(request, inbox.deliver)
    record.phase = "queued"
    daemon.hub.publish("request_started", id=record.id, api=record.dialect, num_prompt=record.num_prompt)
    try:
        yield _deltas(daemon, translation, inbox, record)
    finally:
        daemon.cancel(record)


async def _deltas(
    daemon: Daemon, translation: Translation, inbox: Inbox, record: RequestRecord
) -> AsyncIterator[Delta]:
    interval = daemon.config.server.ping_interval_s
    yield Delta("start", usage=Usage(num_prompt=record.num_prompt))
    spoke_at = time.monotonic()
    while not record.has_ended:
        events = await inbox.take(spoke_at + interval - time.monotonic())
        if record.phase == "decode" and len(daemon.active) >= CROWD:
            await asyncio.sleep(len(daemon.active) * PACE_S * random.uniform(0.5, 1.5))
            events += await inbox.take(0)
        if inbox.has_overflowed:
            raise Q27Error("the client reads too slowly: the answer is too far ahead of it.")
        deltas, failure = _translated_all(events, translation, record)
        if not deltas and time.monotonic() - spoke_at >= interval:
            deltas = [Delta("ping")]
        for delta in deltas:
            yield delta
            spoke_at = time.monotonic()
        if failure is not None:
            raise failure


def _translated_all(
    events: list[TokenEvent], translation: Translation, record: RequestRecord
) -> tuple[list[Delta], Q27Error | None]:
    """What several events make, and the error after it: what was generated before a failure is still shown."""
    deltas: list[Delta] = []
    for event in events:
        try:
            deltas += _translated(event, translation, record)
        except Q27Error as error:
            return merged(deltas), error
    return merged(deltas), None


def _translated(event: TokenEvent, translation: Translation, record: RequestRecord) -> list[Delta]:
    """One event's deltas; keeps the record up to date. Raises the error that the event carries."""
    if event.prefilled is not None and not event.tokens and record.phase != "decode":
        record.phase, record.num_prefilled = "prefill", event.prefilled
    if event.tokens:
        now = time.monotonic()
        record.first_token_at = record.first_token_at or now
        record.last_token_at = now
        record.phase = "decode"
    deltas = translation.feed(event)
    if event.finish is not None:
        record.has_ended = True
        record.stats = event.stats
        record.num_cached = event.stats.num_cached if event.stats else 0
        record.finish = _outcome(event)
        if event.finish is FinishReason.CANCELLED:
            raise event.error or Cancelled("the request was cancelled by the operator.")
        deltas += translation.finish(event, record.num_prompt)
        record.finish = deltas[-1].finish or record.finish
    record.num_generated, record.num_reasoning = translation.num_generated, translation.num_reasoning
    record.num_calls, record.num_missed = translation.num_calls, translation.num_missed
    return deltas


def _outcome(event: TokenEvent) -> str:
    if event.error is not None:
        return f"error:{event.error.code}"
    return event.finish.value if event.finish is not None else ""
