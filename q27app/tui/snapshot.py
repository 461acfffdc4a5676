"""What the daemon's /status says, as plain values. Nothing here trusts the sender: a member that is missing or of another
kind is None, 0 or "", texts are one line without control characters, numbers are finite.

Owner of nothing; a `Snapshot` is immutable. Bytes are bytes, rates tokens a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TEXT = 200
MAX_ROWS = 512
EMPTY: Mapping[str, Any] = {}


def clean(value: Any, limit: int = MAX_TEXT) -> str:
    """`value` as one printable line of at most `limit` characters; "" for None."""
    text = "" if value is None else str(value)[: 2 * limit]
    text = "".join(mark if mark.isprintable() else " " for mark in text)
    return text if len(text) <= limit else text[: limit - 1] + "~"


def printable(text: str) -> str:
    """`text` with its lines and tabs, without the characters that would command a terminal."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\ufffd" for mark in text)


def number(source: Mapping[str, Any], key: str) -> float | None:
    """A finite number, else None."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e18:
        return None
    return value if math.isfinite(value) else None


def count(source: Mapping[str, Any], key: str) -> int:
    """A number >= 0 without its fraction; 0 if there is none."""
    return max(0, int(number(source, key) or 0))


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object, {} if there is none."""
    value = source.get(key)
    return value if isinstance(value, Mapping) else EMPTY


def mappings(source: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The objects of a list, at most MAX_ROWS."""
    value = source.get(key)
    return [entry for entry in value[:MAX_ROWS] if isinstance(entry, Mapping)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Part:
    """A share of memory: "weights", "KV", "state", "scratch", "other"."""

    name: str
    size: int


@dataclass(frozen=True)
class Row:
    """A request that is in the daemon. slot: None while it has none. state: a word, with the share of the prefill."""

    id: str
    slot: int | None
    state: str
    client: str
    num_context: int
    num_prompt: int
    num_cached: int
    tokens_per_s: float | None
    first_token_ms: float | None
    age_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """One reply of /status. raw: the whole of it."""

    raw: Mapping[str, Any]

    @property
    def engine(self) -> Mapping[str, Any]:
        return mapping(self.raw, "engine")

    @property
    def plan(self) -> Mapping[str, Any]:
        return mapping(self.engine, "plan")

    @property
    def model(self) -> Mapping[str, Any]:
        return mapping(self.engine, "model")

    @property
    def counters(self) -> Mapping[str, Any]:
        return mapping(self.engine, "counters")

    @property
    def rates(self) -> Mapping[str, Any]:
        return mapping(self.engine, "rates")

    @property
    def host(self) -> Mapping[str, Any]:
        return mapping(self.raw, "host")

    @property
    def cards(self) -> list[Mapping[str, Any]]:
        return mappings(self.raw, "gpus")[:16]

    @property
    def state(self) -> str:
        if self.raw.get("is_draining") is True:
            return "draining"
        return clean(self.engine.get("state"), 20) or "unknown"

    @property
    def error(self) -> str:
        return clean(self.engine.get("error"), 2000)

    @property
    def load_progress(self) -> float:
        return min(1.0, max(0.0, number(self.engine, "load_progress") or 0.0))

    @property
    def model_name(self) -> str:
        return clean(self.model.get("name") or self.raw.get("model"), 60)

    @property
    def max_context(self) -> int:
        return count(self.raw, "max_context") or count(self.plan, "max_context")

    @property
    def num_waiting(self) -> int:
        return count(self.engine, "waiting")

    @property
    def is_on_card(self) -> bool:
        return self.model.get("backend") == "cuda"

    @property
    def parts(self) -> list[Part]:
        """How the plan divides memory; [] while there is no plan."""
        plan = self.plan
        if not count(plan, "weights"):
            return []
        return [
            Part("weights", count(plan, "weights")),
            Part("KV", count(plan, "num_blocks") * count(plan, "block_bytes")),
            Part("state", count(plan, "num_slots") * count(plan, "slot_bytes")),
            Part("scratch", count(plan, "scratch") + count(plan, "graphs")),
        ]

    @property
    def reused_share(self) -> float | None:
        """Share of prompt tokens that were not computed again."""
        cached, computed = count(self.counters, "cached_tokens"), count(self.counters, "prompt_tokens")
        return cached / (cached + computed) if cached + computed else None

    @property
    def accepted_share(self) -> float | None:
        """Share of draft tokens that were right."""
        drafted = count(self.counters, "drafted_tokens")
        return count(self.counters, "accepted_tokens") / drafted if drafted else None

    @property
    def accepted_per_step(self) -> float | None:
        """Draft tokens that were right, for each step that drafted; None while none did."""
        sources = [value for value in list(mapping(mapping(self.engine, "drafts"), "sources").values())[:8]
                   if isinstance(value, Mapping)]
        num_steps = sum(sum(_ints(source, "drafted")[:1]) for source in sources)
        return sum(sum(_ints(source, "accepted")) for source in sources) / num_steps if num_steps else None

    @property
    def hits(self) -> list[tuple[str, int]]:
        """(where the reused state lay, how often), the most frequent first."""
        return _ranked(mapping(mapping(self.engine, "cache"), "hits"))

    @property
    def misses(self) -> list[tuple[str, int]]:
        """(why what had been computed was computed again, how often), the most frequent first."""
        return _ranked(mapping(mapping(self.engine, "cache"), "misses"))

    @property
    def rows(self) -> list[Row]:
        """Running requests by slot, then waiting ones, the oldest first."""
        running = {clean(entry.get("id")): entry for entry in mappings(self.engine, "running")}
        rows = [_row(request, running.pop(clean(request.get("id")), EMPTY)) for request in mappings(self.raw, "requests")]
        rows += [_row(EMPTY, entry) for entry in running.values()]
        return sorted(rows, key=lambda row: (row.slot is None, row.slot or 0, -row.age_s))


def _ints(source: Mapping[str, Any], key: str) -> list[int]:
    value = source.get(key)
    return [max(0, entry) for entry in value[:64] if type(entry) is int] if isinstance(value, list) else []


def _ranked(counts: Mapping[str, Any]) -> list[tuple[str, int]]:
    found = [(clean(name, 16).replace("_", " "), count(counts, name)) for name in list(counts)[:16]]
    return sorted((entry for entry in found if entry[1]), key=lambda entry: -entry[1])


def _row(request: Mapping[str, Any], running: Mapping[str, Any]) -> Row:
    facts = {**running, **request}
    slot = running.get("slot")
    num_prompt = count(facts, "num_prompt")
    num_done = max(count(running, "num_computed"), count(request, "num_prefilled"))
    phase = clean(facts.get("phase"), 12)
    if phase in ("prefill", "prefilling"):
        phase = f"prefill {min(1.0, num_done / max(1, num_prompt)):.0%}"
    elif phase in ("running", "decode"):
        phase = "decode"
    elif phase == "waiting":
        phase = "queued"
    generated = max(count(request, "num_generated"), count(running, "num_generated"))
    context = num_prompt + generated if phase == "decode" else num_done
    return Row(
        id=clean(facts.get("id")),
        slot=slot if isinstance(slot, int) and not isinstance(slot, bool) else None,
        state=phase,
        client=clean(facts.get("client"), 60),
        num_context=context,
        num_prompt=num_prompt,
        num_cached=count(facts, "num_cached"),
        tokens_per_s=number(running, "tokens_per_s") or number(request, "tokens_per_s"),
        first_token_ms=number(request, "first_token_ms") or number(running, "first_token_ms"),
        age_s=number(request, "age_s") or 0.0,
        facts=facts,
    )
