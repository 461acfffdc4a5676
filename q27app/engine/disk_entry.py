"""One state on disk: how an entry file is laid out, written and read. No policy.

    bytes                what (little endian)
    8                    magic "Q27SNAP2"
    32                   fingerprint of model, geometry, KV format and layout
    u32 u32              kind (0 turn, 1 system), number of chunks
    u64 u64 u64          number of tokens n (a multiple of 64), bytes of a slot, bytes of a block
    i32 x n              the tokens
    16 x chunks          BLAKE2b digest of each CHUNK bytes of the payload
    32                   BLAKE2b digest of everything before
    payload              the slot, then n / 64 blocks

A file is complete or it is not there under its name: it is written beside it, locked, flushed and renamed. Whatever is
wrong with a file, reading it gives None.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS

MAGIC = b"Q27SNAP2"
"""The last byte counts the layouts."""
SUFFIX = ".q27snap"
TEMP_PREFIX = ".writing-"
CHUNK = 4 << 20
MAX_TOKENS, MAX_CHUNKS = 1 << 22, 1 << 16
READERS = min(16, os.cpu_count() or 1)
"""Threads that read and check a payload; both happen outside the interpreter's lock."""
KINDS = ("turn", "system")
_HEAD = struct.Struct("<8s32sIIQQQ")


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """The head of an entry file. digests: of the payload's chunks. tokens: int32 [n]."""

    path: Path
    fingerprint: bytes
    kind: str
    tokens: np.ndarray
    slot_bytes: int
    block_bytes: int
    digests: tuple[bytes, ...]
    payload_offset: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.payload_offset + self.slot_bytes + self.num_tokens // BLOCK_POSITIONS * self.block_bytes


def _digest(data: bytes | memoryview, size: int = 16) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def is_digest(data: memoryview, digest: bytes) -> bool:
    """Whether these are the bytes of a chunk that has this digest."""
    return _digest(data) == digest


def entry_name(fingerprint: bytes, tokens: np.ndarray) -> str:
    """The file name of a state; the same state has the same name."""
    return f"{_digest(fingerprint + tokens.tobytes()).hex()}-{len(tokens)}{SUFFIX}"


def _chunks(payload: list[memoryview]) -> Iterator[list[memoryview]]:
    """The payload's parts cut into groups of CHUNK bytes together, the last one shorter."""
    group: list[memoryview] = []
    room = CHUNK
    for part in payload:
        while len(part):
            piece, part = part[:room], part[room:]
            group.append(piece)
            room -= len(piece)
            if not room:
                yield group
                group, room = [], CHUNK
    if group:
        yield group


def write_entry(folder: Path, fingerprint: bytes, kind: str, tokens: np.ndarray, slot: np.ndarray,
                blocks: np.ndarray) -> Path:
    """Write a state; returns its path. Raises OSError; then nothing is left under the final name."""
    tokens = np.ascontiguousarray(tokens, "<i4")
    payload = [memoryview(np.ascontiguousarray(array)).cast("B") for array in (slot, blocks) if array.size]
    digests = [_digest(b"".join(group)) for group in _chunks(payload)]
    head = _HEAD.pack(MAGIC, fingerprint, KINDS.index(kind), len(digests), len(tokens), slot.size, blocks.shape[1])
    head += tokens.tobytes() + b"".join(digests)
    path = folder / entry_name(fingerprint, tokens)
    descriptor, temporary = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _lock(file)
            file.write(head + _digest(head, 32))
            for part in payload:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)
    return path


def read_head(path: Path, fingerprint: bytes | None = None) -> DiskEntry | None:
    """The head of a file; None if it is none, damaged, of another size than it says, or of another fingerprint."""
    try:
        with open(path, "rb") as file:
            return head_of(path, file, fingerprint)
    except OSError:
        return None


def layout_of(path: Path) -> int | None:
    """Which layout an entry file is of, 2 being the one that is read here; None where it is none, or cannot be read."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(MAGIC))
    except OSError:
        return None
    return int(magic[-1:]) if len(magic) == len(MAGIC) and magic[:-1] == MAGIC[:-1] and magic[-1:].isdigit() else None


def is_of_older_layout(path: Path) -> bool:
    """An earlier version of this program wrote it, and nobody reads it any more."""
    layout = layout_of(path)
    return layout is not None and layout < int(MAGIC[-1:])


def head_of(path: Path, file: BinaryIO, fingerprint: bytes | None) -> DiskEntry | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[:8] != MAGIC:
        return None
    _, found, kind, num_chunks, num_tokens, slot_bytes, block_bytes = _HEAD.unpack(head)
    if fingerprint is not None and found != fingerprint:
        return None
    num_blocks, rest = divmod(num_tokens, BLOCK_POSITIONS)
    payload = slot_bytes + num_blocks * block_bytes
    offset = _HEAD.size + 4 * num_tokens + 16 * num_chunks + 32
    if (rest or not 0 < num_tokens <= MAX_TOKENS or kind >= len(KINDS)
            or num_chunks != -(-payload // CHUNK) or num_chunks > MAX_CHUNKS
            or os.fstat(file.fileno()).st_size != offset + payload):
        return None
    body = file.read(offset - _HEAD.size)
    if len(body) < offset - _HEAD.size or _digest(head + body[:-32], 32) != body[-32:]:
        return None
    tokens = np.frombuffer(body, "<i4", num_tokens).astype(np.int32)
    table = body[4 * num_tokens:-32]
    digests = tuple(table[start:start + 16] for start in range(0, len(table), 16))
    return DiskEntry(path, found, KINDS[kind], tokens, slot_bytes, block_bytes, digests, offset)


def fill(descriptor: int, offset: int, view: memoryview) -> bool:
    """Read exactly this much from a place of the file; False at an early end."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            return False
        done += count
    return True


def remove_leftovers(folder: Path) -> int:
    """Delete what writers that are gone have left half written; returns how many. A writer at work holds a lock."""
    count = 0
    for path in entries_of(folder, TEMP_PREFIX, ""):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if _lock(file):
                os.unlink(path)
                count += 1
    return count


def entries_of(folder: Path, prefix: str = "", suffix: str = SUFFIX) -> Iterable[Path]:
    """Plain files of the folder by the form of their name; links and everything else are left alone."""
    try:
        with os.scandir(folder) as found:
            return [Path(item.path) for item in found if item.name.startswith(prefix) and item.name.endswith(suffix)
                    and item.is_file(follow_symlinks=False)]
    except OSError:
        return []


def _lock(file: BinaryIO) -> bool:
    """An exclusive lock that goes with the process; False if somebody else holds it. True where there are none."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
