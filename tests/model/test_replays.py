"""Recorded passes by shape: what runs when, in how many parts, and what is given back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from q27app.model.forward import _parts
from q27app.model.replays import Replays


@dataclass
class Recorder:
    """A backend of which nothing but recordings is asked."""

    told: list = field(default_factory=list)

    def record(self, run):
        self.told.append("record")
        return Recording(self, run)


@dataclass
class Recording:
    owner: Recorder
    run: object

    def __call__(self) -> None:
        self.owner.told.append("replay")
        self.run()

    def close(self) -> None:
        self.owner.told.append("close")


def test_a_shape_runs_plainly_then_is_recorded_part_by_part_and_replayed():
    backend, ran = Recorder(), []
    replays = Replays(backend)
    for _ in range(3):
        replays.run("shape", lambda: ran.append("first"), lambda: ran.append("second"))
    assert ran == ["first", "second"] * 3 and replays.num_fresh == 2 and len(replays) == 1
    assert backend.told == ["record", "record", *["replay"] * 4]


def test_the_least_recently_used_recording_goes_with_all_its_parts():
    backend = Recorder()
    replays = Replays(backend, limit=1)
    for key in "aab":
        replays.run(key, lambda: None, lambda: None)
    assert backend.told[-2:] == ["close", "close"] and len(replays) == 0
    replays.run("b", lambda: None)
    replays.clear()
    assert backend.told[-1] == "close" and len(replays) == 0


def test_without_recordings_everything_runs_plainly():
    backend, ran = Recorder(), []
    replays = Replays(backend, limit=0)
    for _ in range(3):
        replays.run("shape", lambda: ran.append(1), lambda: ran.append(2))
    assert ran == [1, 2] * 3 and not backend.told and not replays.num_fresh


@pytest.mark.parametrize("num_layers,ends", [(4, [4]), (24, [24]), (32, [1, 8, 32]), (64, [2, 16, 64])])
def test_parts_of_a_pass_begin_short(num_layers, ends):
    parts = _parts(num_layers)
    assert [part.stop for part in parts] == ends and [layer for part in parts for layer in part] == list(range(num_layers))
