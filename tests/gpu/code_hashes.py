"""A million heads by a format's codec, on a card, without NumPy's time there: `python -m tests.gpu.code_hashes make FILE FORMAT ... | check FILE`.

make: what the NumPy codec gives, as checksums by piece; on any machine. check: the device codes the same rows, made anew from
integers alone so that every machine has the same bits; a piece with another checksum is named.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS
from q27app.kernels.kv_formats import kv_format

HEADS, HEAD_DIM, PIECE, PIECES, SEED = 4, 256, 4096, 64, 23
"""Heads of the 27B; rows of a piece, and pieces: 2 x 1,048,576 heads, keys and values."""
POOL = 7_999_993


def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and values float32 [PIECE, HEADS * HEAD_DIM]: bell-shaped rows of many sizes, some heavy-tailed, some zero."""
    random = np.random.Generator(np.random.PCG64(SEED))
    shape = (2, PIECE, HEADS * HEAD_DIM)
    size = int(np.prod(shape))
    pool = np.frombuffer(random.bytes(4 * (POOL + size)), np.int8).reshape(-1, 4).sum(-1, dtype=np.int16).astype(np.float32)
    for number in range(PIECES):   # windows of a prime period: no two blocks of 128 are equal
        start = number * size % POOL
        values = pool[start:start + size].reshape(shape) * np.ldexp(np.float32(1), random.integers(-16, -3, (2, PIECE, 1)))
        values[1, ::3] *= np.abs(values[1, ::3])
        values[:, 5, :HEAD_DIM] = 0
        values[:, 6, 3] = 1e30
        values[1, 7] = 1e-12
        yield values[0], values[1]


def checksum(data: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(data).view(np.uint8).data, digest_size=8).hexdigest()


def expected(name: str) -> list[list[str]]:
    """Checksums of rows, coded keys and coded values of each piece, [heads, rows, bytes] as a cache keeps them."""
    form, found = kv_format(name), []
    for k, v in pieces():
        coded = [codec.encode(rows.reshape(PIECE, HEADS, HEAD_DIM)).transpose(1, 0, 2) for codec, rows in ((form.key, k), (form.value, v))]
        found.append([checksum(np.concatenate([k, v])), *(checksum(part) for part in coded)])
    return found


def check(name: str, sums: list[list[str]]) -> str:
    from dataclasses import replace

    from q27app.kernels.numpy_state import NumpyState
    from tests.gpu.checks import open_device
    from tests.kernels.attend_checks import AttendBench
    from tests.model.geometry import config_27b

    config, blocks = replace(config_27b(), intermediate_size=256, vocab_size=2048), list(range(PIECE // BLOCK_POSITIONS))
    device = open_device()
    bench = AttendBench(device, config, name, len(blocks), 1, PIECE)
    try:
        for number, ((k, v), (rows, keys, values)) in enumerate(zip(pieces(), sums, strict=True)):
            if checksum(np.concatenate([k, v])) != rows:
                raise AssertionError(f"piece {number}: this machine makes other rows; the file is of no use here")
            bench.store(k, v, 0)
            found = NumpyState(config, 1, 1, name, 1, len(blocks), 16)
            found.import_blocks(blocks, bench.state.export_blocks(blocks))
            for what, coded, wanted in (("keys", found.keys[0], keys), ("values", found.values[0], values)):
                if checksum(coded[:, :PIECE]) != wanted:
                    raise AssertionError(f"{name}, piece {number}: other bytes of {what}")
    finally:
        device.close()
    return f"{2 * PIECES * PIECE * HEADS} heads of {name}, the same bytes"


def main(what: str, path: str, *names: str) -> int:
    if what == "make":
        Path(path).write_text(json.dumps({name: expected(name) for name in names}))
        return 0
    for name, sums in json.loads(Path(path).read_text()).items():
        print(check(name, sums), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
