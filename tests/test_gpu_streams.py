"""The sections that measure many answers and whole prompts on a card, without one: each part reaches its end and says what it should."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

import q27app.kernels
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.synthetic import synthesize
from tests.gpu import checks, prompts, streams, whole
from tests.kernels.counting_device import CARDS, CountingDevice

PASS_S = 1e-3


class TimedDevice(CountingDevice):
    """Computes nothing; a recorded pass, whatever its parts, takes PASS_S a part behind what was launched before."""

    free_at = 0.0

    def record(self, run):
        device = self

        class Replay:
            def __call__(self) -> None:
                device.free_at = max(device.free_at, time.perf_counter()) + PASS_S

            def close(self) -> None: ...

        return Replay()

    def mark(self) -> float:
        return self.free_at

    def wait(self, event: float) -> None:
        time.sleep(max(0.0, event - time.perf_counter()))

    def synchronize(self) -> None:
        self.wait(self.free_at)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("nano") / "nano.q27", wiring="chain")


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(checks, "failures", [])


@pytest.mark.long
def test_every_part_over_http_reaches_its_end(path, capsys):
    assert streams.main(["off", "on", "gap", "turn", "disk"], path, streams.SMALL, "numpy") == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    for words in ("off, 3 at once", "on, 3 at once", "its ", "turn, 0.0 s after it", "texts equal"):
        assert words in said, said


def test_conversations_come_back_from_host_memory(path, monkeypatch, capsys):
    """The device computes nothing: where they come from is tested here, their texts elsewhere."""
    monkeypatch.setattr(q27app.kernels, "open_backend", lambda *_: CudaBackend(TimedDevice(CARDS["wide"])))
    assert streams.main(["host"], path, streams.SMALL, "cuda") == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.count("texts equal") == 3 and said.count("known 640 host") == 3, said


def test_bare_passes_and_steps_of_the_engine_are_compared(path, monkeypatch, capsys):
    monkeypatch.setattr(q27app.kernels, "open_backend", lambda *_: CudaBackend(TimedDevice(CARDS["wide"])))
    assert streams.main(["solo"], path, streams.SMALL, "cuda") == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "solo, 1 at once" in said and "solo, 3 at once" in said


def test_prompts_are_measured_from_passes_to_the_engine(path, monkeypatch, capsys):
    monkeypatch.setattr(q27app.kernels, "open_backend", lambda *_: CudaBackend(TimedDevice(CARDS["wide"])))
    assert prompts.main(["passes", "engine"], path, streams.SMALL, "cuda", "fp16") == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    for words in ("passes, 700 alike", "passes, 700 varied", "engine, drafts off, 700", "engine, drafts auto, 700"):
        assert words in said, said


@pytest.mark.long
def test_prompts_are_measured_over_http(path, capsys):
    assert prompts.main(["http"], path, streams.SMALL, "numpy", "fp16") == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "http, 700 of ids" in said and "of text" in said, said


def test_a_part_without_time_and_a_model_that_is_not_there_are_told(path, capsys, tmp_path):
    assert streams.main(["solo"], tmp_path / "none.q27", streams.SMALL, "numpy") == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A command that says how much is free, and that this process holds the rest."""
    def say(free: int) -> None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f'#!/bin/sh\ncase "$*" in *compute-apps*) echo "{os.getpid()}, 88000";; *) echo {free};; esac\n')
        command.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return say


def test_who_holds_the_memory_is_told(card):
    card(7000)
    started_as = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()   # pytest itself, or a worker of it
    told = re.escape(f"7000 MiB of the card are free, 30000 are needed; process {os.getpid()}: 88000 MiB, {started_as[:60]}")
    with pytest.raises(AssertionError, match=told):
        whole.wait_for_memory(30000, 0.1)
    card(31000)
    assert whole.wait_for_memory(30000, 0.1) == "31000 MiB"
