"""The OpenAI Completions dialect: POST /v1/completions. Prompts are encoded raw: control tokens in them count.

Several prompts in one request are answered side by side, each as it would be alone.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from q27app.chat.types import ChatRequest, Delta, Usage
from q27app.daemon import fields
from q27app.daemon.answer import Answer
from q27app.daemon.identity import Identity
from q27app.daemon.openai_chat import FINISH_REASONS, summed, usage_of, wants_usage
from q27app.daemon.sse import COMMENT, DONE, data
from q27app.errors import BadRequest

NAME = "completions"
MAX_PROMPTS = 64


def parse(body: fields.Object) -> ChatRequest:
    """The request in a body. Raises BadRequest naming the field. Unknown fields are ignored."""
    fields.refuse_unsupported(body)
    for key in ("echo", "suffix"):
        if body.get(key):
            raise BadRequest(f"{key}: not supported.", "Leave it out.", key)
    logprobs = fields.integer(body, "logprobs")
    if logprobs is not None and not 0 <= logprobs <= fields.MAX_LOGPROBS:
        raise BadRequest(f"logprobs: {logprobs} is outside 0 to {fields.MAX_LOGPROBS}.", param="logprobs")
    first, *more = _prompts(body.get("prompt"))
    return ChatRequest(
        prompt=first,
        more_prompts=tuple(more),
        sampling=fields.sampling(body, fields.integer(body, "max_tokens"), logprobs),
        stop=fields.stop_strings(body, "stop"),
        stream=fields.boolean(body, "stream") or False,
        include_usage=wants_usage(body),
        model=fields.string(body, "model") or "",
        answer_schema=fields.answer_schema(body.get("response_format"), "response_format"),
        num_choices=fields.num_choices(body),
        dialect=NAME,
    )


def _prompts(raw: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt, text or ids, or a list of them. Raises BadRequest."""
    is_list = isinstance(raw, list) and bool(raw) and all(isinstance(item, (str, list)) for item in raw)
    given = raw if is_list else [raw]
    if len(given) > MAX_PROMPTS:
        raise BadRequest(f"prompt: {len(given)} prompts in one request, expected at most {MAX_PROMPTS}.",
                         "Send them in several requests.", "prompt")
    return tuple(_prompt(item) for item in given)


def _prompt(raw: Any) -> str | tuple[int, ...]:
    if isinstance(raw, str) and raw:
        return raw
    if isinstance(raw, list) and raw and all(type(item) is int for item in raw):
        return tuple(raw)
    error = BadRequest("prompt: the prompt is empty; expected a string or an array of token ids.", param="prompt")
    error.code = "empty_prompt"
    raise error


def render(identity: Identity, answer: Answer) -> dict[str, Any]:
    """The reply to a request without stream."""
    answers = [answer, *answer.others]
    choices = [
        {
            "index": index,
            "text": each.text,
            "finish_reason": FINISH_REASONS[each.finish],
            "logprobs": _columns(each.logprobs, 0),
        }
        for index, each in enumerate(answers)
    ]
    return {
        "id": f"cmpl-{identity.id}",
        "object": "text_completion",
        "created": identity.created,
        "model": identity.model,
        "choices": choices,
        "usage": usage_of(summed([each.usage for each in answers], identity.chat.num_choices)),
    }


async def events(identity: Identity, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
    """The stream, chunk by chunk. The first byte is a comment: there is no role to announce."""
    usages: dict[int, Usage] = {}
    lengths = [0] * identity.chat.num_answers
    async for delta in deltas:
        if delta.kind in ("start", "ping"):
            yield COMMENT
        elif delta.kind == "text":
            yield _chunk(identity, delta.index, delta.text, None, _columns(delta.logprobs, lengths[delta.index]))
            lengths[delta.index] += len(delta.text)
        elif delta.kind == "finish":
            yield _chunk(identity, delta.index, "", FINISH_REASONS[delta.finish or "stop"])
            usages[delta.index] = delta.usage or Usage()
        if len(usages) == len(lengths):
            if identity.include_usage:
                total = summed([usages[index] for index in range(len(lengths))], identity.chat.num_choices)
                yield data({**_envelope(identity), "choices": [], "usage": usage_of(total)})
            yield DONE
            return


def _envelope(identity: Identity) -> dict[str, Any]:
    return {
        "id": f"cmpl-{identity.id}",
        "object": "text_completion",
        "created": identity.created,
        "model": identity.model,
    }


def _chunk(
    identity: Identity, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None = None
) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
    chunk = {**_envelope(identity), "choices": [choice]}
    if identity.include_usage:
        chunk["usage"] = None
    return data(chunk)


def _columns(entries: Any, start: int) -> dict[str, Any] | None:
    """Log probabilities as this dialect writes them: one list a column. start: characters before the first entry."""
    if not entries:
        return None
    lengths = [len(entry["token"]) for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{best["token"]: best["logprob"] for best in entry["top_logprobs"]} for entry in entries],
        "text_offset": list(itertools.accumulate(lengths[:-1], initial=start)),
    }
