"""The canonical text: 128 tokens, greedily, after five given ids. Its md5 says at a glance whether two builds agree.

Against a server it is asked through /v1/completions, drawn tokens' texts from `logprobs` where the server has them; in
this process it goes straight through the engine. Either way the md5 is of the text's UTF-8, and of the ids where they are
known ("1,2,3").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from q27app.bench.exchange import COMPLETIONS
from q27app.errors import BadRequest, Q27Error, Unauthorized, Unreachable

if TYPE_CHECKING:
    from q27app.bench.endpoint import Endpoint

PROMPT = (760, 6511, 314, 9338, 369)
NUM_TOKENS = 128


def md5_of(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def first_difference(found: Sequence[Any], expected: Sequence[Any]) -> int | None:
    """Index of the first place where two lists differ, also by length; None if they are equal."""
    for index, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            return index
    return None if len(found) == len(expected) else min(len(found), len(expected))


async def ask_server(endpoint: Endpoint, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """{"text", "pieces" (texts of the tokens, or None), "notes"} of a server's answer. Raises Q27Error."""
    body = {"model": endpoint.model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    notes: list[str] = []
    try:
        reply = await endpoint.client.post(COMPLETIONS, {**body, "logprobs": 1})
    except Q27Error as error:
        if isinstance(error, (Unreachable, Unauthorized)):
            raise
        try:
            reply = await endpoint.client.post(COMPLETIONS, body)
        except Q27Error as plain:
            raise BadRequest(f"{endpoint.label} refuses a prompt of token ids: {' '.join(plain.message.split())[:300]}",
                             "Canonical text needs /v1/completions with an array of ids as prompt.") from plain
        notes.append(f"The server has no log probabilities ({' '.join(error.message.split())[:160]}): only the text is compared.")
    choice = (reply.get("choices") or [{}])[0]
    columns = choice.get("logprobs")
    pieces = columns.get("tokens") if isinstance(columns, dict) else None
    if pieces is None and not notes:
        notes.append("The server sends no log probabilities: only the text is compared.")
    return {"text": choice.get("text") or "", "pieces": pieces, "notes": notes}


def compared(found: dict[str, Any], expected: Sequence[int] | None, expected_md5: str | None) -> dict[str, Any]:
    """The answer's checksums, and where it leaves what was expected. found: {"text"?, "ids"?, "pieces"?}."""
    ids, text = found.get("ids"), found.get("text")
    result: dict[str, Any] = {"text": text, "ids": ids, "num_tokens": len(ids or found.get("pieces") or [])}
    if text is not None:
        result["md5_text"] = md5_of(text)
    if ids is not None:
        result["md5_ids"] = md5_of(",".join(map(str, ids)))
    if expected is not None and ids is not None:
        place = first_difference(ids, expected)
        result |= {"first_difference": place, "is_equal": place is None}
        if place is not None:
            result |= {"found": ids[place] if place < len(ids) else None, "expected": expected[place] if place < len(expected) else None}
    if expected_md5 is not None:
        result["is_equal"] = expected_md5.lower() in (result.get("md5_text"), result.get("md5_ids"))
    return result
