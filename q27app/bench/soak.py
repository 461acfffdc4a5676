"""A server under agent turns for minutes or hours: does it fail, fall silent, grow or slow down?

`streams` agents talk at once; each begins anew, with another seed, after TURNS_EACH turns. Answers, errors and memory are
rows. The verdict:

    clean            nothing below
    errors           a request failed
    silent-empty     an answer ended by itself and held nothing (one that its limit ended may be half a call)
    grows            in the last third of the time memory of the card grew by more than 1%, or of the process by more than
                     5% and 64 MiB; before that caches may fill
    slows            tokens a second of whole answers fell by more than 10% from the first quarter of the time, a warm-up of a
                     tenth left out, to the last, where both have MIN_ANSWERS
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from q27app.bench.endpoint import Endpoint, drafts_between
from q27app.bench.exchange import ask
from q27app.bench.journal import Journal
from q27app.bench.prompts import GREEDY, TOOLS, agent_system, next_messages
from q27app.bench.report import Column, Report, mean
from q27app.bench.turns import TASK, said_by
from q27app.errors import Q27Error, Unauthorized, Unreachable

TURNS_EACH = 12
SAMPLE_S = 5.0
MIN_ANSWERS = 5
MAX_ERRORS_IN_A_ROW = 5
FIRST, LAST = (0.1, 0.325), (0.775, 1.0)
LATE, END = (0.6, 0.7), (0.9, 1.0)
"""Shares of the time whose means are compared: speed, and memory."""
CARD_GROWTH, PROCESS_GROWTH, PROCESS_BYTES, SLOWDOWN = 0.01, 0.05, 64 << 20, 0.10
COLUMNS = (
    Column("server", "server"), Column("tier", "tier"), Column("kv", "KV"), Column("minutes", "minutes", 1), Column("answers", "answers", 0),
    Column("errors", "errors", 0), Column("empty", "silent-empty", 0), Column("first_per_s", "tok/s an answer, first quarter", 1),
    Column("last_per_s", "last quarter", 1), Column("retention_percent", "retention %", 1), Column("reuse_percent", "reuse %", 1),
    Column("accepted_a_step", "accepted/step", 2), Column("process_growth_mb", "process growth, MB", 1),
    Column("process_late_mb", "in the last third", 1), Column("card_growth_mb", "card growth, MB", 1),
    Column("card_late_mb", "in the last third", 1), Column("verdict", "verdict"),
)


def keys(label: str, settings: Mapping[str, Any]) -> list[str]:
    return [f"{label}|end"]


async def measure(endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Run until the time (`seconds`) or the number of answers (`answers`, 0 = no limit) is reached; what an earlier run has
    done of either counts. Raises the error where MAX_ERRORS_IN_A_ROW requests fail one after the other."""
    if journal.has(f"{endpoint.label}|end"):
        return
    run = _Run(endpoint, journal, settings)
    await run.sample()
    watch = asyncio.create_task(run.watch(say))
    try:
        await asyncio.gather(*(run.agent(number) for number in range(settings["streams"])))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    await run.sample()
    journal.add(f"{endpoint.label}|end", elapsed=run.elapsed())


class _Run:
    """One soak. Owns the clock, which goes on from what the journal holds, and the numbers of the rows."""

    def __init__(self, endpoint: Endpoint, journal: Journal, settings: Mapping[str, Any]) -> None:
        self._endpoint, self._journal, self._settings = endpoint, journal, settings
        kept = [row for key, row in journal.rows.items() if key.startswith(f"{endpoint.label}|")]
        self._before_s = max((row.get("elapsed", 0.0) for row in kept), default=0.0)
        self._number = len(kept)
        self.answers = sum(row.get("kind") == "answer" for row in kept)
        self._started = time.monotonic()
        self._in_a_row = 0

    def elapsed(self) -> float:
        return round(self._before_s + time.monotonic() - self._started, 3)

    def is_over(self) -> bool:
        limit = self._settings["answers"]
        return self.elapsed() >= self._settings["seconds"] or bool(limit and self.answers >= limit)

    def _add(self, **values: Any) -> None:
        self._number += 1
        self._journal.add(f"{self._endpoint.label}|{self._number}", elapsed=self.elapsed(), **values)

    async def sample(self) -> None:
        try:
            self._add(kind="memory", **await self._endpoint.resources(), counters=await self._endpoint.counters())
        except Q27Error as error:
            self._add(kind="memory", error=error.message[:300])

    async def watch(self, say: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self.sample()
            say(f"{self._endpoint.label}: {self.elapsed() / 60:.1f} minutes, {self.answers} answers")

    async def agent(self, stream: int) -> None:
        """One agent, conversation after conversation."""
        conversation = 0
        while not self.is_over():
            seed = self._settings["seed"] + 1000 * stream + 100_000 * conversation + self._number
            await self._converse(seed)
            conversation += 1

    async def _converse(self, seed: int) -> None:
        scale = self._settings["scale"]
        messages: list[dict[str, Any]] = [{"role": "system", "content": agent_system(seed, max(1, round(60 * scale)))},
                                          {"role": "user", "content": TASK}]
        for turn in range(TURNS_EACH):
            if self.is_over():
                return
            body = self._endpoint.body(messages, self._settings["tokens"], False, tools=list(TOOLS), **GREEDY)
            try:
                exchange = await ask(self._endpoint.client, body)
            except Q27Error as error:
                self._fail(error)
                return
            self._in_a_row = 0
            self.answers += 1
            self._add(kind="answer", **exchange.figures(), is_empty=exchange.is_empty and exchange.finish != "length",
                      answer_per_s=round(exchange.num_tokens / exchange.total_s, 4))
            messages = messages + next_messages(seed, turn, said_by(exchange), scale)

    def _fail(self, error: Q27Error) -> None:
        self._add(kind="error", error=error.message[:300])
        self._in_a_row += 1
        if self._in_a_row >= MAX_ERRORS_IN_A_ROW or isinstance(error, (Unreachable, Unauthorized)):
            raise error


def make_report(journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> Report:
    rows = []
    for label, known in facts.items():
        found = [row for key, row in journal.rows.items() if key.startswith(f"{label}|") and "elapsed" in row]
        if any(row.get("kind") for row in found):
            rows.append({"server": label, "tier": known.get("tier"), "kv": known.get("kv"), "model": known.get("model"), **summary(found)})
    return Report("soak", journal.stamp, COLUMNS, rows, {"settings": journal.settings}, [
        f"Verdict words: clean, errors, silent-empty, grows (in the last third of the time: card over {CARD_GROWTH:.0%}, process over "
        f"{PROCESS_GROWTH:.0%} and {PROCESS_BYTES >> 20} MiB), slows (over {SLOWDOWN:.0%} from the first quarter to the last)."])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures and verdict of one server's rows."""
    end = max(row["elapsed"] for row in rows)
    answers = [row for row in rows if row.get("kind") == "answer"]
    errors, empty = sum(row.get("kind") == "error" for row in rows), sum(row["is_empty"] for row in answers)
    first, last = (_mean_between(answers, "answer_per_s", span, end, MIN_ANSWERS) for span in (FIRST, LAST))
    memory = [row for row in rows if row.get("kind") == "memory"]
    late = {name: _pair(memory, f"{name}_bytes", LATE, END, end) for name in ("process", "card")}
    growth = {f"{name}_growth_mb": _pair(memory, f"{name}_bytes", FIRST, END, end) for name in ("process", "card")}
    growth |= {f"{name}_late_mb": pair for name, pair in late.items()}
    retention = last / first if first and last else None
    words = [word for word, is_so in (
        ("errors", errors > 0), ("silent-empty", empty > 0), ("grows", _grows(late)),
        ("slows", retention is not None and retention < 1 - SLOWDOWN)) if is_so]
    known = [row for row in answers if row["num_cached"] is not None and row["num_prompt"]]
    counters = [row["counters"] for row in memory if row.get("counters")]
    return {
        "minutes": end / 60, "answers": len(answers), "errors": errors, "empty": empty, "first_per_s": first, "last_per_s": last,
        "retention_percent": None if retention is None else 100 * retention,
        "reuse_percent": 100 * sum(row["num_cached"] for row in known) / sum(row["num_prompt"] for row in known) if known else None,
        **drafts_between(counters[0] if counters else None, counters[-1] if counters else None),
        **{name: None if pair is None else (pair[1] - pair[0]) / 1e6 for name, pair in growth.items()},
        "verdict": ", ".join(words) or "clean",
    }


def _mean_between(rows: list[dict[str, Any]], name: str, span: tuple[float, float], end: float, least: int = 1) -> float | None:
    values = [row[name] for row in rows if row.get(name) and span[0] * end <= row["elapsed"] <= span[1] * end]
    return mean(values) if len(values) >= least else None


def _pair(rows: list[dict[str, Any]], name: str, before: tuple[float, float], after: tuple[float, float],
          end: float) -> tuple[float, float] | None:
    first, last = _mean_between(rows, name, before, end), _mean_between(rows, name, after, end)
    return None if first is None or last is None else (first, last)


def _grows(growth: Mapping[str, tuple[float, float] | None]) -> bool:
    card, process = growth["card"], growth["process"]
    return (card is not None and card[1] > card[0] * (1 + CARD_GROWTH)) or (
        process is not None and process[1] - process[0] > max(PROCESS_BYTES, process[0] * PROCESS_GROWTH))
