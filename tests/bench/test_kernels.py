"""bench kernels on NumPy with a constructed model, and the card's ceilings on the emulated device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.cli import run
from q27app.kernels import peaks
from q27app.weights.synthetic import synthesize
from tests.kernels.emulation.emulated_device import EmulatedDevice, needs_compiler


def test_every_stage_of_every_pass_is_timed_once(capfd, tmp_path):
    model, out = synthesize(tmp_path / "nano.q27", "nano", "dense", "q4s"), tmp_path / "journal"
    command = ["bench", "kernels", "--model", str(model), "--backend", "numpy", "--rows", "1,2", "--prefill", "70", "--out", str(out), "--json"]
    assert run(command) == 0
    report = json.loads(capfd.readouterr().out)
    stages = [row["stage"] for row in report["rows"] if row["pass"] == "2 rows at 10"]
    assert stages == ["whole pass", "delta project", "delta", "delta out", "attention project", "attend", "attention out", "gate up",
                      "down", "head"]
    assert len(report["rows"]) == 30 and all(row["us"] > 0 for row in report["rows"])
    assert report["stamp"]["tier"] == "q4s" and report["peaks"]["gb_per_s"] > 0
    lines = out.read_bytes().count(b"\n")
    assert run(command) == 0 and out.read_bytes().count(b"\n") == lines


def test_a_matrix_stage_counts_its_bytes_and_operations(capfd, tmp_path):
    model = synthesize(tmp_path / "nano.q27", "nano", "dense", "q4s")
    assert run(["bench", "kernels", "--model", str(model), "--backend", "numpy", "--rows", "2", "--prefill", "-", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    from q27app.model.config import ModelConfig
    from q27app.weights.container import open_container

    with open_container(model) as container:
        config = ModelConfig.from_metadata(container.metadata, {name: tuple(t.shape) for name, t in container.tensors.items()})
    down = next(row for row in report["rows"] if row["stage"] == "down")
    assert down["flops"] == 2 * 2 * config.hidden_size * config.intermediate_size
    assert down["bytes"] == 4 * (config.hidden_size * config.intermediate_size + 2 * (config.intermediate_size + 2 * config.hidden_size))


@needs_compiler
def test_the_reading_kernel_reads_every_word():
    device, blocks = EmulatedDevice(), 2
    threads = blocks * peaks.THREADS
    words = np.random.default_rng(1).integers(0, 2**32, (2 * peaks.READS * threads, 4), np.uint32)
    data, out = device.allocate(words.nbytes), device.allocate(4 * threads)
    device.upload(data, words)
    peaks.read_once(device, data, out, len(words), blocks)
    found = device.download(out, 4 * threads).view(np.uint32)
    assert np.array_equal(found, peaks.expected_read(words, threads))
    device.check_guards()


@needs_compiler
def test_the_multiplying_kernel_does_the_operations_it_counts():
    device = EmulatedDevice()
    out = device.allocate(4 * peaks.THREADS)
    sums = []
    for rounds in (1, 3):
        assert peaks.multiply_rounds(device, out, rounds, 1) == 8 * 8 * 2 * 16 * 8 * 16 * rounds
        sums.append(device.download(out, 4 * peaks.THREADS).view(np.float32))
    assert sums[0].min() > 0 and np.allclose(sums[1], 3 * sums[0], rtol=1e-4)
    device.check_guards()


def test_what_a_launch_and_a_wait_take_is_shared_by_several_readings(monkeypatch):
    clock, last = [0.0], []

    class Card:
        card, allocate, prepare, fill, release = SimpleNamespace(num_sms=1), lambda *_: 1, lambda *_: None, lambda *_: None, lambda *_: None

        def synchronize(self):
            clock[0] += 20e-6

    def read(device, data, out, num_words, blocks):
        clock[0] += 250e-6
        last[:] = [num_words * 16]

    monkeypatch.setattr(peaks, "read_once", read)
    monkeypatch.setattr(peaks, "multiply_rounds", lambda *_: 1)
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: clock[0])
    assert peaks.measure_peaks(Card()).gb_per_s == pytest.approx(last[0] / 252.5e-6 / 1e9)
