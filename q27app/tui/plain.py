"""The daemon's state as plain lines, for scripts, dumb terminals and screen readers: a name, a value, no colour, no columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from q27app.tui import figures
from q27app.tui.snapshot import Snapshot, clean, count, number


def status_lines(snapshot: Snapshot, address: str) -> list[str]:
    """A line a fact, always in the same order."""
    state = f"loading, {snapshot.load_progress:.0%}" if snapshot.state == "loading" else snapshot.state
    model, counters, rates = snapshot.model, snapshot.counters, snapshot.rates
    facts = [clean(model.get(key)) for key in ("tier", "kv_format", "backend") if model.get(key)]
    lines = [("address", address), ("state", state)]
    if snapshot.error:
        lines.append(("error", snapshot.error))
    lines += [
        ("model", ", ".join([snapshot.model_name or "none", *facts])),
        ("context", f"{figures.thousands(snapshot.max_context or None)} tokens"),
        ("up", figures.duration(number(snapshot.raw, "uptime_s"))),
    ]
    for part in snapshot.parts:
        lines.append((f"memory {part.name}", f"{figures.gigabytes(part.size)} GB"))
    lines += [(f"card {count(card, 'index')}", _card_words(card)) for card in snapshot.cards]
    lines += [
        ("decode", f"{figures.rate(number(rates, 'decode_tokens_per_s'))} tokens/s"),
        ("prefill", f"{figures.rate(number(rates, 'prefill_tokens_per_s'))} tokens/s"),
        ("reused", f"{figures.percent(snapshot.reused_share)} of prompt tokens"),
        ("hits", _counts(snapshot.hits)),
        ("misses", _counts(snapshot.misses)),
        ("drafts", f"{figures.percent(snapshot.accepted_share)} accepted, {figures.rate(snapshot.accepted_per_step)} a step"),
        ("requests", f"{count(counters, 'requests'):,} taken, {count(counters, 'errors'):,} failed, "
                     f"{count(counters, 'cancels'):,} stopped, {count(counters, 'refusals'):,} refused"),
        ("waiting", f"{snapshot.num_waiting}"),
    ]
    for row in snapshot.rows:
        place = f"slot {row.slot}" if row.slot is not None else "queue"
        lines.append((place, f"{row.state}, {row.client or 'unknown client'}, {row.num_context:,} tokens of context, "
                             f"{figures.rate(row.tokens_per_s)} tokens/s, {figures.duration(row.age_s)}, id {row.id}"))
    return [f"{name + ':':<16} {value}" for name, value in lines]


def _counts(counts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {times:,}" for name, times in counts) or "none"


def _card_words(card: Mapping[str, Any]) -> str:
    def figure(key: str, unit: str) -> str:
        value = number(card, key)
        return f"{value:.0f} {unit}" if value is not None else f"{figures.DASH} {unit}"

    return (f"{clean(card.get('name'), 60)}, {figures.gigabytes(number(card, 'memory_used'))} of "
            f"{figures.gigabytes(number(card, 'memory_total'))} GB, load {figure('utilization_percent', '%')}, "
            f"{figure('power_w', 'W')} of {figure('power_limit_w', 'W')}, {figure('temperature_c', 'C')}")


def changed_lines(before: list[str], now: list[str]) -> list[str]:
    """What `--watch --plain` says: the lines that are new. The uptime alone is no news."""
    return [line for line in now if line not in before and not line.startswith("up:")]
