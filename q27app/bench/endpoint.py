"""The server under measurement: our daemon or any other of OpenAI's dialect, with what it tells about itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q27app.bench.prompts import NO_THINKING, filler_message
from q27app.client import Client
from q27app.errors import NotFound, Q27Error, Unauthorized, Unreachable, UsageError

SILENCE_S = 1800.0
"""Other servers say nothing while they read a prompt, and a CPU may read for long."""
SERVE_KEYS = {"kv": "model.kv", "ctx": "model.context", "backend": "model.backend", "slots": "model.slots",
              "draft": "model.draft", "max_draft": "model.max_draft", "tokenizer": "model.tokenizer", "template": "model.template"}
USUAL_CHARS_PER_TOKEN = 4.0


@dataclass
class Endpoint:
    """A server that answers. label: its name in journals and tables. facts: tier, kv, context... as far as it tells."""

    client: Client
    label: str
    model: str
    facts: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    _slope: tuple[float, float] | None = None

    def body(self, messages: list[dict[str, Any]], max_tokens: int, fixed_length: bool = True, **fields: Any) -> dict[str, Any]:
        """A chat request without thinking. fixed_length: go on past end-of-text, where the server knows how."""
        return {"model": self.model, "messages": messages, "max_tokens": max_tokens, **NO_THINKING,
                **({"ignore_eos": True} if fixed_length else {}), **fields}

    async def counters(self) -> dict[str, int] | None:
        """Totals of our daemon's engine; None for other servers."""
        return (await self.client.status())["engine"]["counters"] if self.is_ours else None

    async def resources(self) -> dict[str, int | None]:
        """Bytes of our daemon: host memory of its process, memory of its first card."""
        if not self.is_ours:
            return {}
        status = await self.client.status()
        cards = status.get("gpus") or []
        return {"process_bytes": (status.get("host") or {}).get("process_bytes"),
                "card_bytes": cards[0].get("memory_used") if cards else None}

    async def num_chars(self, num_tokens: int) -> int:
        """Characters of filler that make a prompt of about so many tokens; measured once, by two short prompts."""
        if self._slope is None:
            small, large = [await self.prompt_tokens(self.body(filler_message(f"size {size}", size, "Go on."), 1)) for size in (400, 4000)]
            known = small is not None and large is not None and large > small
            self._slope = (3600 / (large - small), small - 400 * (large - small) / 3600) if known else (USUAL_CHARS_PER_TOKEN, 0.0)
        per_token, overhead = self._slope
        return max(0, round((num_tokens - overhead) * per_token))

    async def prompt_tokens(self, body: dict[str, Any]) -> int | None:
        """Tokens of a request's prompt, asked for in a request of its own without stream; None where the server does not tell."""
        reply = await self.client.post("/v1/chat/completions", {**body, "max_tokens": 1})
        count = (reply.get("usage") or {}).get("prompt_tokens")
        return count if isinstance(count, int) else None


@asynccontextmanager
async def open_endpoint(url: str, key: str = "", model: str = "", label: str = "") -> AsyncIterator[Endpoint]:
    """The server at `url`, asked for its name and figures. Raises Q27Error where it cannot be asked."""
    async with Client(url, key, SILENCE_S) as client:
        try:
            listed = await client.models()
        except Unauthorized as error:
            raise Unauthorized(f"{client.url}: {error.message}", "Give its key with --key KEY or --key @FILE.") from error
        except NotFound as error:
            raise NotFound(f"{client.url} has no /v1/models: {error.message}",
                           "--url is the server's base address, such as http://127.0.0.1:8080.") from error
        except (KeyError, TypeError) as error:
            raise Unreachable(f"{client.url} answers, but does not list its models as OpenAI does.",
                              "Is another program on this port?") from error
        status = await _our_status(client)
        name = model or (status or {}).get("model") or (listed[0] if listed else "")
        if not name:
            raise UsageError(f"{client.url} lists no models.", "Name one with --model.")
        facts = _our_facts(status) if status else {"server": client.url}
        yield Endpoint(client, label or client.url, str(name), {**facts, "model": str(name)}, status is not None)


async def _our_status(client: Client) -> dict[str, Any] | None:
    try:
        status = await client.status()
    except Q27Error:
        return None
    return status if "boot_id" in status and isinstance(status.get("engine"), dict) else None


def _our_facts(status: dict[str, Any]) -> dict[str, Any]:
    engine = status["engine"]
    model, plan = engine.get("model") or {}, engine.get("plan") or {}
    return {"server": f"q27app {status.get('version', '')}", "file": model.get("file"), "tier": model.get("tier"), "kv": model.get("kv_format"),
            "backend": model.get("backend"), "context": status.get("max_context"), "slots": plan.get("num_slots")}


def parse_serve(spec: str) -> tuple[str, dict[str, str]]:
    """MODEL[,kv=fp8][,ctx=N]... -> (label, settings of a daemon). Raises UsageError for an unknown key."""
    model, *pairs = spec.split(",")
    settings = {"model.path": str(Path(model).absolute()) if Path(model).is_file() else model}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in SERVE_KEYS or not value:
            raise UsageError(f"--serve {spec}: {pair!r} is not one of {', '.join(SERVE_KEYS)} with a value.",
                             "Such as --serve demo,kv=fp16,ctx=32768.")
        settings[SERVE_KEYS[key]] = value
    return spec if not Path(model).is_file() else ",".join([Path(model).stem, *pairs]), settings


@contextmanager
def served(spec: str) -> Iterator[tuple[str, str]]:
    """A daemon of our own for the time of a measurement: (label, url)."""
    from q27app.child_daemon import ChildDaemon

    label, settings = parse_serve(spec)
    typed: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in settings.items()}
    with ChildDaemon(typed) as daemon:
        yield label, daemon.url


def drafts_between(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, float | None]:
    """Accepted drafts a step, and tokens a step, between two readings of our counters."""
    if not before or not after:
        return {"accepted_a_step": None, "tokens_a_step": None}
    generated, accepted = (after[name] - before[name] for name in ("generated_tokens", "accepted_tokens"))
    steps = generated - accepted
    if steps <= 0:
        return {"accepted_a_step": None, "tokens_a_step": None}
    return {"accepted_a_step": round(accepted / steps, 4), "tokens_a_step": round(generated / steps, 4)}
