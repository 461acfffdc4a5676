"""How many threads NumPy's BLAS may use.

OpenBLAS cuts every product among all cores and waits for the last: where something else keeps one of them busy, and a
daemon's own loop thread is enough, each of thousands of small products waits for a time slice, and a pass becomes many times
slower than on one thread. So a core is left to the others.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MAX_THREADS = 16
"""Products of 64 rows gain nothing from more."""

_SPELLINGS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


def leave_a_core() -> int | None:
    """Lower OpenBLAS from all the cores to all but one, for this process. Returns its threads; None with another BLAS."""
    read, write = _function("get_num_threads"), _function("set_num_threads")
    if read is None or write is None:
        return None
    cores = int(_function("get_num_procs")() if _function("get_num_procs") else 0)
    threads = int(read())
    if threads > 1 and threads >= cores:
        threads = max(1, min(cores - 1, MAX_THREADS))
        write(ctypes.c_int(threads))
    return threads


def use_threads(count: int) -> None:
    """Let OpenBLAS use `count` threads from now on; nothing with another BLAS."""
    write = _function("set_num_threads")
    if write is not None:
        write(ctypes.c_int(count))


@cache
def _function(name: str) -> Any:
    """The library's function as it is spelled in this build of NumPy, or None."""
    try:
        from numpy._core import _multiarray_umath as module
    except ImportError:  # NumPy 1
        from numpy.core import _multiarray_umath as module
    try:
        library = ctypes.CDLL(module.__file__)
    except OSError:
        return None
    return next((getattr(library, full) for spelling in _SPELLINGS
                 if hasattr(library, full := spelling.format(name))), None)
