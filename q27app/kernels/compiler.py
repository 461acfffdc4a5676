"""CUDA sources and defines -> machine code for one card, cached by content.

A cached file is named by the sha256 of everything that decides its bytes: the source with its headers, the defines, the
target, the flags and the compiler's version. It is written aside and renamed, so a reader sees a whole file or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q27app.errors import GpuError

SOURCES = Path(__file__).parent / "cu"
FLAGS = ("-std=c++17", "-O3", "--fmad=true")
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_TOOLKITS = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc", "/usr/lib/nvidia-cuda-toolkit/bin/nvcc")
_INSTALL = "Install the CUDA toolkit, or name its compiler in config.toml: [kernels] nvcc = \"/path/to/nvcc\""
_ENTRY = re.compile(r"(?P<source>[a-z0-9_]+)-(?P<target>(sm|compute)_[0-9a-z]+)-[0-9a-f]{32}\.(cubin|ptx)")


@dataclass(frozen=True)
class Job:
    """One source with its defines."""

    source: str
    """Name in `kernels/cu`, without suffix."""
    defines: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, source: str, defines: Mapping[str, int]) -> "Job":
        return cls(source, tuple(sorted(defines.items())))


def expand(source: str, folder: Path = SOURCES) -> str:
    """The text of NAME.cu with every header of ours in its place, each once."""
    seen: set[str] = set()

    def read(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (folder / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: read(match[1]) if (folder / match[1]).exists() else match[0], text)

    return read(f"{source}.cu")


def describe(cache: Path) -> list[dict[str, Any]]:
    """Compiled programs of a cache folder, the newest first: name, source, target, bytes, made_at."""
    found = []
    for path in cache.glob("*"):
        match = _ENTRY.fullmatch(path.name)
        try:
            stat = path.stat()
        except FileNotFoundError:   # another program cleans up too
            continue
        if match:
            found.append({"name": path.name, "source": match["source"], "target": match["target"], "bytes": stat.st_size,
                          "made_at": stat.st_mtime})
    return sorted(found, key=lambda row: (-row["made_at"], row["name"]))


@dataclass
class Compiler:
    """nvcc and its cache. target: "sm_90" gives machine code, "compute_86" gives PTX for the driver to translate.

    nvcc: path of the compiler, or None to look for it; the path found is kept beside the cache, so that a service without
    PATH finds it again.
    """

    cache: Path
    target: str
    nvcc: str | None = None
    jobs: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))

    def __post_init__(self) -> None:
        self._version: str | None = None

    def resolve(self) -> str:
        """Path of nvcc. Raises GpuError where there is none."""
        note = self.cache / "toolchain.json"
        remembered = None
        if note.exists():
            try:
                remembered = json.loads(note.read_text()).get("nvcc")
            except (ValueError, AttributeError):
                remembered = None
        for candidate in (self.nvcc, shutil.which("nvcc"), remembered, os.path.join(sys.prefix, "bin", "nvcc"), *_TOOLKITS):
            if candidate and os.access(candidate, os.X_OK):
                if candidate != remembered:
                    self._write(note, json.dumps({"nvcc": candidate}).encode())
                return candidate
        raise GpuError("No CUDA compiler (nvcc) was found.", _INSTALL)

    def version(self) -> str:
        """What `nvcc --version` says, read once."""
        if self._version is None:
            done = subprocess.run([self.resolve(), "--version"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise GpuError(f"{self.resolve()} --version ended with {done.returncode}: {done.stderr.strip()}", _INSTALL)
            self._version = done.stdout.strip().splitlines()[-1]
        return self._version

    def key(self, job: Job) -> str:
        """sha256 of everything that decides the machine code."""
        parts = [expand(job.source), json.dumps(job.defines), self.target, " ".join(FLAGS), self.version()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def path(self, job: Job) -> Path:
        suffix = "cubin" if self.target.startswith("sm_") else "ptx"
        return self.cache / f"{job.source}-{self.target}-{self.key(job)[:32]}.{suffix}"

    def get(self, job: Job) -> bytes:
        """Machine code of the job, from the cache or compiled now."""
        path = self.path(job)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return self._compile(job, path)

    def forget(self, job: Job) -> None:
        """Drop a cached result that cannot be used."""
        self.path(job).unlink(missing_ok=True)

    def build(self, jobs: Sequence[Job], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what the cache lacks, several at a time. progress(done, all)."""
        missing = [job for job in dict.fromkeys(jobs) if not self.path(job).exists()]
        if progress is not None:
            progress(0, len(missing))
        with ThreadPoolExecutor(self.jobs) as pool:
            for done, _ in enumerate(pool.map(self.get, missing), 1):
                if progress is not None:
                    progress(done, len(missing))

    def command(self, job: Job, output: str) -> list[str]:
        kind = "-cubin" if self.target.startswith("sm_") else "-ptx"
        defines = [f"-D{name}={value}" for name, value in job.defines]
        return [self.resolve(), kind, f"-arch={self.target}", *FLAGS, *defines, "-o", output, str(SOURCES / f"{job.source}.cu")]

    def _compile(self, job: Job, path: Path) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "out")
            done = subprocess.run(self.command(job, output), capture_output=True, text=True, check=False)
            if done.returncode:
                raise GpuError(f"{job.source}.cu does not compile for {self.target}: {done.stderr.strip()[-2000:]}", _INSTALL)
            image = Path(output).read_bytes()
        self._write(path, image)
        return image

    def _write(self, path: Path, data: bytes) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=self.cache, prefix=".write-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(aside, path)
