"""Nothing reads or writes a place in shared memory that another thread, copy or matrix instruction may still have: the kernels on the CPU, watched access
by access (tests/kernels/emulation/races.cpp). Rings kept by mbarriers above all, of which compute-sanitizer cannot tell; and rings broken on purpose."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels import card as card_module
from q27app.kernels import cuda_prompts, cuda_tiles
from q27app.kernels.compiler import SOURCES
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.dtypes import F16, Q4_G64, Q8_G128
from tests.kernels import attend_checks, cuda_checks, follow_checks, lacking_checks
from tests.kernels.delta_checks import DeltaBench
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, Races, needs_compiler
from tests.kernels.made import make_batch

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]
TILES, ATTEND, ROWS = frozenset({"linear_tiles"}), frozenset({"attend_prefill", "attend_decode"}), frozenset({"linear_rows"})
DELTA = frozenset({"delta_flow"})   # delta_step has arrays of fixed size alone, which are not watched


def multiply(device: EmulatedDevice, monkeypatch, shape: str, dtype, rows: int = 150) -> None:
    """Sums and products of a prompt's rows, in blocks of one shape: rings that go round and over the border of two pieces."""
    random, backend = np.random.default_rng(2), CudaBackend(device)
    weight, pair = (backend.load([cuda_checks.made_tensor(random, f"{name}{i}", rows_of, 640, dtype) for i in range(count)])
                    for name, rows_of, count in (("w", 600, 1), ("pair", 72, 2)))
    norm = backend.load([cuda_checks.stored("norm", np.ones(640, np.float32), cuda_checks.F32)])
    backend.empty((rows, 640), "float32", "x")
    chosen = next(each for each in cuda_tiles.tile_shapes(device.card) if each.name == shape)
    monkeypatch.setattr(cuda_tiles, "tile_plan", lambda card, segments, rows, splits=1: (cuda_tiles.TilePart(chosen, segments, 0, rows, splits),))
    monkeypatch.setattr(cuda_tiles, "tile_splits", lambda card, segments, units: 2)
    backend.begin(make_batch("prefill", [[0] * rows], [0], [0], [[0, 1, 2]]), cuda_checks.open_state(backend, 640))
    x = backend.upload(random.standard_normal((rows, 640)).astype(np.float32))
    backend.add_linear(weight, x, backend.upload(np.zeros((rows, 600), np.float32)))
    backend.gate_up(norm, pair, x, backend.upload(np.zeros((rows, 72), np.float32)))


def attend(device: EmulatedDevice, name: str, is_whole: bool = True) -> None:
    bench = attend_checks.AttendBench(device, cuda_checks.NANO, name, 6, 1, 200)
    attend_checks.fill(bench, 320)
    assert attend_checks.check_attend(bench, 200, (100,), "prefill") < 5e-4 or not is_whole
    if is_whole:
        assert attend_checks.check_attend(bench, 300, (12, 1, 8), "decode") < 5e-4


def attend_cuts(device: EmulatedDevice, monkeypatch, name: str, price: float) -> None:
    """Rows of a prompt behind several cuts of the keys. price: of cuts that are merged by another kernel."""
    monkeypatch.setattr(card_module, "PROMPT_CUT", 64)
    monkeypatch.setattr(cuda_prompts, "MERGED_PRICE", price)
    bench = attend_checks.AttendBench(device, cuda_checks.NANO, name, 6, 1, 2000)
    attend_checks.fill(bench, 256)
    for rows in (100, 9):   # some fill tiles, some share them
        assert attend_checks.check_attend(bench, 200, (rows,), "prefill") < 5e-4


def multiply_rows(device: EmulatedDevice, specs: list, counts: tuple[int, ...] = (2, 3, 16)) -> None:
    """Few rows by matrices whose groups lie in two warps or blocks: a warp's ring of activations begins anew in each of its segments."""
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, specs, 640, 1)
    backend.empty((96, 640), "float32", "x")
    assert cuda_checks.check_linear(backend, cuda_checks.open_state(backend, 640), stage, "decode", counts) < cuda_checks.TENSOR_CORE_TOLERANCE


def multiply_left_rows(device: EmulatedDevice, count: int = 3) -> None:
    """Rows that additions left for a norm, one of them converted anew, so that all is multiplied twice; more rounds than one."""
    backend = CudaBackend(device)
    chain = follow_checks.Chain(backend, 640, follow_checks.KINDS["mix"], projected=1200)
    state = cuda_checks.open_state(backend, 640)
    x, attended = follow_checks.odd_rows(chain, state, ("larger", "usual", *["usual"] * (count - 2))[:count])
    chain.run(state, x, attended)
    assert chain.project.shares.rounds > 1


def flow(device: EmulatedDevice, dim: int = 64) -> None:
    """The delta rule of many sequences of one row: more shares than blocks, so that places of the ring go round. Heads of 128 are left ready."""
    bench = DeltaBench(device, replace(cuda_checks.NANO, delta_head_dim=dim, delta_key_heads=2, delta_value_heads=4), leaves=True)
    assert lacking_checks.check_lacking(bench, 9, 9, 6) == {0, 1, 2, 3}
    assert bench.was_left == (dim == 128)


def assert_clean(found: Races) -> None:
    assert found.thread_reads and found.thread_writes, "nothing was watched"
    assert found.races == 0, found.first


@pytest.mark.parametrize("dtype", [Q4_G64, Q8_G128, F16], ids=["q4", "q8", "f16"])
@pytest.mark.parametrize("shape", ["wide", "medium", "slim", "few"])
def test_rings_of_prefill_products(monkeypatch, shape, dtype):
    device = EmulatedDevice(CARD, watched=TILES)
    multiply(device, monkeypatch, shape, dtype)
    found = device.races()
    assert found.matrix_reads and found.bulk_copies
    assert_clean(found)


@pytest.mark.parametrize("name, sms", [("fp16", 4), ("fp8", 4), ("fp8", 16), ("turbo5k", 4), ("turbo3", 4)])
def test_rings_and_copies_of_attention(name, sms):
    """fp8: rows made by attend_rows, and by blocks of items of 4 or of 1."""
    device = EmulatedDevice(replace(CARD, num_sms=sms), watched=ATTEND)
    attend(device, name)
    found = device.races()
    assert found.matrix_reads and (found.bulk_copies if name.startswith("turbo") else found.copies)   # turned tiles come whole
    assert_clean(found)


@pytest.mark.parametrize("price", [0.0, 100.0], ids=["merged", "by one block"])
@pytest.mark.parametrize("name, card", [("fp16", CARD), ("turbo5k", CARD), ("turbo5k", SMALL_CARD)], ids=["fp16, warpgroups", "turbo5k, warpgroups", "turbo5k, warps"])
def test_cuts_of_a_prompts_keys(monkeypatch, name, card, price):
    device = EmulatedDevice(card, watched=ATTEND)
    attend_cuts(device, monkeypatch, name, price)
    assert_clean(device.races())


@pytest.mark.parametrize("specs", [[(130, F16), (200, Q4_G64), (200, Q4_G64)], [(72, Q4_G64)] * 2], ids=["three", "pair"])
@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["card", "small card"])
def test_rings_of_rows(specs, card):
    device = EmulatedDevice(replace(card, num_sms=3), watched=ROWS)
    multiply_rows(device, specs)
    assert device.races().copies
    assert_clean(device.races())


def test_rings_of_rows_that_were_left_ready():
    device = EmulatedDevice(replace(CARD, num_sms=3), watched=ROWS)
    backend = CudaBackend(device)
    both = cuda_checks.Both(backend, 256, 640, Q4_G64, Q4_G64, down=200)
    backend.empty((96, 256), "float32", "x")
    assert cuda_checks.check_both(both, cuda_checks.open_state(backend, 256), (2, 3, 16)) < cuda_checks.TWO_STAGES_TOLERANCE
    assert both.is_ready and device.races().copies
    assert_clean(device.races())


@pytest.mark.parametrize("count, card", [(1, CARD), (2, CARD), (2, SMALL_CARD), (3, CARD), (16, CARD)], ids=["1", "2", "2, small card", "3", "16"])
def test_rows_that_were_left_for_a_norm(count, card):
    device = EmulatedDevice(replace(card, num_sms=1), watched=ROWS)
    multiply_left_rows(device, count)
    assert device.races().copies
    assert_clean(device.races())


@pytest.mark.parametrize("dim", [64, 128])
def test_shared_memory_of_the_delta_rule_of_many_sequences(dim):
    device = EmulatedDevice(replace(CARD, num_sms=2), watched=DELTA)
    flow(device, dim)
    assert device.races().bulk_copies
    assert_clean(device.races())


def test_kernels_by_warps(monkeypatch):
    device = EmulatedDevice(SMALL_CARD, watched=TILES | ATTEND)
    multiply(device, monkeypatch, "medium", Q4_G64)
    attend(device, "turbo5k")
    assert device.races().copies
    assert_clean(device.races())


BROKEN_TILES = {
    "a place is free before its products": ("warpgroup_wait<1>();   // the part before is done", ""),
    "a place is free while its own products run": ("    part(acc, a, 0);\n    release();\n    behind = ring.free();\n    ring.next();\n  }\n  __device__ __forceinline__ void halves",
                                                    "    behind = ring.free();\n    part(acc, a, 0);\n    release();\n    behind = nullptr;\n    ring.next();\n  }\n"
                                                    "  __device__ __forceinline__ void halves"),
    "copies do not wait for a free place": ("arrival_wait(ring.free(), ring.phase ^ 1);", ""),
    "products do not wait for copies": ("arrival_wait(ring.full(), ring.phase);\n    part(acc, a, 0);", "part(acc, a, 0);"),
    "one warp fewer frees a place": ("arrival_init(ring.free(), S::TILES);", "arrival_init(ring.free(), S::TILES - 1);"),
    "barriers are used before they are there": ("    arrival_publish();\n  }\n  __syncthreads();\n  ring.stage = 0;", "  }\n  ring.stage = 0;"),
}
BROKEN_ROWS = {
    "a place is free before all lanes have read it": ("linear_rows.cu", ("      __syncwarp();\n      ring.copy(", "      ring.copy(")),
    "lanes read what others have not waited for": ("row_ring.cuh", ("    copy_async_wait<UNITS - 1>();\n    __syncwarp();", "    copy_async_wait<UNITS - 1>();")),
    "a unit too few is waited for": ("row_ring.cuh", ("copy_async_wait<UNITS - 1>", "copy_async_wait<UNITS>")),
}
BROKEN_LEFT_ROWS = {
    "what sums are multiplied by is read before it is there": ("m.inverse, m.lost);\n      }\n    __syncthreads();", "m.inverse, m.lost);\n      }"),
    "the second try begins before all have seen that there is one": ("        __threadfence();\n        __syncthreads();\n        --round", "        __threadfence();\n        --round"),
}
BROKEN_STEPS = {
    "lanes read what others have not waited for": ("linear_rows.cu", ("      copy_async_wait<0>();\n      __syncwarp();", "      copy_async_wait<0>();")),
    "a step is not waited for": ("linear_rows.cu", ("      copy_async_wait<0>();\n      __syncwarp();", "      __syncwarp();")),
    "the step after goes where this one is": ("row_ring.cuh", ("slots + (step & 1) * TURN +", "slots +")),
}
BROKEN_ATTEND = {
    "keys are free before their scores": ("        warpgroup_commit();\n        warpgroup_wait<0>();\n        warpgroup_settle(score);",
                                          "        warpgroup_commit();\n        warpgroup_settle(score);"),
    "values are not waited for": ("        arrival_wait(shared.barrier(VALUES_FULL, stage), phase);\n        warpgroup_begin();", "        warpgroup_begin();"),
    "feeders do not wait": ("arrival_wait(shared.barrier(is_values ? VALUES_FREE : KEYS_FREE, stage), phase ^ 1);", ""),
    "tiles are not published": ("    publish_shared();\n    arrive(shared", "    arrive(shared"),
    "queries are not waited for": ("  publish_shared();\n  group_barrier(1 + group, 128);", "  publish_shared();"),
    "halves are there before they are copied": ("    copy_async_wait<0>();\n", ""),
}


BROKEN_FLOW = {
    "a place is free before all have read it": ("    __syncthreads();   // nobody needs", "    // nobody needs"),
    "a place is free before the rows that its state lacks are applied": (
        "    catch_up(s, in.keys[place][0], in.lacking[place], rows_of(lacks), column, j);\n    __syncthreads();   // nobody needs this place any more, nor what lies on the other side\n",
        "    __syncthreads();   // nobody\n    catch_up(s, in.keys[place][0], in.lacking[place], rows_of(lacks), column, j);\n"),
    "states are not waited for": ("    arrival_wait(in.there + place, phase);\n", ""),
    "one side for all shares": ("    side ^= 1;\n", ""),
    "barriers are used before they are there": ("  __syncthreads();   // the barriers", "  // the barriers"),
}


def finds(tmp_path, name: str, change: tuple[str, str], watched: frozenset[str], run, card=CARD) -> str:
    """The first race of the kernels with one place of their sources changed, in a process of its own: it ends there, or stands still."""
    sources, message = tmp_path / "cu", tmp_path / "found.txt"
    shutil.copytree(SOURCES, sources)
    text = (sources / name).read_text()
    assert text.count(change[0]) == 1, "the kernel has changed: say anew how to break it"
    (sources / name).write_text(text.replace(*change))
    tiles = (sources / "linear_tiles.cu").read_text().splitlines()
    (sources / "linear_tiles.cu").write_text("\n".join(line for line in tiles if not line.startswith("LINEAR_TILES(") or "_medium_q4" in line) + "\n")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(message, os.O_CREAT | os.O_WRONLY), 2)
        os.environ["Q27_RACES_END"] = "1"
        try:
            run(EmulatedDevice(card, None, watched, sources))
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 86, (code, message.read_text())
    return message.read_text()


@pytest.mark.parametrize("what", BROKEN_TILES)
def test_a_broken_ring_of_products_is_found(monkeypatch, tmp_path, what):
    found = finds(tmp_path, "tiles_warpgroup.cuh", BROKEN_TILES[what], TILES, lambda device: multiply(device, monkeypatch, "medium", Q4_G64))
    assert "unordered with" in found


@pytest.mark.parametrize("what", BROKEN_ATTEND)
def test_a_broken_ring_of_attention_is_found(tmp_path, what):
    found = finds(tmp_path, "attend_warpgroup.cuh", BROKEN_ATTEND[what], ATTEND - {"attend_decode"}, lambda device: attend(device, "fp16" if "halves" in what else "fp8", False))
    assert "unordered with" in found


@pytest.mark.parametrize("what", BROKEN_FLOW)
def test_a_broken_flow_of_states_is_found(tmp_path, what):
    found = finds(tmp_path, "delta_flow.cu", BROKEN_FLOW[what], DELTA, flow, replace(CARD, num_sms=2))
    assert "unordered with" in found


@pytest.mark.parametrize("what", BROKEN_ROWS)
def test_a_broken_ring_of_rows_is_found(tmp_path, what):
    found = finds(tmp_path, *BROKEN_ROWS[what], ROWS, lambda device: multiply_rows(device, [(200, Q4_G64)], (16,)), replace(CARD, num_sms=3))
    assert "unordered with" in found


@pytest.mark.parametrize("what", BROKEN_STEPS)
def test_broken_steps_of_a_row_are_found(tmp_path, what):
    found = finds(tmp_path, *BROKEN_STEPS[what], ROWS, lambda device: multiply_left_rows(device, 2), replace(CARD, num_sms=1))
    assert "unordered with" in found


@pytest.mark.parametrize("what", BROKEN_LEFT_ROWS)
def test_a_broken_second_try_is_found(tmp_path, what):
    found = finds(tmp_path, "linear_rows.cu", BROKEN_LEFT_ROWS[what], ROWS, multiply_left_rows, replace(CARD, num_sms=1))
    assert "unordered with" in found
