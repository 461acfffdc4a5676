"""Reader of `.tok` files, which published `.q27` checkpoints carry beside them.

Little-endian; strings are UTF-8 text in the GPT-2 byte alphabet (added tokens literally):

    offset   size  field
    0        4     magic 0x54373251
    4        4     version
    8        4     n, number of tokens
    12       4     id of the beginning-of-text token
    16       4     id of the end-of-text token
    20       ..    n times: u16 length, that many bytes (token strings in order of id)
    ..       n     one byte a token: its kind, numbered as in GGUF
    ..       4     m, number of merges
    ..       ..    m times: u16 length, that many bytes ("left right", in order of rank)
"""

from __future__ import annotations

import struct
from pathlib import Path

from q27app.chat.vocabulary import (
    ABSENT, ADDED, CONTROL, MAX_TOKENS, ORDINARY, SPLIT_PATTERNS, Vocabulary, make_vocabulary, pair,
    split_pre_tokenizer,
)
from q27app.errors import FileFormatError, why

MAGIC = 0x54373251
MAX_FILE_BYTES = 64 << 20


class _Reader:
    """A cursor over the file's bytes that refuses to run past the end."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def take(self, size: int, what: str) -> bytes:
        end = self.offset + size
        if end > len(self.data):
            raise FileFormatError(
                f"{self.path}: {what} needs bytes {self.offset}..{end}, the file has {len(self.data)}.",
                "The file is cut or damaged; fetch it again.",
            )
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def number(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def strings(self, count: int, what: str) -> list[str]:
        data, offset, found = self.data, self.offset, []
        for index in range(count):
            head = data[offset : offset + 2]
            size = int.from_bytes(head, "little")
            piece = data[offset + 2 : offset + 2 + size]
            if len(head) < 2 or len(piece) < size:
                self.offset = offset
                self.take(2 + size, f"{what} {index} of {count}")
            try:
                found.append(piece.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise FileFormatError(f"{self.path}: {what} {index} at byte {offset} is not UTF-8.") from error
            offset += 2 + size
        self.offset = offset
        return found


def read_tok(path: Path | str) -> Vocabulary:
    """Read a `.tok` file. Raises FileFormatError naming the file, the place and what was expected."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise FileFormatError(f"{path}: {size} bytes, a .tok file has at most {MAX_FILE_BYTES}.")
        reader = _Reader(path.read_bytes(), path)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {why(error)}.") from error
    magic = reader.number("magic")
    if magic != MAGIC:
        raise FileFormatError(f"{path}: magic is 0x{magic:08x}, expected 0x{MAGIC:08x} (a .tok file).")
    reader.number("version")
    count = reader.number("token count")
    if not 0 < count <= MAX_TOKENS:
        raise FileFormatError(f"{path}: {count} tokens, expected 1..{MAX_TOKENS}.")
    reader.number("beginning-of-text id")
    eos = reader.number("end-of-text id")
    tokens = reader.strings(count, "token")
    known = (ORDINARY, CONTROL, ADDED, ABSENT)
    kinds = bytes(kind if kind in known else ORDINARY for kind in reader.take(count, "token kinds"))
    num_merges = reader.number("merge count")
    if num_merges > MAX_TOKENS:
        raise FileFormatError(f"{path}: {num_merges} merges, at most {MAX_TOKENS} are read.")
    merges = [pair(merge) for merge in reader.strings(num_merges, "merge")]
    if reader.offset != len(reader.data):
        raise FileFormatError(f"{path}: {len(reader.data) - reader.offset} bytes after the last merge, expected none.")
    return make_vocabulary(tokens, kinds, merges, split_pre_tokenizer(SPLIT_PATTERNS["qwen35"]), [eos])
