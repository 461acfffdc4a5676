"""What a request may ask for: checked by `Engine.submit`, before anything is queued.

Whatever passes here can be written into a pass's arrays without failing, so that one request's values never end a pass in
which others take part.
"""

from __future__ import annotations

import math

from q27app.engine.request import Request, SamplingParams
from q27app.errors import BadRequest, ContextTooLong

MAX_LOGPROBS = 128
MAX_TOP_K = (1 << 31) - 1
MAX_PROMPT_LOGITS_BYTES = 8 << 30


def check_request(request: Request, vocab_size: int, max_context: int) -> int:
    """The most tokens that the request may generate: its max_tokens within the window.

    Raises BadRequest naming the field, ContextTooLong if the prompt leaves no room for an answer.
    """
    prompt, params = request.prompt, request.params
    if not prompt:
        raise BadRequest("the prompt is empty, expected at least one token.", param="prompt")
    check_params(params)
    reserve = 1 if params.max_tokens else 0
    if len(prompt) + reserve > max_context:
        raise ContextTooLong(len(prompt), max_context - reserve)
    try:
        low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    except (OverflowError, MemoryError):
        low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise BadRequest(f"the prompt has token ids from {low} to {high}, expected 0 to {vocab_size - 1}.", param="prompt")
    if request.prompt_logits and 4 * len(prompt) * vocab_size > MAX_PROMPT_LOGITS_BYTES:
        raise BadRequest(f"the logits of {len(prompt)} prompt tokens would take {4e-9 * len(prompt) * vocab_size:.1f} GB, "
                         f"at most {MAX_PROMPT_LOGITS_BYTES / 1e9:.1f} GB are allowed.", "Use a shorter prompt.", "prompt")
    return min(params.max_tokens, max_context - len(prompt))


def check_params(params: SamplingParams) -> None:
    """Raises BadRequest for a value that no draw can be made with."""
    _number("temperature", params.temperature, 0, 1e6)
    _number("top_p", params.top_p, 0, 1)
    _number("min_p", params.min_p, 0, 1)
    _number("presence_penalty", params.presence_penalty, -1e6, 1e6)
    _number("frequency_penalty", params.frequency_penalty, -1e6, 1e6)
    _integer("top_k", params.top_k, 0, MAX_TOP_K)
    _integer("max_tokens", params.max_tokens, 0, 1 << 62)
    _integer("seed", params.seed, -(1 << 63), (1 << 64) - 1)
    if params.logprobs is not None:
        _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)


def _number(name: str, value: object, low: float, high: float) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not ok:
        raise BadRequest(f"{name} is {_short(value)}, expected a number from {low:g} to {high:g}.", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} is {_short(value)}, expected an integer from {low} to {high}.", param=name)


def _short(value: object) -> str:
    return repr(value)[:60]
