"""`q27app kernels`: build, list, clear, with a compiler that is a shell script."""

from __future__ import annotations

import json

import pytest

from q27app.cli import run
from q27app.gpu import GpuInfo
from q27app.kernels import compiler as compiler_module
from q27app.kernels.card import card_of
from q27app.paths import cache_dir

SCRIPT = """#!/bin/sh
[ "$1" = --version ] && { echo "Build made"; exit 0; }
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    path = tmp_path / "nvcc"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    monkeypatch.setenv("Q27APP_KERNELS__NVCC", str(path))
    monkeypatch.setattr("q27app.gpu.read_gpus", lambda: ())
    return path


def printed(capfd, *arguments: str) -> dict:
    assert run(["kernels", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_build_for_another_card_fills_the_cache_once(nvcc, capfd):
    first = printed(capfd, "build", "--arch", "86", "--model", "demo")
    again = printed(capfd, "build", "--arch", "86", "--model", "demo")
    assert first["target"] == "sm_86" and first["compiled"] > 8 and first["kept"] == 0
    assert again["compiled"] == 0 and again["kept"] == first["compiled"]
    entries = printed(capfd, "list")["entries"]
    assert len(entries) == first["compiled"] and {row["target"] for row in entries} == {"sm_86"}


def test_a_card_with_more_formats_gets_more_programs(nvcc, capfd):
    ampere = printed(capfd, "build", "--arch", "86", "--model", "demo")["compiled"]
    assert printed(capfd, "build", "--arch", "89", "--model", "demo")["compiled"] > ampere
    one = printed(capfd, "build", "--arch", "120", "--model", "demo", "--kv", "fp16")["compiled"]
    assert one <= ampere


def test_this_machines_card_decides_without_arch(nvcc, capfd, monkeypatch):
    gpu = GpuInfo(0, "GPU-1", "card", (8, 9), 1, 1, 1)
    monkeypatch.setattr("q27app.gpu.read_gpus", lambda: (gpu,))
    assert printed(capfd, "build", "--model", "demo")["target"] == "sm_89"


def test_clear_removes_programs_and_nothing_else(nvcc, capfd):
    count = printed(capfd, "build", "--arch", "86", "--model", "demo")["compiled"]
    other = cache_dir() / "kernels" / "note.txt"
    other.write_text("mine")
    assert printed(capfd, "clear")["removed"] == count
    assert printed(capfd, "list")["entries"] == [] and other.exists()


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["build"], 4, "--arch 86"),
    (["build", "--arch", "70"], 2, "expected one of 80"),
    (["build", "--arch", "86", "--kv", "fp8", "--model", "demo"], 2, "expected one of fp16"),
])
def test_what_cannot_be_built_says_what_can(nvcc, capfd, arguments, code, words):
    assert run(["kernels", *arguments]) == code
    assert words in capfd.readouterr().err


def test_without_a_compiler_the_message_says_what_to_do(capfd, monkeypatch):
    monkeypatch.setattr(compiler_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler_module, "_TOOLKITS", ())
    assert run(["kernels", "build", "--arch", "86", "--model", "demo"]) == 4
    assert "Install the CUDA toolkit" in capfd.readouterr().err


def test_a_broken_compiler_is_quoted(nvcc, capfd):
    nvcc.write_text("#!/bin/sh\n[ $1 = --version ] && echo v && exit 0\necho 'unknown gpu' >&2; exit 1\n")
    assert run(["kernels", "build", "--arch", "86", "--model", "demo"]) == 4
    assert "unknown gpu" in capfd.readouterr().err


def test_a_build_on_a_pipe_prints_a_line_a_program(nvcc, capfd):
    assert run(["kernels", "build", "--arch", "86", "--model", "demo"]) == 0
    captured = capfd.readouterr()
    assert "compiled 1 of" in captured.err and "sm_86:" in captured.out


def test_a_kind_of_card_has_the_limits_that_the_kernels_are_built_for():
    assert card_of("90").is_wide and not card_of("86").is_wide and card_of("120").max_threads == 1536
