"""From a ChatRequest to what the engine takes: prompt, limits, sampler, guide, constraint, and the way back to deltas.

Everything here runs before the first byte of a reply, so that every refusal is an ordinary error reply. Long prompts and
constraints are worked on in the executor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from q27app.chat.conversation import is_tool_forced, offered_tools
from q27app.chat.types import ChatRequest, Message, TextPart, ToolResultPart
from q27app.daemon.answer import Translation
from q27app.daemon.turns import Turn, newest_turn
from q27app.engine.request import Guide, Request, SamplingParams
from q27app.errors import BadRequest, ContextTooLong, EngineDied, Overloaded

if TYPE_CHECKING:
    from q27app.chat.grammar import Constraint
    from q27app.chat.template import Rendered
    from q27app.config import Config
    from q27app.daemon.daemon import Daemon, RequestRecord

log = logging.getLogger("q27app.daemon")
LONG_CHARS = 16_384
"""Prompts of more characters are rendered and encoded in the executor."""
ANSWER_RESERVE = 16
"""Tokens of an answer that a bounded reasoning leaves free."""


@dataclass
class Choice:
    """One of the answers to a request. index: its place among them."""

    index: int
    request: Request
    translation: Translation
    turn: Turn
    has_ended: bool = False
    is_stopping: bool = False
    """Its text is complete, and the engine was told."""


def practise(daemon: Daemon) -> None:
    """What the first request would wait for otherwise: what it imports, and a prompt by the template. Any thread."""
    try:
        import msgspec  # noqa: F401 - fields.py

        from q27app.chat import grammar, guide, stream  # noqa: F401 - below

        daemon.template.render(ChatRequest((Message("user", (TextPart("Hello"),)),)), thinking=True)
    except Exception:   # the request that meets it again says so
        log.debug("no prompt could be rendered ahead of the first request", exc_info=True)


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
    return daemon.turns.replay.applied(daemon.template.render(chat, thinking, effort), chat.messages)


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
        presence_penalty=default.presence_penalty if given.presence_penalty is None else given.presence_penalty,
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


async def prepare(daemon: Daemon, chat: ChatRequest, record: RequestRecord) -> list[Choice]:
    """Everything before the submit, for each answer that is asked for. Raises what refuses the request."""
    record.phase = "waiting"
    await daemon.residence.wanted()
    record.phase = "rendering"
    prompts = [await _rendered(daemon, each) for each in _by_prompt(chat)]
    record.num_prompt = sum(len(prompt.tokens) for prompt in prompts)
    rooms = [check_length(daemon, len(prompt.tokens)) for prompt in prompts]
    params = sampling_params(chat, daemon.config)
    constraints = await _constraints(daemon, chat)
    is_constrained = constraints[0] is not None
    params = replace(params, ignore_eos=params.ignore_eos and not is_constrained)
    record.seed = params.seed if params.temperature > 0 else None
    choices = []
    for index, constraint in enumerate(constraints):
        at, number = divmod(index, chat.num_choices)
        prompt, most = prompts[at], min(params.max_tokens, rooms[at])
        own = replace(params, seed=(params.seed + number) % 2**64, max_tokens=most)
        request = Request(
            id=f"{record.id}_{index}" if index else record.id,
            prompt=prompt.tokens,
            params=own,
            guide=_make_guide(daemon, chat, prompt, own, constraint),
            eos_ids=tuple(daemon.tokenizer.eos_ids),
            stable_len=prompt.stable_len,
            system_len=prompt.system_len,
            turn_len=newest_turn(prompt, daemon),
            client=f"{record.dialect} {record.client}",
        )
        choices.append(Choice(index, request, _make_translation(daemon, chat, prompt, request.id), Turn(chat, request)))
    return choices


def _by_prompt(chat: ChatRequest) -> list[ChatRequest]:
    """The request for each of its raw prompts; itself where there is one."""
    if not chat.more_prompts:
        return [chat]
    return [replace(chat, prompt=prompt, more_prompts=()) for prompt in (chat.prompt, *chat.more_prompts)]


async def _constraints(daemon: Daemon, chat: ChatRequest) -> list[Constraint | None]:
    """What the answers must look like, one constraint each; None where anything goes."""
    from q27app.chat import grammar

    dialect, parallel = _dialect(daemon, chat), chat.tool_choice.parallel
    if is_tool_forced(chat):
        param, source = "tools", lambda tools: grammar.calls_source(tools, dialect, parallel)
    elif chat.answer_schema is not None:
        param, schema = "response_format", chat.answer_schema
        source = lambda tools: grammar.answer_source(schema, tools, dialect, parallel)  # noqa: E731
    else:
        return [None] * chat.num_answers
    if not grammar.is_available():
        if param == "tools":
            return [None] * chat.num_answers
        raise BadRequest(
            "response_format: this installation cannot enforce a form, llguidance is missing.",
            "Install q27app[json], or leave response_format out.",
            "response_format",
        )

    def compile_all() -> list[Constraint | None]:
        tools = grammar.as_printed(offered_tools(chat.tools, chat.tool_choice), daemon.template.sorts_keys)
        text, compiler = source(tools), daemon.constraints()
        return [compiler.compile(text, param) for _ in range(chat.num_answers)]

    return await asyncio.get_running_loop().run_in_executor(daemon.executor, compile_all)


def _make_guide(
    daemon: Daemon, chat: ChatRequest, prompt: Rendered, params: SamplingParams, constraint: Constraint | None
) -> Guide:
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
        grammar=constraint,
    )


def _make_translation(daemon: Daemon, chat: ChatRequest, prompt: Rendered, name: str) -> Translation:
    from q27app.chat.stream import DeltaParser

    prefix, numbers = "toolu" if chat.dialect == "messages" else "call", itertools.count()
    parser = DeltaParser(
        chat.tools,
        chat.tool_choice,
        prompt.channel,
        _dialect(daemon, chat),
        chat.stop,
        make_id=lambda: f"{prefix}_{name}_{next(numbers)}",
    )
    return Translation(daemon.tokenizer, parser, must_call=is_tool_forced(chat))


def _dialect(daemon: Daemon, chat: ChatRequest) -> str:
    return "raw" if chat.prompt is not None else daemon.template.dialect
