"""How slow this machine is: what a limit in seconds of processor time is multiplied with.

Limits hold on the machines that the project is made for. Elsewhere, and where another program takes the caches or half a core, plain
work of the same kinds takes longer too, and by as much may what is tested; a change that makes it slower itself is seen everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

TRIES = 5


def _interpreter() -> None:
    table: dict[int, list[int]] = {}
    for number in range(60_000):
        table.setdefault(number % 97, []).append(number)
    sum(sum(numbers) for numbers in table.values())


def _arithmetic() -> None:
    """Products as of a prompt and as of one token, and what is done to every value."""
    generator = np.random.default_rng(0)
    weights, rows = generator.random((256, 768), np.float32), generator.random((64, 256), np.float32)
    for _ in range(40):
        found = rows @ weights
        np.exp(found - found.max(axis=1, keepdims=True))
        for row in rows[:8]:
            row @ weights


USUAL: dict[Callable[[], None], float] = {_interpreter: 0.0055, _arithmetic: 0.0175}
"""Seconds of processor time on a quiet machine of two cores."""


def seconds(work: Callable[[], None]) -> float:
    """Processor time of this thread, the least of a few tries."""
    found = []
    for _ in range(TRIES):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def slowness() -> float:
    """At least 1; 2 where plain work takes twice as long as usual."""
    return max(1.0, *(seconds(work) / usual for work, usual in USUAL.items()))
