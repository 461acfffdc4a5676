"""A fact in a long text, asked for: lengths x depths, each in a text of its own.

No cache can help: every text begins with words of its own seed. Where the server says that it reused more than the
template's first tokens, the row says so and does not count.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from q27app.bench.endpoint import Endpoint, drafts_between
from q27app.bench.exchange import ask
from q27app.bench.journal import Journal
from q27app.bench.prompts import GREEDY, haystack, needle
from q27app.bench.report import Column, Report, mean
from q27app.errors import BadRequest

MAX_CACHED = 128
"""Reused tokens that are the template's own."""


def keys(label: str, settings: Mapping[str, Any]) -> list[str]:
    return [f"{label}|{length}|{depth}|{trial}" for length in settings["lengths"] for depth in settings["depths"]
            for trial in range(settings["trials"])]


async def measure(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """One row for each text. A text that the window does not hold is a row with `refused`."""
    for key in journal.missing(keys(endpoint.label, settings)):
        _, length, depth, trial = key.rsplit("|", 3)
        seed = zlib.crc32(f"{settings['seed']} {length} {depth} {trial}".encode())
        found = needle(seed)
        messages = haystack(seed, await endpoint.num_chars(int(length)), float(depth) / 100, found)
        before = await endpoint.counters()
        try:
            exchange = await ask(endpoint.client, endpoint.body(messages, settings["tokens"], False, **GREEDY))
        except BadRequest as error:
            journal.add(key, refused=error.message[:300])
            say(f"{key}: refused: {error.message[:120]}")
            continue
        is_right = found.answer in exchange.text or found.answer in exchange.reasoning
        row = journal.add(key, is_right=is_right, is_cold=(exchange.num_cached or 0) <= MAX_CACHED, answer=exchange.text[:200],
                          expected=found.answer, **exchange.figures(), **drafts_between(before, await endpoint.counters()))
        say(f"{key}: {'right' if is_right else 'wrong'} at {row['num_prompt']} tokens")


def make_report(journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> Report:
    """A line a length, a column a depth: share of right answers."""
    depths = journal.settings["depths"]
    columns = [Column("server", "server"), Column("tier", "tier"), Column("kv", "KV"), Column("length", "length", 0),
               Column("num_prompt", "prompt", 0), *(Column(f"depth_{depth}", f"at {depth}%, right %", 0) for depth in depths),
               Column("right_percent", "right %", 1), Column("first_s", "first, s", 1), Column("not_cold", "warm, left out", 0),
               Column("refused", "refused", 0), Column("accepted_a_step", "accepted/step", 2),
               Column("reuse_percent", "reuse %", 1)]
    rows = []
    for label, known in facts.items():
        for length in journal.settings["lengths"]:
            found = [row for key, row in journal.rows.items() if key.startswith(f"{label}|{length}|")]
            if found:
                rows.append({"server": label, "tier": known.get("tier"), "kv": known.get("kv"), "model": known.get("model"),
                             "length": length, **_figures(found, depths)})
    return Report("needle", journal.stamp, columns, rows, {"settings": journal.settings}, [
        f"Greedy; each text has words of its own from its first sentence on, and what reused over {MAX_CACHED} tokens is left out."])


def _figures(rows: list[dict[str, Any]], depths: list[int]) -> dict[str, Any]:
    asked = [row for row in rows if "is_right" in row]
    counted = [row for row in asked if row["is_cold"]]

    def share(some: list[dict[str, Any]]) -> float | None:
        return None if not some else 100 * sum(row["is_right"] for row in some) / len(some)

    return {
        **{f"depth_{depth}": share([row for row in counted if row["key"].rsplit("|", 2)[1] == str(depth)]) for depth in depths},
        "right_percent": share(counted), "num_prompt": mean([row["num_prompt"] for row in counted if row["num_prompt"]]),
        "first_s": mean([row["first_s"] for row in counted if row["first_s"]]), "not_cold": len(asked) - len(counted),
        "refused": len(rows) - len(asked), "trials": len(counted),
        "reuse_percent": mean([100 * row["num_cached"] / row["num_prompt"] for row in counted if row["num_cached"] is not None]),
        "accepted_a_step": mean([row["accepted_a_step"] for row in counted if row["accepted_a_step"] is not None]),
    }
