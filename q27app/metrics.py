"""The daemon's metrics, on prometheus-client with a registry of their own, so that two apps in one process don't mix.

Counters and histograms are moved by the daemon's loop; figures that the engine owns are read from its status when
somebody scrapes. Names start with `q27app_`, units are base units, rates are left to the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from q27app import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("unloaded", "loading", "ready", "failed", "draining", "closed")
BLOCK_POSITIONS = 64
"""Positions of a block (`kernels.batch`)."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

TIERS = ("host", "disk")
"""Where the prefix cache keeps states beyond the device."""


class Metrics:
    """One daemon's metrics. Both callbacks are called at each scrape and must be quick.

    read_status: gives `EngineStatus.to_dict()`. read_machine: gives {"gpus": [...], "host": {...}}.
    """

    def __init__(
        self, read_status: Callable[[], dict[str, Any]], read_machine: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_tokens()
        build = Gauge("q27app_build_info", "Version of the daemon.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self.registry.register(_EngineCollector(read_status))
        self.registry.register(_MachineCollector(read_machine))

    def _add_requests(self) -> None:
        registry = self.registry
        self.requests = Counter(
            "q27app_requests_total", "Requests for an answer.", ["api", "outcome"], registry=registry
        )
        self.request_seconds = Histogram(
            "q27app_request_seconds",
            "From the request's head to the last byte.",
            ["api"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "q27app_ttft_seconds",
            "From the request's head to the first token.",
            ["api"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "q27app_queue_seconds", "Waiting for a slot.", buckets=_SECONDS, registry=registry
        )
        self.disconnects = Counter(
            "q27app_disconnects_total", "Clients that left early.", ["phase"], registry=registry
        )
        self.tool_calls = Counter("q27app_tool_calls_total", "Tool calls in answers.", ["result"], registry=registry)
        self.tool_rescues = Counter(
            "q27app_tool_rescues_total", "Tool calls that were repaired, by kind of mistake.", ["mode"], registry=registry
        )
        self.active = Gauge("q27app_requests_active", "Requests for an answer in flight.", registry=registry)

    def _add_tokens(self) -> None:
        registry = self.registry
        self.prompt_tokens = Counter(
            "q27app_prompt_tokens_total", "Prompt tokens, cached ones included.", registry=registry
        )
        self.cached_tokens = Counter(
            "q27app_prompt_cached_tokens_total", "Prompt tokens that were not computed again, by the kind of state.", ["tier"],
            registry=registry,
        )
        self.generated_tokens = Counter("q27app_generated_tokens_total", "Generated tokens.", registry=registry)
        self.reasoning_tokens = Counter(
            "q27app_reasoning_tokens_total", "Generated tokens that were reasoning.", registry=registry
        )
        self.prefill_seconds = Counter(
            "q27app_prefill_seconds_total", "Time requests spent in prefill.", registry=registry
        )
        self.decode_seconds = Counter(
            "q27app_decode_seconds_total", "Time requests spent in decode.", registry=registry
        )
        self.drafted_tokens = Counter("q27app_spec_drafted_tokens_total", "Draft tokens proposed.", registry=registry)
        self.accepted_tokens = Counter(
            "q27app_spec_accepted_tokens_total", "Draft tokens accepted.", registry=registry
        )

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Turns the engine's status into metrics at scrape time."""

    def __init__(self, read_status: Callable[[], dict[str, Any]]) -> None:
        self._read_status = read_status

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._read_status()
        state = GaugeMetricFamily("q27app_engine_state", "1 for the state that the engine is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status.get("state") == name))
        yield state
        running, plan = status.get("running") or [], status.get("plan") or {}
        yield _gauge("q27app_model_loaded", "1 if the model answers.", status.get("state") == "ready")
        yield _gauge("q27app_queue_length", "Requests that wait for a slot.", status.get("waiting"))
        yield _gauge(
            "q27app_engine_heartbeat_seconds",
            "Age of the engine thread's last sign of life.",
            status.get("heartbeat_age_s"),
        )
        yield _gauge("q27app_context_tokens", "Largest window of a request.", plan.get("max_context"))
        slots = int(plan.get("num_slots") or 0)
        yield _states("q27app_slots", "Requests that can run at once.", used=len(running), free=max(0, slots - len(running)))
        kept = sum(int(each.get("num_computed") or 0) + int(each.get("num_generated") or 0) for each in running)
        room = int(plan.get("num_blocks") or 0) * BLOCK_POSITIONS
        yield _states("q27app_kv_tokens", "Positions of running requests, and of all blocks.", used=kept, capacity=room)
        loads = (status.get("counters") or {}).get("loads")
        yield CounterMetricFamily("q27app_loads", "Times that the model was loaded.", value=float(loads or 0))
        cache = status.get("cache") or {}
        yield _labelled("q27app_prefix_hits", "Prompts that began with a kept state.", "kind", cache.get("hits"))
        yield _labelled("q27app_prefix_misses", "Prompts of which too little was kept.", "reason", cache.get("misses"))
        yield _gauge("q27app_prefix_snapshots", "States that are kept.", cache.get("snapshots"))
        yield CounterMetricFamily("q27app_prefix_evictions", "States that were given up.", value=float(cache.get("evicted") or 0))
        yield CounterMetricFamily("q27app_prefix_lost", "States that the system gave no host memory for.", value=float(cache.get("lost") or 0))
        yield from _tiers({name: cache.get(name) or {} for name in TIERS})
        yield from _drafts((status.get("drafts") or {}).get("sources") or {})
        info = {
            name: str(value)
            for name, value in (status.get("model") or {}).items()
            if isinstance(value, (str, int, float))
        }
        info |= {"kv": str(plan.get("kv_format") or ""), "ctx": str(plan.get("max_context") or "")} if info else {}
        yield InfoMetricFamily("q27app_model", "What is served.", value=info)
        for name, value in (status.get("counters") or {}).items():
            if isinstance(value, (int, float)) and name.isidentifier():
                yield CounterMetricFamily(f"q27app_engine_{name}", "Counter of the engine.", value=float(value))


def _tiers(tiers: dict[str, dict[str, Any]]) -> Iterable[Metric]:
    """What the prefix cache keeps beyond the device: states that left with their blocks for host memory, and entries on disk."""
    states = GaugeMetricFamily("q27app_prefix_tier_states", "States that are kept off the device.", labels=["tier"])
    size = GaugeMetricFamily("q27app_prefix_tier_bytes", "Bytes of them.", labels=["tier"])
    came = CounterMetricFamily("q27app_prefix_tier_hits", "States that came back to the device from there.", labels=["tier"])
    for name, tier in tiers.items():
        states.add_metric([name], float(tier.get("entries") or 0))
        size.add_metric([name], float(tier.get("bytes") or 0))
        came.add_metric([name], float(tier.get("used") or tier.get("read") or 0))
    gone = float(tiers["host"].get("evicted") or 0)
    yield from (states, size, came, CounterMetricFamily("q27app_prefix_host_evictions", "States that host memory had no more room for.", value=gone))


def _drafts(sources: dict[str, dict[str, list[int]]]) -> Iterable[Metric]:
    """Drafts by source and depth; depth 1 is the first of a pass."""
    for name, key, text in (("q27app_draft_tokens", "drafted", "Draft tokens verified."),
                            ("q27app_draft_accepted_tokens", "accepted", "Draft tokens that became text.")):
        family = CounterMetricFamily(name, text, labels=["source", "depth"])
        for source, counts in sorted(sources.items()):
            for depth, count in enumerate(counts.get(key) or (), 1):
                family.add_metric([source, str(depth)], float(count))
        yield family


_CARD_FIGURES = (
    ("utilization_percent", "q27app_gpu_utilization_ratio", "Busy share of the card.", 0.01),
    ("temperature_c", "q27app_gpu_temperature_celsius", "Temperature of the card.", 1.0),
    ("power_w", "q27app_gpu_power_watts", "Power that the card draws.", 1.0),
)


class _MachineCollector:
    """The latest snapshot of the cards as metrics; a figure that a card does not tell is absent."""

    def __init__(self, read_machine: Callable[[], dict[str, Any]]) -> None:
        self._read_machine = read_machine

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        cards = self._read_machine().get("gpus") or []
        memory = GaugeMetricFamily("q27app_gpu_memory_bytes", "Memory of the card.", labels=["gpu", "kind"])
        for card in cards:
            for kind in ("total", "used", "free"):
                if card.get(f"memory_{kind}") is not None:
                    memory.add_metric([str(card["index"]), kind], float(card[f"memory_{kind}"]))
        yield memory
        for key, name, text, factor in _CARD_FIGURES:
            family = GaugeMetricFamily(name, text, labels=["gpu"])
            for card in cards:
                if card.get(key) is not None:
                    family.add_metric([str(card["index"])], card[key] * factor)
            yield family


def _labelled(name: str, text: str, label: str, values: Any) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in (values or {}).items():
        family.add_metric([str(key)], float(value))
    return family


def _states(name: str, text: str, **values: int) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], float(value))
    return family


def _gauge(name: str, text: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value or 0))
