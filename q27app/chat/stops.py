"""Finds the earliest end of any stop string in text that arrives in pieces.

One automaton a string (Knuth-Morris-Pratt): each character is looked at once, so long strings cost nothing more, and
the result does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOPS = 64
MAX_STOP_CHARS = 64 << 10


class StopMatcher:
    """`found` is the string that ended the text, or None. Of several that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first = {stop[0] for stop in self._stops}
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop string. After a match: the text before it, then nothing."""
        if self.found is not None:
            return ""
        if not self._stops or (not self._held and not any(char in text for char in self._first)):
            return text
        for index, char in enumerate(text):
            for which, stop in enumerate(self._stops):
                matched, failures = self._matched[which], self._failures[which]
                while matched and stop[matched] != char:
                    matched = failures[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    self.found = stop
                    seen = self._held + text[: index + 1]
                    self._held = ""
                    return seen[: len(seen) - len(stop)]
                self._matched[which] = matched
        seen = self._held + text
        keep = max(self._matched)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """What was held back; matching starts anew."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failures(stop: str) -> list[int]:
    table, matched = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = table[matched - 1]
        if stop[matched] == stop[index]:
            matched += 1
        table[index] = matched
    return table
