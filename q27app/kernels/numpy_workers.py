"""Threads that share the tiles of a prefill pass.

NumPy's products and functions of arrays let other threads run. Every task computes what it would compute alone, with BLAS on one
thread, so bits depend neither on the number of threads nor on who finishes first; and as each thread takes the next task
when it is free, one that waits for a busy core holds nothing else up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

MAX_WORKERS = 8


def num_workers() -> int:
    """Cores that this process may use, at most MAX_WORKERS."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_workers() - 1, "q27app-numpy")


def share(task: Callable[[int], None], count: int) -> None:
    """Run task(0), ... task(count - 1), each once, on all workers. Returns when all are done; raises what a task raised."""
    if count < 2 or num_workers() == 1:
        for index in range(count):
            task(index)
        return
    waiting = list(range(count))[::-1]

    def work() -> None:
        while True:
            try:
                index = waiting.pop()
            except IndexError:
                return
            task(index)

    helpers = [_pool().submit(work) for _ in range(min(count, num_workers()) - 1)]
    try:
        work()
    finally:
        waiting.clear()
        for helper in helpers:
            helper.exception()
    for helper in helpers:
        helper.result()
