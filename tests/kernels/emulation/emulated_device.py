"""A `launch.Device` on the CPU: the CUDA sources compiled by g++ against `emulated.h`, memory from the host.

Exact in what a kernel computes and in which order (up to the tensor cores' own rounding); no asynchrony, no speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from q27app.kernels.card import Card
from q27app.kernels.compiler import SOURCES, Job, expand
from q27app.kernels.cuda_attention import MAKER_HEADS
from tests.kernels.immediate_device import ImmediateDevice

HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\((?:[^()]|\([^()]*\))*\))? (\w+)\(')
_MACRO = re.compile(r"^(?:LINEAR_ROWS|LINEAR_TILES)\((\w+),", re.MULTILINE)
CARD = Card("emulated", (9, 0), 4, 227 * 1024)
SMALL_CARD = Card("emulated, small", (8, 6), 4, 99 * 1024, 1536)


class Races(NamedTuple):
    """Accesses to shared memory by kind, and those that nothing orders; the first of them in words."""

    thread_reads: int = 0
    thread_writes: int = 0
    matrix_reads: int = 0
    copies: int = 0
    bulk_copies: int = 0
    races: int = 0
    first: str = ""


def has_compiler() -> bool:
    return shutil.which("g++") is not None and os.uname().machine == "x86_64"


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs g++ on x86-64")


def _not_compiled(defines: dict[str, int]) -> set[str]:
    """Kernels that stand under a condition."""
    by_warpgroups, is_fp8 = defines.get("WARPGROUPS"), defines.get("KV_FORMAT") == 1
    makes = by_warpgroups and is_fp8 and (defines["HEAD_DIM"], defines["ROTARY_DIM"], defines["NUM_HEADS"] // defines["NUM_KV_HEADS"] % 2) == MAKER_HEADS
    left_out = {"attend_decode_16": by_warpgroups, "attend_decode_own": not (by_warpgroups and is_fp8), "attend_decode_make": not makes}
    return {name for name, is_left in left_out.items() if is_left}


class EmulatedDevice(ImmediateDevice):
    """See `launch.Device`. Guards of NaN stand around every allocation and are checked when it is released."""

    GUARD = 256
    context_bytes = 0

    def __init__(self, card: Card = CARD, cache: Path | None = None, watched: frozenset[str] = frozenset(), sources: Path = SOURCES) -> None:
        """watched: sources whose accesses to shared memory are watched (`races`); sources: the folder of the kernels, or of changed ones for those."""
        self.card, self._watched, self._sources = card, watched, sources
        self._cache = cache or Path(tempfile.gettempdir()) / f"q27app-emulated-{os.getuid()}"
        self._memory: dict[int, np.ndarray] = {}
        self._modules: dict[Job, dict[str, object]] = {}
        self._libraries: list[ctypes.CDLL] = []

    def free_bytes(self) -> int:
        return 1 << 32

    def allocate(self, nbytes: int) -> int:
        raw = np.full(nbytes + 2 * self.GUARD + 256, 0xFF, np.uint8)
        address = (raw.ctypes.data + self.GUARD + 255) // 256 * 256
        self._memory[address] = raw
        return address

    def release(self, address: int) -> None:
        self._memory.pop(address)

    def check_guards(self) -> None:
        """Fail if a kernel wrote past an allocation."""
        for address, raw in self._memory.items():
            before = address - raw.ctypes.data
            assert (raw[before - self.GUARD:before] == 0xFF).all(), "a kernel wrote before an allocation"
            assert (raw[-64:] == 0xFF).all(), "a kernel wrote past an allocation"

    def upload(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def host_memory(self, nbytes: int) -> int:
        return self.allocate(nbytes)

    def download(self, address: int, nbytes: int, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(nbytes, np.uint8) if out is None else out
        assert out.nbytes == nbytes and out.flags.c_contiguous
        ctypes.memmove(out.ctypes.data, address, nbytes)
        return out

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def fill(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def close(self) -> None:
        self.check_guards()

    def module(self, job: Job) -> dict[str, object]:
        if job not in self._modules:
            library, names = self._build(job)
            self._libraries.append(library)
            self._modules[job] = {name: library[f"run_{name}"] for name in names}
        return self._modules[job]

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        assert shared <= self.card.shared_bytes and block <= 1024, (shared, block)
        dims = (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3])
        threads = (ctypes.c_uint * 3)(block, 1, 1)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.num_launches += 1
        function(dims, threads, ctypes.c_uint(shared), pointers)

    def show_late(self, address: int, old: np.ndarray) -> None:
        """Until a block of a kernel has waited for earlier ones, its asynchronous copies find `old` in place of the bytes at address."""
        for library in self._libraries:
            library.emulated_late(ctypes.c_void_p(address), ctypes.c_void_p(old.ctypes.data), ctypes.c_size_t(old.nbytes))

    def filled_columns(self) -> np.ndarray:
        """int64 [8]: lanes that so far came to a product of the tensor cores with something in that column of its right side."""
        counts = np.zeros(8, np.int64)
        for library in self._libraries:
            library.emulated_columns(ctypes.c_void_p(counts.ctypes.data))
        return counts

    def races(self) -> Races:
        """What was seen of shared memory by the watched kernels of this process so far, all devices together."""
        found = Races()
        for library in self._libraries:
            if hasattr(library, "race_result"):
                counts, result = (ctypes.c_longlong * 6)(), library.race_result
                result.restype = ctypes.c_char_p
                first = result(counts).decode()
                found = Races(*(a + b for a, b in zip(found[:6], counts)), found.first or first)
        return found

    def _build(self, job: Job) -> tuple[ctypes.CDLL, list[str]]:
        text, is_watched = expand(job.source), job.source in self._watched
        sources = self._sources if is_watched else SOURCES
        absent = {"NAME", "__launch_bounds__"} | _not_compiled(dict(job.defines))
        names = [name for name in dict.fromkeys(_KERNEL.findall(text)) if name not in absent] + _MACRO.findall((sources / f"{job.source}.cu").read_text())
        runs = "".join(f'extern "C" void run_{n}(const unsigned* g, const unsigned* b, unsigned s, void** a) {{ emulated::run_grid('
                       f"[](void** x) {{ emulated::call({n}, x); }}, g, b, s, a); }}\n" for n in names)
        source = f'#include "{sources / (job.source + ".cu")}"\n{runs}'
        # symbolic: a kernel called accept is not the one of the C library
        flags = ["-std=c++17", "-O1", "-mf16c", "-ffp-contract=off", "-fPIC", "-DQ27_ON_HOST", f"-I{HERE}", f"-I{sources}",
                 "-w", *(f"-D{name}={value}" for name, value in job.defines)]
        texts = [(HERE / name).read_text() for name in ("emulated.h", "races.h", *(["races.cpp"] if is_watched else []))]
        texts += [path.read_text() for path in sorted(sources.iterdir())] if sources != SOURCES else []
        key = hashlib.sha256("\0".join([text, source, *flags, *texts]).encode()).hexdigest()[:24]
        cache = self._cache if sources == SOURCES else sources.parent
        library = cache / f"{job.source}-{key}.so"
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                path = Path(folder) / "kernels.cpp"
                path.write_text(source)
                linked = ["-shared", "-Wl,-Bsymbolic", "-o", f"{folder}/out.so"]
                commands = [["g++", *flags, "-x", "c++", str(path), *linked]]
                if is_watched:   # the compiler tells of every access, and the detector, built apart, hears of it
                    objects = [f"{folder}/kernels.o", f"{folder}/races.o"]
                    commands = [["g++", *flags, "-DQ27_RACES", "-fsanitize=thread", "-c", "-x", "c++", str(path), "-o", objects[0]],
                                ["g++", "-std=c++17", "-O3", "-fPIC", "-DQ27_RACES", "-w", "-c", str(HERE / "races.cpp"), "-o", objects[1]],
                                ["g++", *objects, *linked]]
                for command in commands:
                    done = subprocess.run(command, capture_output=True, text=True)
                    assert done.returncode == 0, done.stderr[-4000:]
                os.replace(f"{folder}/out.so", library)
        return ctypes.CDLL(str(library)), names
