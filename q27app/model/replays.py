"""Recorded passes by shape: what is launched for a shape is recorded once, and replayed without Python from then on.

A pass may be recorded if all that changes between two passes of its key lies in device buffers that `Backend.begin` fills.
The first pass of a key runs plainly, so that everything is loaded; the second one is recorded. The least recently used
recording goes when there are too many.

A device begins with a recording when all of it has been handed over, which takes the host a good half microsecond a launch: a pass is
recorded in several parts, the first one short, so that the device runs one while it is given the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence as Seq

import numpy as np

from q27app.kernels.backend import Backend, Replay
from q27app.kernels.batch import MAX_DECODE_ROWS, Batch

MAX_RECORDED = 144


def most_recorded(num_slots: int) -> int:
    """Recordings that are kept where so many sequences run: the usual shapes of their passes and some more."""
    return min(MAX_RECORDED, 48 + 16 * num_slots)


class Replays:
    """limit: most recordings that are kept; 0 = never record."""

    def __init__(self, backend: Backend, limit: int = MAX_RECORDED) -> None:
        self._backend, self.limit = backend, limit
        self._recorded: OrderedDict[Hashable, list[Replay] | None] = OrderedDict()
        self.num_fresh = 0
        """Runs so far that were no replays: they took longer than the next ones of their shape will."""

    def __len__(self) -> int:
        return sum(parts is not None for parts in self._recorded.values())

    def run(self, key: Hashable, *parts: Callable[[], None]) -> None:
        """Do what the parts do, in order; they must do the same whenever the key is the same, up to what `begin` has put on the
        device."""
        if not self.limit:
            return _in_order(parts)
        if key not in self._recorded:
            self._recorded[key] = None
            self.num_fresh += 1
            _in_order(parts)
        else:
            recorded = self._recorded[key]
            if recorded is None:
                self.num_fresh += 1
                recorded = self._recorded[key] = [self._backend.record(part) for part in parts]
            _in_order(recorded)
        self._recorded.move_to_end(key)
        while len(self._recorded) > self.limit:
            _close(self._recorded.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything: the buffers of the recordings are about to go."""
        for recorded in self._recorded.values():
            _close(recorded)
        self._recorded.clear()


def _in_order(parts: Seq[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _close(recorded: list[Replay] | None) -> None:
    for replay in recorded or ():
        replay.close()


def shape_of(batch: Batch, row_groups: Seq[int] = (), depth_group: int = 0) -> tuple:
    """What the launches of a row-family pass depend on. Up to MAX_DECODE_ROWS rows go through every stage together, so only the
    number of sequences and the longest one count, by its group (`Backend.row_groups`); more are cut at borders between
    sequences. depth_group: see `Backend.depth_group`."""
    lengths = np.diff(batch.row_starts)
    rows, longest = batch.num_rows, int(lengths.max())
    group = next((size for size in row_groups if size >= longest), longest)
    cut = (batch.num_seqs, group) if rows <= MAX_DECODE_ROWS else tuple(lengths.tolist())
    return batch.phase, rows, cut, len(batch.logit_rows), batch.deferred, depth_group
