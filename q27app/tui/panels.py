"""What the monitor's panels say, as lines for a given width. Pure: (snapshot, trends, width) -> lines.

Lines come in order of their importance: a panel that is too low shows the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from q27app.tui import figures
from q27app.tui.marks import Line, Marks, width_of
from q27app.tui.poller import Trends
from q27app.tui.snapshot import Part, Snapshot, clean, count, number

LABEL_WIDTH = 8
STATE_ROLES = {"ready": "good", "loading": "warn", "unloaded": "warn", "draining": "warn", "failed": "bad", "closed": "bad"}


def labelled(name: str, *spans: Any) -> Line:
    return [(f"{name:<{LABEL_WIDTH}}", "dim"), *spans]


def top_line(
    snapshot: Snapshot | None, address: str, failure: str, age_s: float | None, marks: Marks, width: int
) -> list[Line]:
    """[left, right]: the state and as many facts as fit, the most important first; at the right, how fresh all of it is."""
    separator = f" {marks.dot} "
    if snapshot is None:
        word = ("no answer", "bad") if failure else ("connecting", "warn")
        return [[word, (separator, "dim"), (address, "")], []]
    state = snapshot.state
    word = f"loading {snapshot.load_progress:.0%}" if state == "loading" else state
    left: Line = [("disconnected", "bad") if failure else (word, STATE_ROLES.get(state, "warn"))]
    is_old = failure or (age_s is not None and age_s > 3)
    right: Line = [(f"data {figures.duration(age_s)} old", "bad") if is_old and age_s is not None else ("live", "good")]
    facts = [snapshot.model_name, clean(snapshot.model.get("tier"), 12)]
    facts.append(f"{figures.thousands(snapshot.max_context)} ctx" if snapshot.max_context else "")
    facts += [f"KV {form}" if (form := clean(snapshot.model.get("kv_format"), 12)) else "", address.removeprefix("http://")]
    facts.append(f"up {figures.duration(number(snapshot.raw, 'uptime_s'))}")
    room = width - width_of(left) - width_of(right) - 2
    for fact in filter(None, facts):
        if len(separator) + len(fact) > room:
            break
        left += [(separator, "dim"), (fact, "")]
        room -= len(separator) + len(fact)
    return [left, right]


def card_lines(snapshot: Snapshot | None, trends: Trends, width: int, marks: Marks) -> list[Line]:
    """The first card with all it tells and a line for each other; the host where the model runs without a card."""
    if snapshot is None:
        return [[("no data yet", "dim")]]
    cards = snapshot.cards
    if not cards:
        return _host_lines(snapshot, trends, width, marks)
    card = cards[0]
    total, used = number(card, "memory_total"), number(card, "memory_used")
    lines: list[Line] = [[(clean(card.get("name"), width), "bold")]]
    parts = snapshot.parts if snapshot.is_on_card else []
    planned = sum(part.size for part in parts)
    if used is not None:
        parts = [*parts, Part("other", max(0, int(used) - planned))]
    lines += _memory_lines("VRAM", parts, total, used, width, marks)
    limit = number(card, "power_limit_w")
    power = number(card, "power_w")
    load = number(card, "utilization_percent")
    lines.append(_curved("load", _unit(load, " %"), trends["load"], 100.0, width, marks))
    power_words = f"{figures.thousands(power)}/{figures.thousands(limit)} W"
    lines.append(_curved("power", power_words, trends["power"], limit, width, marks))
    temperature = number(card, "temperature_c")
    role = "" if temperature is None or temperature < 80 else "warn" if temperature < 88 else "bad"
    fan = _unit(number(card, "fan_percent"), " %")
    lines.append(labelled("temp", (_unit(temperature, " C"), role), ("  fan ", "dim"), (fan, "")))
    lines.append(labelled("clocks", (f"{figures.thousands(number(card, 'sm_clock_mhz'))} / "
                                     f"{figures.thousands(number(card, 'memory_clock_mhz'))} MHz", "")))
    for other in cards[1:]:
        lines.append([(f"{count(other, 'index')}: ", "dim"), (clean(other.get("name"), max(10, width - 18)), ""),
                      (f" {figures.gigabytes(number(other, 'memory_used'))} GB", "dim")])
    return lines


def _host_lines(snapshot: Snapshot, trends: Trends, width: int, marks: Marks) -> list[Line]:
    host = snapshot.host
    total, available = number(host, "memory_total"), number(host, "memory_available")
    used = None if total is None or available is None else total - available
    parts = [] if snapshot.is_on_card else snapshot.parts
    lines: list[Line] = [[("No GPU: the model runs on the CPU.", "bold")]]
    lines += _memory_lines("memory", parts, total, used, width, marks)
    lines.append(_curved("CPU", _unit(number(host, "cpu_percent"), " %"), trends["load"], 100.0, width, marks))
    lines.append(labelled("daemon", (f"{figures.gigabytes(number(host, 'process_bytes'))} GB", ""), (" resident", "dim")))
    return lines


def _unit(value: float | None, unit: str) -> str:
    return f"{value:.0f}{unit}" if value is not None else figures.DASH


def _memory_lines(
    name: str, parts: list[Part], total: float | None, used: float | None, width: int, marks: Marks
) -> list[Line]:
    text = f" {figures.gigabytes(used)}/{figures.gigabytes(total)} GB"
    room = max(4, width - LABEL_WIDTH - len(text))
    bar = marks.bar([part.size / total for part in parts] if total else [], room)
    lines = [labelled(name, *bar, (text, ""))]
    legend: Line = []
    for index, part in enumerate(parts):
        spans: Line = [(marks.fills[index], f"part{index}"), (f"{part.name} {figures.gigabytes(part.size)} ", "")]
        if legend and sum(len(text) for text, _ in legend + spans) > width + 1:
            lines.append(legend)
            legend = []
        legend += spans
    return lines + ([legend] if legend else [])


def _curved(name: str, text: str, trend: list[float | None], top: float | None, width: int, marks: Marks) -> Line:
    text = f"{text:<11}"
    room = width - LABEL_WIDTH - len(text) - 1
    curve = marks.curve(trend, min(60, room), top) if room >= 4 else ""
    return labelled(name, (text + " ", ""), (curve, "accent"))


def engine_lines(snapshot: Snapshot | None, trends: Trends, width: int, marks: Marks, failure: str = "") -> list[Line]:
    """What the engine does and has done; failure: why nothing is known of it."""
    if snapshot is None:
        return [[(piece, "bad")] for piece in wrapped(failure, width)] or [[("no data yet", "dim")]]
    lines: list[Line] = []
    if snapshot.error:
        lines += [[(piece, "bad")] for piece in wrapped(f"{snapshot.state}: {snapshot.error}", width)[:4]]
    if snapshot.state == "loading":
        text = f" {snapshot.load_progress:.0%}"
        bar = marks.bar([snapshot.load_progress], max(4, width - LABEL_WIDTH - len(text)))
        lines.append(labelled("loading", *bar, (text, "")))
    rates, counters = snapshot.rates, snapshot.counters
    for name in ("decode", "prefill"):
        text = f"{figures.rate(number(rates, f'{name}_tokens_per_s'))} tok/s"
        lines.append(_curved(name, text, trends[name], None, width, marks))
    used = sum(row.slot is not None for row in snapshot.rows)
    waiting = snapshot.num_waiting
    lines.append(labelled("slots", (f"{used} of {count(snapshot.plan, 'num_slots') or figures.DASH} busy", ""),
                          ("   queue ", "dim"), (f"{waiting}", "warn" if waiting else "")))
    lines.append(labelled("reused", (figures.percent(snapshot.reused_share), ""), (" of prompt tokens", "dim")))
    drafted = count(counters, "drafted_tokens")
    lines.append(labelled("drafts", (figures.percent(snapshot.accepted_share), ""),
                          (" accepted" if drafted else " none drafted", "dim"), *(_per_step(snapshot) if drafted else [])))
    lines += _ranked("hits", snapshot.hits, width) + _ranked("misses", snapshot.misses, width)
    lines.append(labelled("done", (f"{count(counters, 'requests'):,}", ""), (" requests, ", "dim"),
                          (f"{figures.short(count(counters, 'generated_tokens'))}", ""), (" tokens", "dim")))
    num_errors = count(counters, "errors")
    lines.append(labelled("failed", (f"{num_errors:,}", "bad" if num_errors else ""), ("  stopped ", "dim"),
                          (f"{count(counters, 'cancels'):,}", ""), ("  refused ", "dim"), (f"{count(counters, 'refusals'):,}", "")))
    layers = count(snapshot.model, "num_layers")
    if layers:
        facts = [clean(snapshot.model.get("backend"), 8), f"{layers} layers", clean(snapshot.model.get("file"), 40)]
        lines.append(labelled("model", (", ".join(facts), "")))
    for reason in snapshot.plan.get("reasons") or []:
        lines.append([(clean(reason, width), "dim")])
    return lines


def _per_step(snapshot: Snapshot) -> Line:
    accepted = snapshot.accepted_per_step
    return [] if accepted is None else [(", ", "dim"), (f"{accepted:.1f}", ""), (" a step", "dim")]


def _ranked(name: str, counts: list[tuple[str, int]], width: int) -> list[Line]:
    """One line of as many of the counts as fit: how prompts found computed state, or why they did not."""
    line = labelled(name)
    for what, times in counts:
        spans: Line = [(", " if len(line) > 1 else "", "dim"), (f"{what} ", "dim"), (f"{times:,}", "")]
        if width_of(line + spans) > width:
            break
        line += spans
    return [line] if len(line) > 1 else []


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines of a width, broken at blanks."""
    import textwrap

    return textwrap.wrap(text, max(10, width))


def log_line(event: Mapping[str, Any]) -> Line:
    """One line of the daemon's log."""
    level = clean(event.get("level"), 8)
    role = {"warning": "warn", "error": "bad", "critical": "bad"}.get(level, "")
    return [(clock_time(event), "dim"), (f" {level:<7} ", role), (clean(event.get("message"), 4000), role)]


def clock_time(event: Mapping[str, Any]) -> str:
    """12:34:56 in the user's time zone."""
    import time

    moment = number(event, "time")
    try:
        return time.strftime("%H:%M:%S", time.localtime(moment)) if moment is not None else "--:--:--"
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
