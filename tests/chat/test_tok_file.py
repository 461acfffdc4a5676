"""The .tok reader: a written file comes back, damage is refused with its place."""

from __future__ import annotations

import json
import struct

import pytest

from q27app.chat.tokenizer import Tokenizer
from q27app.errors import FileFormatError, Q27Error


def tok_bytes(document: dict) -> bytes:
    pairs = {**document["model"]["vocab"], **{token["content"]: token["id"] for token in document["added_tokens"]}}
    special = {token["content"]: 3 if token["special"] else 1 for token in document["added_tokens"]}
    tokens = sorted(pairs, key=pairs.__getitem__)

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text.encode())) + text.encode()

    merges = document["model"]["merges"]
    return b"".join(
        [
            struct.pack("<5I", 0x54373251, 1, len(tokens), 0, pairs["<|im_end|>"]),
            *map(string, tokens),
            bytes(special.get(token, 1) for token in tokens),
            struct.pack("<I", len(merges)),
            *map(string, merges),
        ]
    )


@pytest.fixture()
def tok(made_json) -> bytes:
    return tok_bytes(json.loads(made_json))


def test_a_tok_file_gives_the_same_tokenizer(tmp_path, tok, tokenizer):
    path = tmp_path / "m.tok"
    path.write_bytes(tok)
    one = Tokenizer.from_file(path)
    text = "<|im_start|>user\nthe <tool_call> in\n\n<think>"
    assert one.encode(text, True) == tokenizer.encode(text, True)
    assert one.identity == tokenizer.identity and one.eos_ids == tokenizer.eos_ids


def test_every_truncation_is_refused(tmp_path, tok):
    path = tmp_path / "m.tok"
    for size in [*range(0, 64), *range(64, len(tok), 97)]:
        path.write_bytes(tok[:size])
        with pytest.raises(FileFormatError, match="m.tok"):
            Tokenizer.from_file(path)


def test_flipped_bytes_load_or_are_refused(tmp_path, tok):
    path = tmp_path / "m.tok"
    for place in range(0, len(tok), 41):
        damaged = bytearray(tok)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            Tokenizer.from_file(path)
        except Q27Error:
            pass


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, 1, "magic"),
        (8, 0, "0 tokens"),
        (8, 0xFFFFFFFF, "4294967295 tokens"),
        (8, 5000, "token"),
    ],
)
def test_lies_of_the_header_are_refused(tmp_path, tok, offset, value, words):
    damaged = bytearray(tok)
    struct.pack_into("<I", damaged, offset, value)
    path = tmp_path / "m.tok"
    path.write_bytes(damaged)
    with pytest.raises(FileFormatError, match=words):
        Tokenizer.from_file(path)


def test_bytes_after_the_last_merge_are_refused(tmp_path, tok):
    path = tmp_path / "m.tok"
    path.write_bytes(tok + b"x")
    with pytest.raises(FileFormatError, match="1 bytes after"):
        Tokenizer.from_file(path)


def test_the_file_kind_follows_the_ending(tmp_path, made_json, tokenizer):
    path = tmp_path / "tokenizer.json"
    path.write_text(made_json, encoding="utf-8")
    assert Tokenizer.from_file(path).identity == tokenizer.identity
    metadata = {"tokenizer.huggingface.json": made_json}
    assert Tokenizer.from_file(tmp_path / "m.q27", lambda _: metadata).identity == tokenizer.identity
    with pytest.raises(FileFormatError, match="m.q27"):
        Tokenizer.from_file(tmp_path / "m.q27")
    with pytest.raises(FileFormatError, match="none.json"):
        Tokenizer.from_file(tmp_path / "none.json")
