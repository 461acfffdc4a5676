"""Trains the small byte-level BPE of the demo model and writes it as tokenizer.json text.

Plain Python on word counts: the pieces of the pre-tokenizer are counted once, then the most frequent pair is merged until
the vocabulary is full. Same text, same result: ties go to the pair that sorts last. After the merges come whole words that
no merge makes (they decode, and encoding never gives them), then the control tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from q27app.errors import UsageError

CONTROL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool_call>", False),
    ("</tool_call>", False), ("<tool_response>", False), ("</tool_response>", False), ("<think>", False),
    ("</think>", False),
)
"""(text, special). Their ids are the last of the vocabulary, in this order."""

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
"""Pieces within which merges happen, in the syntax of the tokenizer file."""

_PIECES = re.compile(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\w\r\n]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*"
                     r"|\s*[\r\n]+|\s+(?!\S)|\s+")
"""The same pieces in Python's syntax; training text is mostly ASCII, where the two agree."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in tokenizer files: [256]."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = (chr(256 + index) for index in range(256))
    return [chr(byte) if byte in plain else next(extra) for byte in range(256)]


def byte_symbols(text: str) -> str:
    """`text` as tokenizer files spell it."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def train(texts: Iterable[str], vocab_size: int, words: Sequence[str] = (), joined: Sequence[str] | None = None) -> str:
    """tokenizer.json text with `vocab_size` ids: 256 bytes, merges, those of `words` that are not merges, control tokens.

    joined: the only words that a merge joins to the blank before them, and no merge joins a word to another sign, so
    that a word has the same ids wherever it stands; None: whatever is frequent. Raises UsageError if the texts do not
    have enough different pairs.
    """
    alphabet = byte_alphabet()
    pieces: Counter[str] = Counter()
    for text in texts:
        pieces.update(_PIECES.findall(text))
    if joined is not None:
        pieces = _bare(pieces)
    counted = [([alphabet[byte] for byte in piece.encode()], count) for piece, count in sorted(pieces.items())]
    unmade = dict.fromkeys(byte_symbols(word) for word in words)
    wanted = vocab_size - 256 - len(CONTROL_TOKENS) - len(joined or ())
    merges = _merges(counted, wanted, unmade)
    merges += [(byte_symbols(" "), byte_symbols(word)) for word in joined or ()]
    ordered = [*alphabet, *(left + right for left, right in merges), *unmade]
    vocabulary = {token: index for index, token in enumerate(ordered)}
    return _tokenizer_json(vocabulary, merges)


def _bare(pieces: Counter[str]) -> Counter[str]:
    """The pieces that begin with a sign and go on with a letter, without the sign."""
    found: Counter[str] = Counter()
    for piece, count in pieces.items():
        has_sign = len(piece) > 1 and piece[1].isalpha() and not piece[0].isalpha() and piece[0] != "'"
        found[piece[1:] if has_sign else piece] += count
    return found


def _merges(words: list[tuple[list[str], int]], wanted: int, unmade: dict[str, None]) -> list[tuple[str, str]]:
    """Merges until they and what is left in `unmade` are `wanted`; takes out of `unmade` what a merge makes."""
    counts: Counter[tuple[str, str]] = Counter()
    holders: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, (symbols, count) in enumerate(words):
        for pair in zip(symbols, symbols[1:], strict=False):
            counts[pair] += count
            holders[pair].add(index)
    merges: list[tuple[str, str]] = []
    known: set[str] = set()
    while len(merges) + len(unmade) < wanted:
        best = max(counts.items(), key=lambda item: (item[1], item[0]), default=(("", ""), 0))
        pair, count = best
        if count < 2:
            raise UsageError(f"the text holds {len(merges)} merges, {wanted - len(unmade)} are wanted.", "Train on more text.")
        for index in sorted(holders[pair]):
            _merge_word(words, index, pair, counts, holders)
        del counts[pair]
        if "".join(pair) not in known:
            known.add("".join(pair))
            unmade.pop("".join(pair), None)
            merges.append(pair)
    return merges


def _merge_word(words: list[tuple[list[str], int]], index: int, pair: tuple[str, str],
                counts: Counter[tuple[str, str]], holders: defaultdict[tuple[str, str], set[int]]) -> None:
    symbols, count = words[index]
    for old in zip(symbols, symbols[1:], strict=False):
        counts[old] -= count
    merged: list[str] = []
    position = 0
    while position < len(symbols):
        if tuple(symbols[position:position + 2]) == pair:
            merged.append(pair[0] + pair[1])
            position += 2
        else:
            merged.append(symbols[position])
            position += 1
    words[index] = (merged, count)
    for new in zip(merged, merged[1:], strict=False):
        counts[new] += count
        holders[new].add(index)


def _tokenizer_json(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    added = [{"id": len(vocabulary) + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": special} for index, (text, special) in enumerate(CONTROL_TOKENS)]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }, ensure_ascii=False, separators=(",", ":"))
