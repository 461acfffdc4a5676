"""Damaged source files, seeded: each loads or ends in a clear FileFormatError, soon and in bounded memory.

The files run in a child process whose address space is limited, so that an allocation that follows a lie fails there.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

NUM_FILES = 200
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]
MEMORY_BYTES = 1 << 30
LIES = (0, 1, 0xFF, 1 << 20, 1 << 31, 1 << 40, (1 << 62) - 1, (1 << 64) - 1)
CHILD = """
import json, resource, sys, time, traceback
from pathlib import Path
import numpy, gguf.quants
from q27app.errors import FileFormatError
from q27app.weights.gguf_file import open_gguf
from q27app.weights.safetensors import open_safetensors_folder

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
results = []
for path in sorted(Path(sys.argv[1]).iterdir()):
    begin = time.process_time()
    try:
        with (open_safetensors_folder(path) if path.is_dir() else open_gguf(path)) as source:
            for tensor in source.tensors.values():
                for start in range(0, tensor.rows, 64):
                    tensor.read(start, min(start + 64, tensor.rows))
        outcome = "loaded"
    except FileFormatError as problem:
        outcome = "refused: " + problem.message
    except BaseException:
        outcome = "crashed: " + traceback.format_exc()
    results.append((path.name, outcome, time.process_time() - begin))
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([results, peak]))
"""


def damaged(content: bytes, header: int, random: np.random.Generator) -> bytes:
    """Cut, with bits flipped in the header or anywhere, a length replaced, bytes removed or repeated."""
    raw, kind = bytearray(content), random.integers(6)
    if kind == 0:
        return bytes(raw[: random.integers(0, len(raw))])
    if kind in (1, 2):
        for place in random.integers(0, header if kind == 1 else len(raw), random.integers(1, 5)):
            raw[place] ^= 1 << random.integers(8)
        return bytes(raw)
    if kind == 3:
        place = int(random.integers(0, max(1, header - 8)))
        value = LIES[random.integers(len(LIES))]
        raw[place : place + 8] = struct.pack("<Q", value)
        return bytes(raw)
    start = int(random.integers(0, header))
    stop = min(len(raw), start + int(random.integers(1, 64)))
    return bytes(raw[:start] + raw[stop:]) if kind == 4 else bytes(raw[:stop] + raw[start:])


def lying_header(text: bytes, random: np.random.Generator) -> bytes:
    """A safetensors header in which one number of one tensor is another."""
    header = json.loads(text)
    name = str(random.choice(sorted(header)))
    field = header[name][str(random.choice(["shape", "data_offsets"]))]
    field[int(random.integers(len(field)))] = (-1, 0, 3, 1 << 33, 1 << 62, 1 << 70)[random.integers(6)]
    return json.dumps(header).encode()


def run_child(folder: Path) -> tuple[list[tuple[str, str, float]], int]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(MEMORY_BYTES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results, peak = json.loads(done.stdout)
    return [tuple(result) for result in results], peak


def check(results: list[tuple[str, str, float]], peak: int, seed: int) -> None:
    crashed = [result for result in results if result[1].startswith("crashed")]
    assert not crashed, f"seed {seed}: {crashed[0]}"
    assert len(results) == NUM_FILES
    assert max(result[2] for result in results) < 10
    assert peak < MEMORY_BYTES
    refused = [outcome for _, outcome, _ in results if outcome.startswith("refused")]
    assert len(refused) > NUM_FILES // 2
    assert all(len(outcome) < 600 and "\n" not in outcome for outcome in refused)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_safetensors_are_refused_or_read(tmp_path, write_safetensors, seed):
    random = np.random.default_rng(seed)
    values = random.standard_normal((40, 32)).astype(np.float32)
    tensors = {
        "model.a.weight": ("F32", values),
        "model.b.weight": ("F16", values.astype(np.float16)),
        "model.c.weight": ("BF16", values.view(np.uint16)[:, ::2].copy()),
        "model.d": ("F32", values[0]),
    }
    write_safetensors(tmp_path / "good", tensors)
    content = (tmp_path / "good").read_bytes()
    header = 8 + struct.unpack_from("<Q", content)[0]
    files = tmp_path / "files"
    for index in range(NUM_FILES):
        folder = files / f"{index:03}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        bad = damaged(content, header, random)
        if index % 4 == 0:
            text = json.dumps(
                {name: entry for name, entry in json.loads(content[8:header]).items() if name != "__metadata__"}
            ).encode()
            text = lying_header(text, random)
            bad = struct.pack("<Q", len(text)) + text + content[header:]
        (folder / "model.safetensors").write_bytes(bad)
    check(*run_child(files), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_gguf_files_are_refused_or_read(tmp_path, make_gguf, seed):
    random = np.random.default_rng(seed)

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    tokens = b"".join(text(f"t{index}") for index in range(300))
    keys = {
        "general.architecture": struct.pack("<I", 8) + text("qwen35"),
        "general.alignment": struct.pack("<II", 4, 32),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, 300) + tokens,
        "flag": struct.pack("<IB", 7, 1),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", 9, 5, 300) + b"\1\0\0\0" * 300,
        "eps": struct.pack("<If", 6, 1e-6),
    }
    values = random.standard_normal((8, 256)).astype(np.float32)
    tensors = {
        "a.weight": ((8, 256), 0, values.tobytes()),
        "b.weight": ((8, 256), 1, values.astype(np.float16).tobytes()),
        "q8.weight": ((8, 256), 8, random.integers(0, 60, 8 * 8 * 34, dtype=np.uint8).tobytes()),
        "q4k.weight": ((8, 256), 12, random.integers(0, 60, 8 * 144, dtype=np.uint8).tobytes()),
        "v": ((256,), 0, values[0].tobytes()),
    }
    content = make_gguf(keys, tensors)
    header = len(content) - sum(len(data) + -len(data) % 32 for _, _, data in tensors.values())
    files = tmp_path / "files"
    files.mkdir()
    for index in range(NUM_FILES):
        (files / f"{index:03}.gguf").write_bytes(damaged(content, header, random))
    check(*run_child(files), seed)


@pytest.mark.long
def test_headers_built_to_exhaust_memory_are_refused(tmp_path, make_gguf):
    """The largest headers that the limits let through, and just beyond."""
    files = tmp_path / "files"
    files.mkdir()
    empty = struct.pack("<IIQ", 9, 8, 2 << 20) + b"\0" * (8 * (2 << 20))
    (files / "strings.gguf").write_bytes(make_gguf({"a": empty}, {}))
    (files / "more.gguf").write_bytes(make_gguf({"a": empty, "b": struct.pack("<IIQ", 9, 8, 1) + b"\0" * 8}, {}))
    (files / "numbers.gguf").write_bytes(
        make_gguf({"a": struct.pack("<IIQ", 9, 10, 4 << 20) + b"\xff" * (32 << 20)}, {})
    )
    texts = {
        "objects": "[" + "{}," * (5 << 20) + "{}]",
        "numbers": '{"a":[' + "9," * ((8 << 20) - 10) + "9]}",
        "keys": "{" + ",".join(f'"{index}":{{}}' for index in range(499_000)) + "}",
        "many": "{" + ",".join(f'"{index}":{{}}' for index in range(600_000)) + "}",
    }
    for name, text in texts.items():
        (files / name).mkdir()
        (files / name / "config.json").write_text("{}")
        raw = text.encode()[: 16 << 20]
        (files / name / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    results, peak = run_child(files)
    outcomes = {name: outcome for name, outcome, _ in results}
    assert not [result for result in results if result[1].startswith("crashed")], outcomes
    assert outcomes["strings.gguf"] == outcomes["numbers.gguf"] == "loaded"
    assert all(
        outcomes[name].startswith("refused") for name in outcomes if name not in ("strings.gguf", "numbers.gguf")
    )
    assert max(result[2] for result in results) < 10
    assert peak < MEMORY_BYTES
