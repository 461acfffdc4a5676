"""The states that the screens are shown in: what a daemon would say in each. GB are 10**9 bytes."""

from __future__ import annotations

from typing import Any

GB = 10**9
NOW = 1_790_000_000.0

PLAN = {
    "free": 33 * GB, "weights": 17_200_000_000, "scratch": 600_000_000, "graphs": 200_000_000, "margin": GB,
    "slot_bytes": 150_000_000, "num_slots": 4, "block_bytes": 2_097_152, "num_blocks": 4096, "kv_format": "fp8",
    "max_context": 65_536, "reasons": ["slots: 4 (auto, of at most 4)", "context: 65536 (auto: what fits)"], "used": 27_190_000_000,
}
MODEL = {
    "name": "Qwen3.6-27B", "file": "qwen3.6-27b-q4s.q27", "backend": "cuda", "tier": "q4s", "generation": "3.6", "kv_format": "fp8",
    "num_layers": 64, "hidden_size": 5120, "vocab_size": 248_320, "num_mtp_layers": 1,
}
CARD = {
    "index": 0, "uuid": "GPU-1", "name": "NVIDIA GeForce RTX 5090", "compute_capability": [12, 0], "memory_total": 34_190_000_000,
    "memory_used": 28_400_000_000, "memory_free": 5_790_000_000, "utilization_percent": 4, "temperature_c": 41, "power_w": 32.5,
    "power_limit_w": 575.0, "sm_clock_mhz": 2407, "memory_clock_mhz": 14001, "fan_percent": 30, "pci_bus_id": "0000:01:00.0",
}
COUNTERS = {
    "requests": 137, "prompt_tokens": 412_000, "cached_tokens": 1_830_000, "generated_tokens": 96_400, "drafted_tokens": 120_000,
    "accepted_tokens": 74_400, "steps": 41_000, "errors": 0, "cancels": 3, "refusals": 1,
}
DRAFTS = {"cap": 7, "sources": {"mtp": {"drafted": [24_000, 20_000, 18_000], "accepted": [19_000, 15_000, 13_000]},
                                "suffix": {"drafted": [4_000, 4_000], "accepted": [3_600, 3_500]}}}
CACHE = {"snapshots": 11, "hits": {"settled": 92, "system": 21, "disk": 4}, "misses": {"new": 14, "diverged": 5, "not_kept": 1}}
LOG = [
    {"event": "log", "time": NOW - 300, "level": "info", "logger": "q27app.daemon", "message": "ready: a context of 65536 tokens"},
    {"event": "log", "time": NOW - 40, "level": "warning", "logger": "q27app.daemon", "message": "prefix diverged at token 4211"},
]
RECENT = [
    {"event": "request", "time": NOW - 200 + 40 * index, "id": f"9f3a{index}", "api": api, "client": client, "num_prompt": prompt,
     "num_cached": cached, "num_generated": made, "first_token_ms": first, "tokens_per_s": rate, "finish": finish}
    for index, (api, client, prompt, cached, made, first, rate, finish) in enumerate((
        ("messages", "claude-cli@127.0.0.1", 31_204, 29_952, 412, 610.4, 171.2, "stop"),
        ("chat", "OpenAI@192.168.1.7", 812, 0, 1_204, 380.0, 182.9, "stop"),
        ("responses", "codex@127.0.0.1", 18_001, 17_920, 88, 240.0, 164.0, "tool_calls"),
        ("chat", "curl@127.0.0.1", 40, 0, 3, 95.0, None, "cancelled"),
    ))
]


def status(**changes: Any) -> dict[str, Any]:
    """/status of an idle daemon, with changes: engine=..., requests=..., gpus=... and the like."""
    engine = {"state": "ready", "load_progress": 1.0, "error": None, "model": MODEL, "plan": PLAN, "running": [], "waiting": 0,
              "counters": COUNTERS, "rates": {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0}, "heartbeat_age_s": 0.5,
              "drafts": DRAFTS, "cache": CACHE}
    engine |= changes.pop("engine", {})
    return {"version": "0.1.0", "boot_id": "b0", "model": "qwen", "uptime_s": 7_634.0, "is_draining": False, "max_context": 65_536,
            "requests": [], "engine": engine, "gpus": [CARD], "host": {"num_cpus": 16, "cpu_percent": 3.0, "memory_total": 64 * GB,
                                                                      "memory_available": 50 * GB, "process_bytes": 2 * GB}, **changes}


def _request(name: str, client: str, phase: str, **figures: Any) -> dict[str, Any]:
    return {"id": name, "api": "chat", "client": client, "model": "qwen", "phase": phase, "age_s": 1.5, "num_prompt": 0, "num_cached": 0,
            "num_prefilled": 0, "num_generated": 0, "first_token_ms": None, "tokens_per_s": None, "finish": "", **figures}


BUSY_REQUESTS = [
    _request("r1", "claude-cli@127.0.0.1", "decode", age_s=14.2, num_prompt=31_616, num_cached=29_952, num_prefilled=31_616,
             num_generated=388, first_token_ms=590.2, tokens_per_s=174.3),
    _request("r2", "codex@127.0.0.1", "prefill", age_s=3.1, num_prompt=20_480, num_cached=2_048, num_prefilled=8_806),
]
BUSY_RUNNING = [
    {"id": "r1", "client": "x", "phase": "running", "num_prompt": 31_616, "num_cached": 29_952, "num_computed": 32_004,
     "num_generated": 388, "slot": 0, "tokens_per_s": 174.3, "first_token_ms": 590.2},
    {"id": "r2", "client": "x", "phase": "prefilling", "num_prompt": 20_480, "num_cached": 2_048, "num_computed": 8_806,
     "num_generated": 0, "slot": 2, "tokens_per_s": 0.0, "first_token_ms": None},
]
BUSY_CARD = CARD | {"utilization_percent": 97, "temperature_c": 71, "power_w": 448.0}
BUSY_ENGINE = {"running": BUSY_RUNNING, "rates": {"prefill_tokens_per_s": 2_110.0, "decode_tokens_per_s": 174.3}}
QUEUED = [_request(f"w{index}", f"agent-{index}@10.0.0.{index}", "queued", age_s=6.0 - index) for index in range(5)]
SENSORLESS = CARD | {"power_w": None, "power_limit_w": None, "temperature_c": None, "fan_percent": None, "utilization_percent": None,
                     "sm_clock_mhz": None, "memory_clock_mhz": None}

SCENES: dict[str, dict[str, Any]] = {
    "idle": status(),
    "loading": status(engine={"state": "loading", "load_progress": 0.43, "plan": {}, "counters": {}}, max_context=None,
                      gpus=[CARD | {"memory_used": 8_100_000_000}]),
    "busy": status(engine=BUSY_ENGINE, requests=BUSY_REQUESTS, gpus=[BUSY_CARD]),
    "queue": status(engine=BUSY_ENGINE | {"waiting": 5}, requests=BUSY_REQUESTS + QUEUED, gpus=[BUSY_CARD]),
    "sensorless": status(gpus=[SENSORLESS]),
    "disconnected": status(engine=BUSY_ENGINE, requests=BUSY_REQUESTS, gpus=[BUSY_CARD]),
    "failed": status(engine={"state": "failed", "error": "CUDA error 700 in attend_decode: an illegal memory access was encountered. "
                             "The engine has stopped; restart the daemon."}),
}
SIZES = ((60, 20), (80, 24), (120, 40), (200, 60))
