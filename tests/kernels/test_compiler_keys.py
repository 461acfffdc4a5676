"""The kernel cache: what a key depends on, and that every source compiles for every kind of card within its limits."""

from __future__ import annotations

import re
import subprocess

import pytest

from q27app.errors import GpuError
from q27app.kernels import compiler as compiler_module
from q27app.kernels.card import AMPERE_SHARED, AMPERE_THREADS, Card
from q27app.kernels.compiler import Compiler, Job, describe, expand
from q27app.kernels.cuda_attention import prefill_block
from q27app.kernels.cuda_backend import fixed_defines, geometry_defines
from q27app.kernels.cuda_mixers import chunk_launch, delta_forms, flow_launch
from q27app.kernels.cuda_tiles import tile_shapes
from q27app.kernels.kv_formats import kv_format
from tests.model.geometry import config_27b

CARDS = {
    80: Card("80", (8, 0), 108, 163 * 1024), 86: Card("86", (8, 6), 82, AMPERE_SHARED, AMPERE_THREADS),
    89: Card("89", (8, 9), 128, AMPERE_SHARED, AMPERE_THREADS), 90: Card("90", (9, 0), 132, 227 * 1024),
    120: Card("120", (12, 0), 170, AMPERE_SHARED, AMPERE_THREADS),
}
MAX_SPILL_BYTES = 200
"""A few registers kept over a loop are allowed, never an array in memory."""

HOT_SPILL_BYTES = 16
"""In the kernels of every step: less than a register a step."""

ROWS_SPILL_BYTES = 160
"""In the row family for more than 2 rows: mostly what a block and a warp take, held from before the loop over units until after
it, and only with more than 8 rows; most on 8.0."""

ROWS = ("linear_rows_halves", "linear_rows_wide", "linear_rows_ready")
HOT = ("linear_tiles", "delta_", "attend_decode_", "attend_merge")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler that notes its calls: the output is the command."""
    calls = []

    def run(command, **_):
        if command[1] == "--version":
            return subprocess.CompletedProcess(command, 0, "nvcc\nBuild made", "")
        calls.append(command)
        with open(command[command.index("-o") + 1], "wb") as file:
            file.write(" ".join(command).encode())
        return subprocess.CompletedProcess(command, 0, "", "")

    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(compiler_module.subprocess, "run", run)
    compiler = Compiler(tmp_path / "cache", "sm_90", str(nvcc))
    compiler.calls = calls
    return compiler


def test_a_second_request_reads_the_cache(fake):
    job = Job.of("accept", {})
    assert fake.get(job) == fake.get(job)
    assert len(fake.calls) == 1


def test_a_key_changes_with_defines_target_and_compiler(fake, tmp_path):
    base = fake.key(Job.of("rows", {"A": 1}))
    assert fake.key(Job.of("rows", {"A": 2})) != base
    assert fake.key(Job.of("repack", {"A": 1})) != base
    other = Compiler(tmp_path, "sm_86", fake.nvcc)
    assert other.key(Job.of("rows", {"A": 1})) != base
    other = Compiler(tmp_path, "sm_90", fake.nvcc)
    other._version = "Build newer"
    assert other.key(Job.of("rows", {"A": 1})) != base


def test_headers_are_part_of_the_source():
    text = expand("linear_rows")
    assert '#include "' not in text.replace('#include "emulated.h"', "")
    assert text.count("struct Segment {") == 1


def test_build_compiles_what_is_missing_and_counts(fake):
    seen = []
    jobs = [Job.of("rows", {}), Job.of("accept", {}), Job.of("rows", {})]
    fake.build(jobs, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert {row["source"]: row["target"] for row in describe(fake.cache)} == {"rows": "sm_90", "accept": "sm_90"}


def test_a_forgotten_result_is_compiled_again(fake):
    job = Job.of("accept", {})
    fake.get(job)
    fake.path(job).write_bytes(b"of another card")
    fake.forget(job)
    assert fake.get(job) != b"of another card" and len(fake.calls) == 2


def test_a_service_without_a_path_finds_the_compiler_again(fake, monkeypatch):
    fake.resolve()
    monkeypatch.setattr(compiler_module.shutil, "which", lambda name: None)
    assert Compiler(fake.cache, "sm_90").resolve() == fake.nvcc


def test_no_compiler_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler_module, "_TOOLKITS", ())
    with pytest.raises(GpuError, match="No CUDA compiler"):
        Compiler(tmp_path, "sm_90").resolve()


def resources(log: str) -> dict[str, dict[str, int]]:
    """Registers, spilled and static shared bytes of each kernel, from ptxas -v."""
    found: dict[str, dict[str, int]] = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = {key: int(match[1]) if (match := re.search(pattern, part)) else 0 for key, pattern in (
            ("registers", r"Used (\d+) registers"), ("spill", r"(\d+) bytes spill stores"), ("shared", r"(\d+) bytes smem"))}
        found[part.split("'")[0]] = numbers
    return found


def block_size(name: str, defines: dict[str, int], card: Card) -> int:
    if name.startswith(("linear_rows_", "stage_")):
        return 512
    if name in ("sample_draw", "sample_logprobs"):
        return 1024
    if name.startswith("attend_decode_"):
        return 128 if defines["WARPGROUPS"] else 32 * max(4, int(name.rpartition("_")[2]))
    if name in (forms := delta_forms(defines.get("DELTA_DIM", 128))):
        return forms[name].threads(defines["DELTA_DIM"])
    if name == "delta_flow":
        return flow_launch(defines["DELTA_DIM"], 1, 1, 1)[1]
    if name == "delta_chunk":
        return chunk_launch(defines["DELTA_DIM"])[1]
    if name.startswith("linear_tiles_") and name != "linear_tiles_merge":
        return next(shape.threads for shape in tile_shapes(card) if f"_{shape.name}_" in name)
    return prefill_block(card, kv_format("fp16"), defines["HEAD_DIM"])[0] if name == "attend_prefill" else 256


@pytest.mark.long
@pytest.mark.parametrize("number", CARDS)
def test_every_source_compiles_within_the_cards_limits(number, tmp_path):
    card = CARDS[number]
    compiler = Compiler(tmp_path, card.target)
    try:
        compiler.resolve()
    except GpuError:
        pytest.skip("no nvcc on this machine")
    sources = fixed_defines(card) | geometry_defines(config_27b(), card, "fp8" if card.has_fp8 else "fp16")
    for source, defines in sources.items():
        job = Job.of(source, defines)
        command = [*compiler.command(job, str(tmp_path / "out")), "-Xptxas", "-v"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        kernels = resources(done.stderr)
        assert kernels, done.stderr[-500:]
        for name, used in kernels.items():
            most = ROWS_SPILL_BYTES if name.startswith(ROWS) else HOT_SPILL_BYTES if name.startswith(HOT) else MAX_SPILL_BYTES
            assert used["spill"] <= most, (name, used)
            assert used["shared"] <= 48 * 1024, (name, used)
            registers = -(-used["registers"] // 8) * 8 * block_size(name, defines, card)
            assert registers <= 65536 and block_size(name, defines, card) <= card.max_threads, (name, used)
