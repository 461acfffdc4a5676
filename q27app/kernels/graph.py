"""CUDA graphs: what a function launches on the stream, recorded once and replayed without Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rerun:
    """A replay that is the function itself, where nothing is recorded."""

    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()

    def close(self) -> None: ...


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Garbage in cycles may hold page-locked memory or events of what is closed; giving those back ends a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """A recorded pass. Calling it launches the whole; `num_nodes` says of how many parts."""

    def __init__(self, driver: Any, check: Callable[[tuple], Any], stream: Any, graph: Any) -> None:
        self._driver, self._check, self._stream = driver, check, stream
        count = check(driver.cuGraphGetNodes(graph))
        self.num_nodes = int(count[-1] if isinstance(count, list) else count)
        try:
            self._executable = check(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    @classmethod
    def capture(cls, driver: Any, check: Callable[[tuple], Any], stream: Any, run: Callable[[], None]) -> "Graph":
        """Record `run`. Everything it launches must be loaded, and nothing may be allocated meanwhile."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with _collector_paused():
            check(driver.cuStreamBeginCapture(stream, mode))
            try:
                run()
            except BaseException:
                driver.cuStreamEndCapture(stream)
                raise
            captured = check(driver.cuStreamEndCapture(stream))
        return cls(driver, check, stream, captured)

    @property
    def is_open(self) -> bool:
        return self._executable is not None

    def __call__(self) -> None:
        self._check(self._driver.cuGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        if self._executable is not None:
            self._check(self._driver.cuGraphExecDestroy(self._executable))
            self._executable = None
