"""Tokenizers for the tests of the chat room: a small made one, and the reference vocabulary with markers added."""

from __future__ import annotations

import json
from typing import Any

import pytest

from q27app.chat.tokenizer import Tokenizer
from q27app.chat.vocabulary import SPLIT_PATTERNS, byte_alphabet, split_pre_tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")


def made_document() -> dict[str, Any]:
    """A tokenizer.json with 256 bytes, a few merges, Qwen's control tokens and markers."""
    vocab = {text: value for value, text in sorted(byte_alphabet().items())}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ċ", "Ċ"), ("<", "|"), ("t", "o"), ("to", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    added = [
        {
            "id": len(vocab) + index,
            "content": text,
            "special": text in CONTROLS,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for index, text in enumerate((*CONTROLS, *MARKERS))
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split_pre_tokenizer(SPLIT_PATTERNS["qwen35"]),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(merge) for merge in merges]},
    }


@pytest.fixture(scope="session")
def made_json() -> str:
    return json.dumps(made_document(), ensure_ascii=False)


@pytest.fixture(scope="session")
def tokenizer(made_json) -> Tokenizer:
    return Tokenizer.from_metadata({"tokenizer.huggingface.json": made_json})


@pytest.fixture(scope="session")
def reference_metadata(shared) -> dict[str, Any]:
    """Metadata of the reference vocabulary's GGUF."""
    from q27app.weights.gguf_file import open_gguf

    return dict(open_gguf(shared / "vocab" / "qwen35-vocab.gguf").metadata)


@pytest.fixture(scope="session")
def qwen(reference_metadata) -> Tokenizer:
    """The reference vocabulary with six of its padding tokens turned into the markers."""
    tokens = list(reference_metadata["tokenizer.ggml.tokens"])
    first = tokens.index("<|im_end|>") + 1
    tokens[first : first + len(MARKERS)] = MARKERS
    return Tokenizer.from_metadata({**reference_metadata, "tokenizer.ggml.tokens": tokens})
