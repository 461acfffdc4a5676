"""What a start spends its time with: a clock that is read at the end of each phase."""

from __future__ import annotations

import time


class Phases:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> float:
        """A phase has ended; the seconds that it took."""
        now = time.monotonic()
        self.seconds[name] = seconds = now - self._last
        self._last = now
        return seconds

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end of the last phase."""
        return self._last - self._began

    def __str__(self) -> str:
        return f"{self.total:.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
