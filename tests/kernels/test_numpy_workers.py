"""Tiles are shared among threads: each is done once, what one raises is raised, and no bit depends on how many there are."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels import numpy_workers
from tests.kernels import made


@pytest.mark.parametrize("workers, count", [(1, 5), (2, 1), (2, 7), (2, 0), (4, 3)])
def test_each_task_is_done_once(monkeypatch, workers, count):
    monkeypatch.setattr(numpy_workers, "num_workers", lambda: workers)
    done = []
    numpy_workers.share(done.append, count)
    assert sorted(done) == list(range(count))


def test_two_tasks_run_at_the_same_time(monkeypatch):
    monkeypatch.setattr(numpy_workers, "num_workers", lambda: 2)
    both = threading.Barrier(2, timeout=60)
    numpy_workers.share(lambda index: both.wait(), 2)


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_what_a_task_raises_is_raised(monkeypatch, bad):
    monkeypatch.setattr(numpy_workers, "num_workers", lambda: 2)

    def task(index):
        if index == bad:
            raise ValueError(f"task {index}")

    with pytest.raises(ValueError, match=f"task {bad}"):
        numpy_workers.share(task, 6)


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    model = made.dense_model(replace(made.DEMO, vocab_size=500))
    tokens = np.random.default_rng(3).integers(0, 500, 300)
    found = []
    for workers in (1, 2, 5):
        monkeypatch.setattr(numpy_workers, "num_workers", lambda workers=workers: workers)
        lines = made.Lines(model)
        logits = lines.feed(0, tokens, logit_rows=[len(tokens) - 1])
        found.append((logits.tobytes(), bytes(lines.state.export_slot(0))))
    assert found[0] == found[1] == found[2]
