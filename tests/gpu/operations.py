"""Load, unload, sleep and wake on this machine's card: `python -m tests.gpu.operations [--cycles N] [--big FILE.q27]`.

    cycles     a nano is loaded and unloaded N times, the big file 3 times: what stays of each is printed
    plan       with the big file loaded: what the plan says it takes against what the card says
    wake       a daemon with a short idle limit: sleeps, and is woken by many requests at once

`turns` is also what the CPU suite runs, with the process' resident memory in place of the card's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from q27app.child_daemon import ChildDaemon
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig

WAIT_S = 300.0
MB = 1e6


@dataclass(frozen=True)
class Turn:
    """Bytes held when the model was there, and after it was given back; what the plan said it takes."""

    loaded: int
    unloaded: int
    planned: int
    load_s: float


def turns(config: EngineConfig, count: int, held: Callable[[], int]) -> list[Turn]:
    """`count` times load and unload in one engine. held: bytes in use now."""
    engine, found = Engine(config), []
    engine.start()
    try:
        for _ in range(count):
            started = time.monotonic()
            engine.load().result(WAIT_S)
            load_s, loaded, plan = time.monotonic() - started, held(), engine.status().plan
            engine.unload().result(WAIT_S)
            found.append(Turn(loaded, held(), int(plan["held"]), load_s))
    finally:
        engine.close()
    return found


def growth(found: list[Turn], settled: int) -> int:
    """Bytes by which what stays after unloading has grown since turn number `settled`."""
    return found[-1].unloaded - min(turn.unloaded for turn in found[settled - 1:settled + 2])


def card_bytes() -> int:
    """Bytes in use on the first card, as nvidia-smi says."""
    done = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return int(done.stdout) << 20


def show(name: str, found: list[Turn], before: int) -> None:
    first, last = found[0], found[-1]
    print(f"{name:<12} {len(found)} turns: before {before / MB:.1f} MB, loaded {last.loaded / MB:.1f}, unloaded first {first.unloaded / MB:.1f} "
          f"last {last.unloaded / MB:.1f}, growth {growth(found, min(3, len(found) - 1)) / MB:+.2f}, load {last.load_s:.2f} s", flush=True)


def compare(found: list[Turn]) -> None:
    """What loading took beyond the context that stays, against the plan."""
    took = found[-1].loaded - found[-1].unloaded
    planned = found[-1].planned
    print(f"plan {planned / 1e9:.3f} GB, the card gave {took / 1e9:.3f} GB: {100 * (took / planned - 1):+.2f} %", flush=True)


async def ask_at_once(port: int, count: int) -> list[int]:
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": 4}).encode()

    def ask() -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status

    return await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(count)))


def status(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as reply:
        return json.load(reply)


def wake(settings: dict, held: Callable[[], int]) -> None:
    """Sleeps although it is polled, is woken by 8 requests with one load, three times."""
    with ChildDaemon({**settings, "model.idle_unload": 1.0}) as daemon:
        for number in range(3):
            limit, awake = time.monotonic() + 60, held()
            while status(daemon.port)["engine"]["state"] != "unloaded":
                assert time.monotonic() < limit, "it does not sleep"
                time.sleep(0.2)
            asleep, before = held(), status(daemon.port)["engine"]["counters"]["loads"]
            started = time.monotonic()
            codes = asyncio.run(ask_at_once(daemon.port, 8))
            loads = status(daemon.port)["engine"]["counters"]["loads"] - before
            print(f"wake {number}: {awake / MB:.0f} MB awake, {asleep / MB:.0f} asleep; 8 requests: {sorted(set(codes))}, {loads} load, "
                  f"all answered after {time.monotonic() - started:.2f} s", flush=True)
            assert set(codes) == {200} and loads == 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--big", type=Path)
    options = parser.parse_args()
    from q27app.weights.synthetic import synthesize

    with tempfile.TemporaryDirectory() as folder:
        nano = Path(folder) / "nano.q27"
        synthesize(nano, "nano")
        before = card_bytes()
        show("nano", turns(EngineConfig(nano, "cuda", context=2048, slots=1), options.cycles, card_bytes), before)
        wake({"model.path": str(nano), "model.backend": "cuda", "model.context": 2048, "model.slots": 1}, card_bytes)
    if options.big:
        before = card_bytes()
        found = turns(EngineConfig(options.big, "cuda", context=65_536, slots=2), 3, card_bytes)
        show("big", found, before)
        compare(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
