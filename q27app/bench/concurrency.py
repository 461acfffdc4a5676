"""Several streams at once: what they get together and each, how long they wait for a first token and between two pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

from q27app.bench.endpoint import Endpoint, drafts_between
from q27app.bench.exchange import Exchange, ask
from q27app.bench.journal import Journal
from q27app.bench.prompts import GREEDY, filler_message
from q27app.bench.report import Column, Report, mean, quantile
from q27app.errors import Q27Error

COLUMNS = (
    Column("server", "server"), Column("tier", "tier"), Column("kv", "KV"), Column("streams", "streams", 0),
    Column("aggregate_per_s", "all tok/s", 1), Column("steady_per_s", "steady tok/s", 1), Column("stream_per_s", "stream tok/s", 1), Column("slowest_per_s", "slowest tok/s", 1),
    Column("first_p50_ms", "first p50, ms", 0), Column("first_max_ms", "first max, ms", 0), Column("gap_p50_ms", "gap p50, ms", 1),
    Column("gap_p99_ms", "gap p99, ms", 1), Column("gap_max_ms", "gap max, ms", 1), Column("num_tokens", "tokens", 0),
    Column("accepted_a_step", "accepted/step", 2), Column("reuse_percent", "reuse %", 1), Column("errors", "errors", 0),
)


def keys(label: str, settings: Mapping[str, Any]) -> list[str]:
    return [f"{label}|{count}" for count in settings["streams"]]


async def measure(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """One row for each number of streams. Every stream has a prompt of its own that no cache holds. Where all of them fail
    nothing was measured: raises the first error."""
    size = await endpoint.num_chars(settings["prompt"])
    for count in settings["streams"]:
        key = f"{endpoint.label}|{count}"
        if journal.has(key):
            continue
        bodies = [endpoint.body(filler_message(f"{settings['seed']} {count} {stream}", size, "Continue this text."),
                                settings["tokens"], seed=stream, **GREEDY) for stream in range(count)]
        before = await endpoint.counters()
        started = time.perf_counter()
        found = await asyncio.gather(*(_tried(endpoint, body) for body in bodies))
        seconds = time.perf_counter() - started
        failed = [item for item in found if isinstance(item, Q27Error)]
        if len(failed) == count:
            raise failed[0]
        row = journal.add(key, streams=count, **_figures(found, seconds), **drafts_between(before, await endpoint.counters()))
        say(f"{key}: {row['aggregate_per_s']} tok/s together")


async def _tried(endpoint: Endpoint, body: dict[str, Any]) -> Exchange | Q27Error:
    try:
        return await ask(endpoint.client, body)
    except Q27Error as error:
        return error


def _figures(found: list[Exchange | Q27Error], seconds: float) -> dict[str, Any]:
    good = [item for item in found if isinstance(item, Exchange)]
    rates = [item.decode_per_s for item in good if item.decode_per_s]
    firsts = [item.first_s for item in good if item.first_s is not None]
    gaps = [gap for item in good for gap in item.gaps]
    tokens = sum(item.num_tokens for item in good)
    known = [item for item in good if item.num_cached is not None and item.num_prompt]
    return {
        "seconds": round(seconds, 4), "num_tokens": tokens, "aggregate_per_s": round(tokens / seconds, 3),
        "steady_per_s": steady_rate(good), "stream_per_s": mean(rates), "slowest_per_s": min(rates, default=None), "first_p50_ms": _ms(quantile(firsts, 0.5)),
        "first_max_ms": _ms(max(firsts, default=None)), "gap_p50_ms": _ms(quantile(gaps, 0.5)), "gap_p99_ms": _ms(quantile(gaps, 0.99)),
        "gap_max_ms": _ms(max(gaps, default=None)), "errors": len(found) - len(good), "num_prompt": mean([
            item.num_prompt for item in good if item.num_prompt is not None]),
        "reuse_percent": mean([100 * item.num_cached / item.num_prompt for item in known]),
        "first_error": next((item.message[:300] for item in found if isinstance(item, Q27Error)), ""),
    }


def steady_rate(found: Seq[Exchange]) -> float | None:
    """Tokens a second of all streams together while every one of them is past its first piece and none has ended; a piece counts
    as its share of the stream's tokens. None where there is no such time."""
    begun = [item.started + item.arrivals[0] for item in found if item.arrivals]
    if not begun or len(begun) < len(found):
        return None
    since, until = max(begun), min(item.started + item.total_s for item in found)
    if until <= since:
        return None
    tokens = sum(item.num_tokens / len(item.arrivals) * sum(since < item.started + at <= until for at in item.arrivals) for item in found)
    return round(tokens / (until - since), 3)


def _ms(value: float | None) -> float | None:
    return None if value is None else round(1000 * value, 3)


def make_report(journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> Report:
    rows = [{"server": label, "tier": known.get("tier"), "kv": known.get("kv"), "model": known.get("model"), **row}
            for label, known in facts.items() for key, row in journal.rows.items() if key.startswith(f"{label}|") and "streams" in row]
    notes = ["All streams begin together; 'all' is every generated token over the time until the last stream ended, prefill "
             "included; 'steady' is the rate while all of them generate; 'gap' is the time between two pieces of one stream."]
    failed = next((row["first_error"] for row in rows if row.get("first_error")), "")
    return Report("concurrency", journal.stamp, COLUMNS, rows, {"settings": journal.settings},
                  notes + ([f"First error: {failed}"] if failed else []))
