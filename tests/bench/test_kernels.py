"""bench kernels on NumPy with a constructed model, and the card's ceilings on the emulated device."""

from __future__ import annotations

import json

import numpy as np

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
