"""The conditions of a measurement: machine, card, program, server, command. A figure without them is not comparable."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from q27app import __version__
from q27app.gpu import read_card_use, read_driver, read_gpus, read_host

CARD_FIELDS = ("name", "memory_total", "power_limit_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c")


def make_stamp(command: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    """The stamp of this moment on this machine. more: what the benchmark adds (model, tier, kv, context...)."""
    host = read_host()
    load = os.getloadavg()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "commit": read_commit(),
        "command": shlex.join(command if command is not None else ["q27app", *sys.argv[1:]]),
        "cpu": _cpu_name(),
        "num_cpus": host.num_cpus,
        "memory_total": host.memory_total,
        "load_average": round(load[0], 2),
        "python": platform.python_version(),
        **_cards(),
        **more,
    }


def _cards() -> dict[str, Any]:
    """The first card, its link and driver; {"card": "none"} without one."""
    cards, driver = read_gpus(), read_driver()
    if not cards:
        return {"card": "none"}
    card, use = cards[0], read_card_use(cards[0].index)
    found = {name: getattr(card, name) for name in CARD_FIELDS}
    return {
        "card": found.pop("name"), "num_cards": len(cards), "driver": driver.version if driver else None,
        "cuda": None if driver is None or driver.cuda is None else ".".join(map(str, driver.cuda)),
        "compute_capability": None if card.compute_capability is None else ".".join(map(str, card.compute_capability)),
        "power_default_w": use.power_default_w, "pcie": _link(use.pcie), "pcie_max": _link(use.pcie_max), **found,
    }


def _link(pair: tuple[int, int] | None) -> str | None:
    return None if pair is None else f"gen {pair[0]} x{pair[1]}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def read_commit() -> str | None:
    """The commit that this package was checked out from, with + where files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        name, changes = (subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
                         for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "q27app")))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if name.returncode else name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def stamp_lines(stamp: Mapping[str, Any]) -> list[str]:
    """The stamp for people: server, machine, program."""
    def text(*names: str) -> str:
        return ", ".join(f"{name} {stamp[name]}" for name in names if stamp.get(name) not in (None, ""))

    lines = [text("server", "model", "tier", "kv", "backend", "context", "slots", "draft"),
             text("card", "driver", "cuda", "power_limit_w", "pcie", "sm_clock_mhz", "memory_clock_mhz"),
             text("cpu", "num_cpus", "load_average", "version", "commit", "time")]
    return [line for line in lines if line]
