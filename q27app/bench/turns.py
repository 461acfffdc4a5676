"""An agent's turns through the chat API: each prompt is the last one, the server's own answer, and a tool's result.

System text, tools and results follow from the seed; the answer goes back as it came, calls included. So the prompts of two
servers differ only by what their models say, and answers have a fixed length where a server can be told so. reuse is what
the server says it took from its cache, of all prompt tokens; held is that share of what the turn before held (its prompt and
its answer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from q27app.bench.endpoint import Endpoint, drafts_between
from q27app.bench.exchange import Exchange, ask
from q27app.bench.journal import Journal
from q27app.bench.prompts import GREEDY, TOOLS, agent_system, next_messages
from q27app.bench.report import Column, Report, mean

COLUMNS = (
    Column("server", "server"), Column("tier", "tier"), Column("kv", "KV"), Column("turn", "turn", 0), Column("num_prompt", "prompt", 0),
    Column("num_cached", "cached", 0), Column("reuse_percent", "reuse %", 1), Column("held_percent", "of held %", 1),
    Column("first_ms", "first, ms", 0), Column("num_tokens", "tokens", 0), Column("decode_per_s", "decode tok/s", 1),
    Column("wall_s", "wall, s", 2), Column("accepted_a_step", "accepted/step", 2),
)
TASK = "Please go through the files one by one and say what has to change."


def keys(label: str, settings: Mapping[str, Any]) -> list[str]:
    return [f"{label}|turn {turn}" for turn in range(settings["turns"])]


async def measure(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """One row a turn. Going on: what is kept of earlier turns is said again word for word, the last of it unmeasured."""
    seed, scale = settings["seed"], settings["scale"]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": agent_system(seed, max(1, round(60 * scale)))}, {"role": "user", "content": TASK}]
    is_warm = True
    for turn, key in enumerate(keys(endpoint.label, settings)):
        row = journal.rows.get(key)
        if row is None:
            fields = {"tools": list(TOOLS)} if settings["tools"] else {}
            body = endpoint.body(messages, settings["tokens"], settings["fixed_length"], seed=seed, **fields, **GREEDY)
            if not is_warm:  # a resumed run: the server has forgotten the turns that were measured before
                await ask(endpoint.client, {**body, "max_tokens": 1})
            is_warm = True
            before = await endpoint.counters()
            exchange = await ask(endpoint.client, body)
            row = journal.add(key, turn=turn + 1, **exchange.figures(), **drafts_between(before, await endpoint.counters()),
                              said=said_by(exchange))
            say(f"{key}: {exchange.num_prompt} prompt tokens, first after {exchange.first_s or 0:.2f} s, {exchange.total_s:.2f} s")
            await asyncio.sleep(settings["pause_s"])
        else:
            is_warm = False
        messages = messages + next_messages(seed, turn, row["said"], scale)


def said_by(exchange: Exchange) -> dict[str, Any]:
    """The answer as a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": exchange.text}
    if exchange.calls:
        message["tool_calls"] = [
            {"id": call["id"] or f"call_{index}", "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for index, call in sorted(exchange.calls.items())]
    return message


def make_report(journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> Report:
    rows: list[dict[str, Any]] = []
    totals = []
    for label, known in facts.items():
        shared = {"server": label, "tier": known.get("tier"), "kv": known.get("kv"), "model": known.get("model")}
        found = [row for key, row in journal.rows.items() if key.startswith(f"{label}|turn ")]
        rows += [{**shared, **row} for row in _with_shares(found)]
        if found:
            totals.append({**shared, **_total(found)})
    shown = [{name: value for name, value in row.items() if name != "said"} for row in rows]
    notes = [f"{total['server']}: {total['turns']} turns in {total['wall_s']:.1f} s; first token mean {_ms_text(total['first_ms'])}, last "
             f"turn {_ms_text(total['first_last_ms'])}" + (f"; {total['reuse_percent']:.1f}% of all prompt tokens reused, "
             f"{total['held_percent']:.1f}% of what the turn before held" if total["held_percent"] is not None else
             "; the server does not say what it reused") for total in totals]
    return Report("turns", journal.stamp, COLUMNS, shown, {"settings": journal.settings, "totals": totals}, notes)


def _with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for index, row in enumerate(rows):
        prompt, cached = row["num_prompt"], row["num_cached"]
        held = _held(rows[index - 1]) if index and rows[index - 1]["turn"] == row["turn"] - 1 else None
        found.append({
            **row, "first_ms": _ms(row["first_s"]), "wall_s": row["total_s"],
            "reuse_percent": 100 * cached / prompt if cached is not None and prompt else None,
            "held_percent": 100 * cached / held if cached is not None and held else None})
    return found


def _held(row: Mapping[str, Any]) -> int | None:
    return None if row["num_prompt"] is None else row["num_prompt"] + row["num_tokens"]


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = all(row["num_cached"] is not None and row["num_prompt"] for row in rows)
    later = [(row["num_cached"], _held(before)) for before, row in zip(rows, rows[1:], strict=False)] if known else []
    held = sum(share for _, share in later if share)
    return {
        "turns": len(rows), "wall_s": sum(row["total_s"] for row in rows), "num_tokens": sum(row["num_tokens"] for row in rows),
        "first_ms": _ms(mean([row["first_s"] for row in rows if row["first_s"]])),
        "first_last_ms": _ms(rows[-1]["first_s"]), "num_prompt_last": rows[-1]["num_prompt"],
        "reuse_percent": 100 * sum(row["num_cached"] for row in rows) / sum(row["num_prompt"] for row in rows) if known else None,
        "held_percent": 100 * sum(cached for cached, _ in later) / held if held else None,
        "decode_per_s": mean([row["decode_per_s"] for row in rows if row["decode_per_s"]]),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ms_text(value: float | None) -> str:
    return "none shown" if value is None else f"{value:.0f} ms"
