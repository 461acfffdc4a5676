"""Text and ids without a generation: POST /tokenize, /detokenize, /apply-template, and GET /openapi.json."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from q27app.daemon import fields, openai_chat
from q27app.daemon.access import read_object
from q27app.daemon.daemon import DAEMON, Daemon
from q27app.daemon.openapi import document
from q27app.daemon.prepare import render
from q27app.daemon.replies import json_response
from q27app.errors import BadRequest

MAX_IDS = 4_194_304


async def tokenize(request: web.Request) -> web.Response:
    """{"content": text, "parse_special": bool, "with_pieces": bool} -> {"tokens": ids, or {"id", "piece"} each}."""
    daemon = request.app[DAEMON]
    body = await _body(request)
    content = body.get("content", body.get("prompt"))
    if not isinstance(content, str):
        raise BadRequest(f"content: expected a string, found {fields.kind_of(content)}.", param="content")
    special = fields.boolean(body, "parse_special") or False
    ids = await _in_executor(daemon, lambda: daemon.tokenizer.encode(content, control=special))
    if not fields.boolean(body, "with_pieces"):
        return json_response({"tokens": ids})
    return json_response({"tokens": [{"id": token, "piece": daemon.tokenizer.token_name(token)} for token in ids]})


async def detokenize(request: web.Request) -> web.Response:
    """{"tokens": ids} -> {"content": text}. Control tokens give nothing."""
    daemon = request.app[DAEMON]
    ids = (await _body(request)).get("tokens")
    size = daemon.tokenizer.vocab_size
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < size for token in ids):
        raise BadRequest(f"tokens: expected an array of ids from 0 to {size - 1}.", param="tokens")
    if len(ids) > MAX_IDS:
        raise BadRequest(f"tokens: {len(ids)} ids, at most {MAX_IDS} are allowed.", param="tokens")
    return json_response({"content": await _in_executor(daemon, lambda: daemon.tokenizer.decode(ids))})


async def apply_template(request: web.Request) -> web.Response:
    """The body of a chat completion -> {"prompt": text, "tokens": ids}: what a generation would begin with."""
    daemon = request.app[DAEMON]
    chat = openai_chat.parse(await _body(request))
    prompt = await _in_executor(daemon, lambda: render(daemon, chat))
    return json_response({"prompt": prompt.text, "tokens": list(prompt.tokens)})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_response(document())


async def _body(request: web.Request) -> dict[str, Any]:
    return await read_object(request, request.client_max_size, request.app[DAEMON].executor)


async def _in_executor(daemon: Daemon, work: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(daemon.executor, work)
