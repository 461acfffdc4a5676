"""Which kernels take the few rows of a pass through attention, by company, depth, format and card; passes of one shape launch alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from q27app.engine.loading import EngineConfig, open_model
from q27app.kernels.cuda_backend import CudaBackend
from q27app.model.replays import shape_of
from q27app.weights.synthetic import synthesize
from tests.kernels import cuda_checks
from tests.kernels.attend_checks import AttendBench
from tests.kernels.counting_device import CARDS
from tests.kernels.made import begin_alone, make_batch
from tests.kernels.test_dependent_launches import NotingDevice

CONFIG = replace(cuda_checks.NANO, num_heads=24, num_kv_heads=4)


def launched(device, bench, sequences) -> tuple[list[str], tuple]:
    """Kernels of a layer for (rows, position) of each sequence, and the pass's shape."""
    backend, rows = bench.backend, sum(count for count, _ in sequences)
    batch = make_batch("verify", [[0] * count for count, _ in sequences], [position for _, position in sequences], [0] * len(sequences), [bench.table] * len(sequences))
    begin_alone(backend, batch, bench.state)
    device.launches.clear()
    backend.attend(bench.y.rows(rows), bench.layer[0], bench.out.rows(rows))
    names = [name for name, _ in device.launches if name.startswith("attend")]
    return names, shape_of(batch, backend.row_groups, backend.depth_group(batch))


@pytest.mark.parametrize("card, name, sequences, kernels", [
    ("wide", "fp8", [(1, 9)], ["attend_decode_own"]), ("wide", "fp8", [(1, 200_000)], ["attend_decode_own"]), ("wide", "fp8", [(1, 9)] * 5, ["attend_rows", "attend_decode_1"]),
    ("wide", "fp8", [(8, 4_160)], ["attend_decode_make"]), ("wide", "fp8", [(8, 5_000)], ["attend_rows", "attend_decode_8"]),
    ("wide", "fp8", [(4, 20_000)], ["attend_decode_make"]), ("wide", "fp8", [(4, 40_000)], ["attend_rows", "attend_decode_4"]),
    ("wide", "fp8", [(16, 2_000)], ["attend_decode_make"]), ("wide", "fp8", [(16, 2_200)], ["attend_rows", "attend_decode_8"]),
    ("wide", "fp8", [(4, 300)] * 4, ["attend_decode_make"]), ("wide", "fp8", [(2, 300)] * 8, ["attend_rows", "attend_decode_4"]), ("wide", "fp8", [(4, 300)] * 5, ["attend_rows", "attend_decode_4", "attend_decode_4"]),
    ("wide", "turbo5k", [(8, 9)], ["attend_rows", "attend_decode_8"]), ("wide", "fp16", [(2, 9)], ["attend_rows", "attend_decode_4"]),
    ("narrow", "turbo5k", [(8, 9)], ["attend_rows", "attend_decode_8"])])
def test_the_kernels_of_a_pass(card, name, sequences, kernels):
    device = NotingDevice(CARDS[card])
    names, _ = launched(device, AttendBench(device, CONFIG, name, 4_096, 1, 64), sequences)
    assert [kernel for kernel in names if not kernel.startswith("attend_merge")] == kernels


def test_passes_of_one_shape_launch_alike():
    device, by_shape = NotingDevice(CARDS["wide"]), {}
    bench = AttendBench(device, CONFIG, "fp8", 4_096, 1, 64)
    for position in (0, 120, 1_000, 2_048, 2_100, 4_100, 4_200, 9_000, 33_000, 70_000):
        for lengths in ((1,), (2,), (3,), (4,), (5,), (8,), (9,), (16,), (2, 2), (1, 3), (4, 1, 4), (4, 4, 4, 4), (1, 8), (8, 8), (2,) * 8):
            for sequences in ([(rows, position) for rows in lengths], [(rows, position // (1 + at)) for at, rows in enumerate(lengths)]):
                names, shape = launched(device, bench, sequences)
                assert by_shape.setdefault(shape, names) == names, (sequences, shape)
    assert sum("attend_rows" in names for names in by_shape.values()) > 8 and sum("attend_decode_make" in names for names in by_shape.values()) > 8


def test_a_model_records_shallow_and_deep_passes_apart(monkeypatch, tmp_path):
    path = tmp_path / "made.q27"
    synthesize(path, "nano", "chain", "q4s")
    device = NotingDevice(replace(CARDS["wide"], num_sms=4))
    monkeypatch.setattr("q27app.kernels.open_backend", lambda *_: CudaBackend(device))
    loaded = open_model(EngineConfig(path, "cuda", context=2048, slots=1, draft="off", kv_format="fp8"), lambda share: None)
    model, found = loaded.model, []
    before = len(model.replays)
    for position in (100, 1_500, 101, 1_501, 102, 1_502):
        device.launches.clear()
        model.forward(make_batch("verify", [[5] * 8], [position], [0], [list(range(32))]), loaded.state)
        found.append({name for name, _ in device.launches if name.startswith("attend_decode")})
    assert found == [{"attend_decode_make"}, {"attend_decode_8"}] * 3 and len(model.replays) == before + 2
