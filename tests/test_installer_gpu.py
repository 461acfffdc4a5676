"""The GPU part of the installer, with drivers, compilers and package managers that are scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

INSTALLERS = Path(__file__).resolve().parents[1] / "installers"
TOOLS = ("sed", "head", "tail", "cut", "dirname", "readlink", "cat", "mkdir", "chmod", "grep", "true", "touch")


@pytest.fixture
def root(tmp_path):
    """A machine in a folder: root(nvcc="13.0", headers=True, ...) -> run(script) with nothing else on PATH."""
    bin_folder, program, work = tmp_path / "bin", tmp_path / "program", tmp_path / "work"
    for folder in (bin_folder, program / "bin", work):
        folder.mkdir(parents=True)
    for tool in TOOLS:
        (bin_folder / tool).symlink_to(f"/usr/bin/{tool}")

    def script(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def make(nvcc="", headers=True, smi="13.0", compiler=True, pip="exit 0", imports="exit 0", kernels="echo compiled"):
        script(bin_folder / "nvidia-smi", f'echo "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA Version: {smi}  |"' if smi else "exit 9")
        toolkit = tmp_path / "cuda"
        if nvcc:
            release = f'echo "Cuda compilation tools, release {nvcc}, V{nvcc}.1"'
            script(toolkit / "bin/nvcc", f'case $1 in --dryrun) echo "#\\$ TOP={toolkit}" >&2;; *) {release};; esac')
            script(bin_folder / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
        if headers:
            (toolkit / "include").mkdir(parents=True, exist_ok=True)
            (toolkit / "include/cuda.h").write_text("")
        if compiler:
            script(bin_folder / "g++", "exit 0")
            script(bin_folder / "gcc", "exit 0")
        site = tmp_path / "site"
        script(site / "nvidia/cu13/bin/nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.1"')
        script(program / "bin/python", f'echo "HOME=$HOME python $*" >> {tmp_path}/calls\ncase "$*" in *pycuda.driver*) {imports};; '
               f'*read_driver*) exit 1;; *purelib*) echo {site};; *"no-binary pycuda"*) {pip};; esac')
        script(program / "bin/q27app", kernels)
        return run

    def run(text: str) -> subprocess.CompletedProcess[str]:
        head = (f'set -euo pipefail\n. {INSTALLERS}/common.sh\n. {INSTALLERS}/gpu.sh\nprogram={program} work={work} wheel=q27app.whl cuda_folders=/none\n'
                f'ask() {{ "$program/bin/python" -P -c "$1"; }}\n')
        return subprocess.run(["/bin/bash", "-c", head + text], capture_output=True, text=True, timeout=300,
                              env={"PATH": str(bin_folder), "HOME": str(tmp_path / "user")})

    make.calls = lambda: (tmp_path / "calls").read_text()
    make.folder = tmp_path
    return make


PART = 'install_gpu && echo "works" || echo "does not work"\n'


def test_a_toolkit_that_is_there_is_used_with_settings_of_its_own(root):
    done = root(nvcc="13.0")(PART)
    assert done.stdout.endswith("compiled\nworks\n"), done.stdout + done.stderr
    settings = (root.folder / "work/pycuda/.aksetup-defaults.py").read_text()
    assert f'CUDA_ROOT = "{root.folder}/cuda"' in settings and "CUDA_ENABLE_CURAND = False" in settings and "-Wl,--no-as-needed" in settings
    build = next(line for line in root.calls().splitlines() if "--no-binary pycuda" in line)
    assert f"HOME={root.folder}/work/pycuda" in build and "--no-cache-dir" in build
    assert not (root.folder / "user").exists() and "q27app.whl[cuda13]" in root.calls()


def test_an_older_toolkit_gets_the_older_bindings(root):
    assert "works" in root(nvcc="12.4")(PART).stdout and "q27app.whl[cuda12]" in root.calls()


@pytest.mark.parametrize("machine, needle", [
    ({"nvcc": "13.1", "smi": "12.8"}, "is CUDA 13.1, the driver runs 12.8"), ({"nvcc": "13.0", "headers": False}, "has no cuda.h in")])
def test_a_toolkit_that_does_not_go_with_the_driver_is_passed_over(root, machine, needle):
    done = root(**machine)("find_toolkit $(cuda_of_driver) || echo none\n")
    assert needle in done.stdout and done.stdout.endswith("none\n")


def test_without_a_toolkit_compiler_and_headers_are_fetched_for_the_driver(root):
    done = root(smi="13.2")(PART)
    assert "works" in done.stdout, done.stdout + done.stderr
    fetched = next(line for line in root.calls().splitlines() if "nvidia-cuda-nvcc" in line)
    assert "nvidia-cuda-nvcc>=13,<13.3" in fetched and "nvidia-nvvm>=13,<13.3" in fetched and "nvidia-cuda-runtime>=13" in fetched
    assert "site/nvidia/cu13/bin/nvcc" in (root.folder / "program/bin/nvcc").read_text() and os.access(root.folder / "program/bin/nvcc", os.X_OK)


@pytest.mark.parametrize("machine, needle", [
    ({"smi": ""}, "driver does not answer"), ({"smi": "12.8"}, "install the CUDA 12.8 toolkit, or a driver for CUDA 13"),
    ({"nvcc": "13.0", "compiler": False}, "sudo apt-get install g++"),
    ({"nvcc": "13.0", "pip": "echo 'src/x.hpp:1: fatal error: cuda.h: No such file or directory'; exit 1"}, "toolkit has no headers"),
    ({"nvcc": "13.0", "pip": "echo 'fatal error: Python.h: No such file or directory'; exit 1"}, "python3-dev"),
    ({"nvcc": "13.0", "pip": "echo '/usr/bin/ld: cannot find -lcuda'; exit 1"}, "linker misses a library"),
    ({"nvcc": "13.0", "pip": "echo 'ERROR: No matching distribution found'; exit 1"}, "look at the network"),
    ({"nvcc": "13.0", "imports": "echo 'ImportError: libcuda.so.1: cannot open shared object file' >&2; exit 1"}, "belongs to the driver"),
    ({"nvcc": "13.0", "kernels": "exit 4"}, "kernels do not compile")])
def test_failures_are_explained_and_the_rest_goes_on(root, machine, needle):
    done = root(**machine)(PART)
    assert done.returncode == 0 and done.stdout.endswith("does not work\n") and needle in done.stdout, done.stdout + done.stderr
