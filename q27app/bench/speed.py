"""Prefill, decode and first token over HTTP: the two prompts that the field compares by, and prompts of given depths.

    narrative, code    sampled as the comparison says, `warmups` answers unmeasured, `runs` measured: mean and variation
    depth N            a prompt of about N tokens that no cache holds (cold), the same again (warm), greedily
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from q27app.bench.endpoint import Endpoint, drafts_between
from q27app.bench.exchange import ask
from q27app.bench.journal import Journal
from q27app.bench.prompts import CANONICAL, CANONICAL_SAMPLER, GREEDY, filler_message
from q27app.bench.report import Column, Report, mean, variation
from q27app.errors import BadRequest

QUESTION = "Continue this text."
COLUMNS = (
    Column("server", "server"), Column("tier", "tier"), Column("kv", "KV"), Column("test", "test"), Column("runs", "runs", 0),
    Column("num_prompt", "prompt", 0), Column("first_cold_ms", "first cold, ms", 0), Column("first_warm_ms", "first warm, ms", 0),
    Column("prefill_per_s", "prefill tok/s", 0), Column("decode_per_s", "decode tok/s", 1), Column("decode_cv", "CV %", 1),
    Column("num_tokens", "tokens", 0), Column("accepted_a_step", "accepted/step", 2), Column("reuse_percent", "reuse warm %", 1),
)


def keys(label: str, settings: Mapping[str, Any]) -> list[str]:
    """Every row that a whole measurement of one server has."""
    found = [f"{label}|{name}|{run}" for name in settings["prompts"] for run in range(settings["runs"])]
    return found + [f"{label}|depth {depth}|{run}|{kind}" for depth in settings["depths"] for run in range(settings["depth_runs"])
                    for kind in ("cold", "warm")]


async def measure(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Add the rows that the journal lacks. Raises Q27Error."""
    for name in settings["prompts"]:
        await _canonical(endpoint, journal, settings, name, say)
    for depth in settings["depths"]:
        for run in range(settings["depth_runs"]):
            await _depth(endpoint, journal, settings, depth, run, say)


async def _canonical(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], name: str, say: Callable[[str], None]) -> None:
    wanted = journal.missing(f"{endpoint.label}|{name}|{run}" for run in range(settings["runs"]))
    prompt, most = CANONICAL[name]
    most = min(most, settings["max_tokens"])
    messages = [{"role": "user", "content": prompt}]
    for number in range(settings["warmups"] if wanted else 0):
        await ask(endpoint.client, endpoint.body(messages, most, seed=10_000 + number, **CANONICAL_SAMPLER))
    for key in wanted:
        seed = int(key.rpartition("|")[2])
        before = await endpoint.counters()
        exchange = await ask(endpoint.client, endpoint.body(messages, most, seed=seed, **CANONICAL_SAMPLER))
        journal.add(key, **exchange.figures(), **drafts_between(before, await endpoint.counters()))
        say(f"{key}: {_shown(exchange.decode_per_s)} tok/s")


async def _depth(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], depth: int, run: int,
                 say: Callable[[str], None]) -> None:
    """Cold, then warm. A warm row that is missing alone gets its prompt read again first. A prompt that the window does not
    hold is a row with `refused`."""
    cold, warm = (f"{endpoint.label}|depth {depth}|{run}|{kind}" for kind in ("cold", "warm"))
    if journal.has(cold) and journal.has(warm):
        return
    size = await endpoint.num_chars(depth) if depth else 0
    body = endpoint.body(filler_message(f"{settings['seed']} {depth} {run}", size, QUESTION), settings["tokens"], seed=run, **GREEDY)
    for key in (cold, warm):
        if not journal.has(key) or (key == cold and not journal.has(warm)):
            before = await endpoint.counters()
            try:
                exchange = await ask(endpoint.client, body)
            except BadRequest as error:
                for refused in (cold, warm):
                    journal.add(refused, refused=error.message[:300])
                say(f"{endpoint.label}|depth {depth}: refused: {error.message[:120]}")
                return
            if not journal.has(key):
                after = await endpoint.counters()
                if exchange.num_prompt is None and key == warm:  # not before: it would warm the server
                    exchange.num_prompt = await endpoint.prompt_tokens(body)
                journal.add(key, **exchange.figures(), **drafts_between(before, after))
                say(f"{key}: first after {_shown(exchange.first_s)} s, {_shown(exchange.decode_per_s)} tok/s")
            await asyncio.sleep(settings["pause_s"])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def make_report(journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> Report:
    """The table of what the journal holds. facts: label -> what the server said about itself."""
    rows = []
    for label, known in facts.items():
        shared = {"server": label, "tier": known.get("tier"), "kv": known.get("kv"), "model": known.get("model")}
        tests = dict.fromkeys(key.split("|")[1] for key in journal.rows if key.startswith(f"{label}|") and key.count("|") >= 2)
        for test in tests:
            found = _rows_of(journal, label, test)
            measured = [row for row in found if "refused" not in row]
            rows.append({**shared, "test": test, **_summary(measured), "refused": found[0]["refused"] if not measured else ""})
    refused = [f"{row['server']}, {row['test']}: refused: {row['refused']}" for row in rows if row["refused"]]
    return Report("speed", journal.stamp, COLUMNS, rows, {"settings": journal.settings}, [
        "First token, prefill and decode by the client's clock; the first token's time holds the prompt's reading and one step. "
        "Decode excludes the first token. accepted/step: drafts that became text in each step.", *refused])


def _rows_of(journal: Journal, label: str, test: str) -> list[dict[str, Any]]:
    return [row for key, row in journal.rows.items() if key.startswith(f"{label}|{test}|")]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cold = [row for row in rows if row["key"].endswith("|cold")]
    warm = [row for row in rows if row["key"].endswith("|warm")]
    decode = [row["decode_per_s"] for row in rows if row["decode_per_s"]]
    reuse = [100 * row["num_cached"] / row["num_prompt"] for row in warm if row["num_cached"] is not None and row["num_prompt"]]
    return {
        "runs": len(cold) or len(rows), "num_prompt": _mean_of(rows, "num_prompt"), "num_tokens": _mean_of(rows, "num_tokens"),
        "first_cold_ms": _ms(cold or rows), "first_warm_ms": _ms(warm), "prefill_per_s": _prefill(cold, warm),
        "decode_per_s": mean(decode), "decode_cv": variation(decode), "accepted_a_step": _mean_of(rows, "accepted_a_step"),
        "reuse_percent": mean(reuse), "is_counted": all(row["is_counted"] for row in rows),
    }


def _prefill(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> float | None:
    """Prompt tokens a second of cold answers; the prompt's length from the warm ones where only they know it."""
    known = _mean_of(cold, "prefill_per_s")
    length, first = _mean_of(warm, "num_prompt"), _mean_of(cold, "first_s")
    return known if known is not None or length is None or not first else length / first


def _mean_of(rows: list[dict[str, Any]], name: str) -> float | None:
    return mean([row[name] for row in rows if row.get(name) is not None])


def _ms(rows: list[dict[str, Any]]) -> float | None:
    first = _mean_of(rows, "first_s")
    return None if first is None else 1000 * first
