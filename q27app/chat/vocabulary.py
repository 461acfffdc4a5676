"""A vocabulary as plain data, whatever file it came from: token strings, their kinds, merges, splitting rules.

Three sources give the same object: the text of a `tokenizer.json`, the `tokenizer.ggml.*` arrays of a GGUF, and a
`.tok` file (tok_file.py). All are byte-level BPE: an ordinary token is written in the GPT-2 byte alphabet, an added
token (control or user-defined) as its literal text. Everything read here may be hostile and is bounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from q27app.errors import FileFormatError, ModelError

MAX_TOKENS = 1 << 20
MAX_JSON_BYTES = 128 << 20

ORDINARY = 1
CONTROL = 3
ADDED = 4
ABSENT = 5
"""Kinds, numbered as GGUF does: ordinary text, hidden control token, visible added token, no token at this id."""

VISIBLE_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Markers that the output parser looks for: control tokens in prompts wherever they are one token, shown in output."""

END_NAMES = ("<|im_end|>", "<|endoftext|>")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    "qwen35": _WORDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS,
    "qwen2": _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS,
}
"""How text is cut into words before merging, by the GGUF's name for it (`tokenizer.ggml.pre`)."""


@cache
def byte_alphabet() -> dict[int, str]:
    """The GPT-2 alphabet: each byte value as one printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(plain)]
    return {value: chr(value) for value in plain} | {value: chr(256 + i) for i, value in enumerate(others)}


@dataclass(frozen=True)
class Vocabulary:
    """tokens[id]: the string, "" where there is none. kinds[id]: see above. merges: pairs in order of rank.

    pre_tokenizer, normalizer: in the form of tokenizer.json. options: further switches of the BPE model.
    """

    tokens: list[str]
    kinds: bytes
    merges: list[tuple[str, str]]
    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()

    @cached_property
    def ordinary(self) -> dict[str, int]:
        """String -> id of the tokens that text may become."""
        return {text: index for index, text in enumerate(self.tokens) if self.kinds[index] == ORDINARY}

    @cached_property
    def control(self) -> dict[str, int]:
        """String -> id of the tokens that only scaffold may become."""
        return {text: i for i, text in enumerate(self.tokens) if self.kinds[i] in (CONTROL, ADDED) and text}

    @cached_property
    def identity(self) -> str:
        """sha256 over everything that decides which ids a text gets. Equal for one vocabulary in different files."""
        digest = hashlib.sha256()
        for index, text in enumerate(self.tokens):
            if self.kinds[index] != ABSENT:
                kind = ORDINARY if self.kinds[index] == ORDINARY else CONTROL
                digest.update(f"{index} {kind} {text}\n".encode("utf-8", "surrogatepass"))
        digest.update("\n".join(f"{left} {right}" for left, right in self.merges).encode("utf-8", "surrogatepass"))
        rules = [_split_rules(self.pre_tokenizer), self.normalizer, self.options]
        digest.update(json.dumps(rules, sort_keys=True).encode())
        return digest.hexdigest()


def _split_rules(pre_tokenizer: Any) -> list[Any]:
    """The patterns of a pre-tokenizer without spelling differences that have no effect."""
    if not isinstance(pre_tokenizer, dict):
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return [rule for part in pre_tokenizer.get("pretokenizers", []) for rule in _split_rules(part)]
    return [{key: value for key, value in pre_tokenizer.items() if key != "trim_offsets"}]


def make_vocabulary(
    tokens: list[str],
    kinds: bytes,
    merges: list[tuple[str, str]],
    pre_tokenizer: dict[str, Any],
    eos_ids: Iterable[int] = (),
    normalizer: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Vocabulary:
    """Settles what all sources share: marker names are control, end-of-text ids, every byte has a token.

    Raises ModelError if one of the 256 byte tokens is missing: some text could not be encoded.
    """
    settled = bytearray(kinds)
    names = set(VISIBLE_MARKERS)
    ends: set[int] = {index for index in eos_ids if 0 <= index < len(tokens)}
    present: set[str] = set()
    for index, text in enumerate(tokens):
        if text in names:
            settled[index] = ADDED
        elif text in END_NAMES and settled[index] != ABSENT:
            settled[index] = CONTROL
            ends.add(index)
        elif settled[index] == ORDINARY and len(text) == 1:
            present.add(text)
    missing = [value for value, text in byte_alphabet().items() if text not in present]
    if missing:
        raise ModelError(
            f"the tokenizer has no token for {len(missing)} of 256 byte values (first: 0x{missing[0]:02x}).",
            "It is not a complete byte-level vocabulary; take the tokenizer.json of the checkpoint.",
        )
    return Vocabulary(tokens, bytes(settled), merges, pre_tokenizer, normalizer, options or {}, tuple(sorted(ends)))


def split_pre_tokenizer(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer object of tokenizer.json that cuts at `pattern` and maps bytes to the GPT-2 alphabet."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def pair(merge: Any) -> tuple[str, str]:
    """A merge rule, written "left right" or [left, right]."""
    if isinstance(merge, str):
        left, _, right = merge.partition(" ")
    elif isinstance(merge, (list, tuple)) and len(merge) == 2:
        left, right = merge
    else:
        left = right = ""
    if not (isinstance(left, str) and isinstance(right, str) and left and right):
        raise FileFormatError(f"tokenizer merge {str(merge)[:60]!r} is not a pair of token strings.")
    return left, right


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """From `tokenizer.ggml.tokens`, `.merges`, `.token_type`, `.pre` and the end-of-text ids.

    Raises ModelError for another tokenizer model or an unknown pre-tokenizer, FileFormatError for arrays that disagree.
    """
    model = metadata.get("tokenizer.ggml.model", "gpt2")
    if model != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {str(model)[:40]!r}, expected 'gpt2' (byte-level BPE).")
    name = metadata.get("tokenizer.ggml.pre", "qwen35")
    if not isinstance(name, str) or name not in SPLIT_PATTERNS:
        raise ModelError(f"tokenizer.ggml.pre is {str(name)[:40]!r}, expected one of {', '.join(SPLIT_PATTERNS)}.")
    tokens = _string_array(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [ORDINARY] * len(tokens) if types is None else [int(kind) for kind in types]
    if len(types) != len(tokens):
        raise FileFormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    merges = [pair(merge) for merge in _string_array(metadata, "tokenizer.ggml.merges")]
    kinds = bytes(kind if kind in (CONTROL, ADDED, ABSENT) else ORDINARY for kind in types)
    return make_vocabulary(tokens, kinds, merges, split_pre_tokenizer(SPLIT_PATTERNS[name]), metadata_eos(metadata))


def metadata_eos(metadata: Mapping[str, Any]) -> list[int]:
    """End-of-text ids that a checkpoint's metadata names."""
    found: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eos_token_ids"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not None and not isinstance(item, (str, bytes)):
                found.append(int(item))
    return found


def _string_array(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if value is None or isinstance(value, (str, bytes)):
        raise FileFormatError(f"metadata key {key} is {'absent' if value is None else 'a string'}, expected an array.")
    if len(value) > MAX_TOKENS:
        raise FileFormatError(f"metadata key {key} has {len(value)} entries, at most {MAX_TOKENS} are read.")
    items = [item if isinstance(item, str) else _text(item, key) for item in value]
    return items


def _text(item: Any, key: str) -> str:
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item).decode("utf-8", "replace")
    raise FileFormatError(f"metadata key {key} holds a {type(item).__name__}, expected strings.")


def vocabulary_from_json(text: str | bytes, eos_ids: Iterable[int] = ()) -> Vocabulary:
    """From the text of a tokenizer.json (byte-level BPE).

    Raises FileFormatError for damage, ModelError for a kind of tokenizer that this program does not run.
    """
    if len(text) > MAX_JSON_BYTES:
        raise FileFormatError(f"tokenizer.json has {len(text)} bytes, at most {MAX_JSON_BYTES} are read.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"tokenizer.json is not readable as JSON: {str(error)[:200]}.") from error
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ModelError("tokenizer.json holds no BPE model with a vocabulary; expected a byte-level BPE tokenizer.")
    pre_tokenizer = document.get("pre_tokenizer")
    if not any(rule.get("type") == "ByteLevel" for rule in _split_rules(pre_tokenizer) if isinstance(rule, dict)):
        raise ModelError("tokenizer.json has no ByteLevel pre-tokenizer; expected a byte-level BPE tokenizer.")
    strings = _json_tokens(model["vocab"], document.get("added_tokens") or [])
    tokens = [""] * (max((index for index, _, _ in strings), default=-1) + 1)
    kinds = bytearray([ABSENT]) * len(tokens)
    for index, string, kind in strings:
        tokens[index], kinds[index] = string, kind
    merges = [pair(merge) for merge in model.get("merges") or []]
    options = {key: model[key] for key in ("ignore_merges", "fuse_unk") if model.get(key)}
    normalizer = document.get("normalizer")
    return make_vocabulary(tokens, bytes(kinds), merges, pre_tokenizer, eos_ids, normalizer, options)


def _json_tokens(vocab: dict[str, Any], added: Any) -> list[tuple[int, str, int]]:
    """(id, string, kind) of a tokenizer.json's vocabulary, then its added tokens, which win."""
    if not isinstance(added, list) or len(vocab) + len(added) > MAX_TOKENS:
        raise FileFormatError(f"tokenizer.json has over {MAX_TOKENS} tokens, or added_tokens is not a list.")
    strings: list[tuple[int, str, int]] = [(index, string, ORDINARY) for string, index in vocab.items()]
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise FileFormatError(f"tokenizer.json: added token {str(token)[:80]!r} has no content string.")
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            name = token["content"][:40]
            raise ModelError(f"tokenizer.json: added token {name!r} uses lstrip, rstrip or single_word.")
        strings.append((token.get("id"), token["content"], CONTROL if token.get("special") else ADDED))
    for index, string, _ in strings:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_TOKENS:
            raise FileFormatError(
                f"tokenizer.json: token {string[:40]!r} has id {str(index)[:40]}, expected 0..{MAX_TOKENS - 1}."
            )
    return strings
