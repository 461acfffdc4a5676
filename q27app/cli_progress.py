"""Progress on standard error: one line that renews itself on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

import sys
import time


def human_bytes(count: float) -> str:
    """1.5 GB and the like, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


class Progress:
    """Call it with bytes done, bytes in all and a word on what is being done; it prints at most ten times a second."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started = time.monotonic()
        self._printed_at = 0.0
        self._printed_tenth = -1
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        tenth = 10 * done // total if total else 10
        if self._is_terminal:
            if now - self._printed_at < 0.1 and done < total:
                return
        elif tenth <= self._printed_tenth:
            return
        self._printed_at, self._printed_tenth = now, tenth
        rate = done / max(now - self._started, 1e-6)
        line = f"{self._verb} {human_bytes(done)} of {human_bytes(total)}, {human_bytes(rate)}/s  {what}"
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{line[:118]}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End the renewed line."""
        if self._is_terminal and self._printed_at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
