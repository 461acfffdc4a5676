"""Geometry, metadata and tokenizer of constructed checkpoints: `nano`, `27b`, or `WxL[,key=value...]`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from q27app.errors import UsageError
from q27app.weights.demo_tokenizer import CONTROL_TOKENS, byte_alphabet
from q27app.weights.hf_config import ARCHITECTURE

HEAD_DIM, ROTARY_DIM, DELTA_DIM, CONV_WIDTH, QUERIES_PER_KEY, VALUES_PER_KEY = 256, 64, 128, 4, 6, 3
SMALLEST_VOCAB = 2048
LIMITS = {"hidden": (256, 1 << 16), "layers": (1, 256), "ffn": (128, 1 << 18), "vocab": (SMALLEST_VOCAB, 1 << 20),
          "kv_heads": (1, 64), "key_heads": (1, 256), "interval": (1, 256), "context": (64, 1 << 22), "mtp": (0, 1)}


@dataclass(frozen=True)
class Size:
    """What a size name stands for; head dimensions and ratios are those of the 27B in every size."""

    name: str
    hidden: int
    layers: int
    ffn: int
    vocab: int
    kv_heads: int
    key_heads: int
    interval: int = 4
    context: int = 262_144
    mtp: int = 1


SIZES = {
    "nano": Size("nano", hidden=256, layers=4, ffn=512, vocab=2560, kv_heads=1, key_heads=2),
    "27b": Size("27b", hidden=5120, layers=64, ffn=17408, vocab=248_320, kv_heads=4, key_heads=16),
}


def parse_size(text: str) -> Size:
    """UsageError for anything but nano, 27b or WxL (width x layers) with `,key=value` for the keys of LIMITS."""
    head, *options = text.lower().split(",")
    match = re.fullmatch(r"(\d{1,6})x(\d{1,3})", head)
    if head in SIZES:
        size = SIZES[head]
    elif match:
        hidden, layers = int(match[1]), int(match[2])
        size = Size(text, hidden, layers, ffn=-(-hidden * 17 // 5 // 128) * 128, vocab=4096,
                    kv_heads=max(1, hidden // 1280), key_heads=max(2, hidden // 320))
    else:
        raise UsageError(
            f"there is no size {text[:80]!r}; expected nano, 27b or WxL, as in 1024x8 or 1024x8,vocab=8192.")
    for option in options:
        key, _, value = option.partition("=")
        if key not in LIMITS or not value.isdecimal() or len(value) > 9:
            raise UsageError(f"size option {option[:80]!r}: expected key=number with one of {', '.join(LIMITS)}.")
        size = replace(size, name=text, **{key: int(value)})
    for key, (low, high) in LIMITS.items():
        if not low <= getattr(size, key) <= high:
            raise UsageError(f"size {text[:80]!r}: {key} is {getattr(size, key)}, expected {low} to {high}.")
    for key in ("hidden", "ffn"):
        if getattr(size, key) % 128:
            raise UsageError(f"size {text[:80]!r}: {key} is {getattr(size, key)}, expected a multiple of 128.")
    return size


def size_metadata(size: Size, name: str) -> dict[str, Any]:
    """`general.*` and `qwen35.*` keys."""
    recurrent = [(index + 1) % size.interval != 0 for index in range(size.layers)]
    values: dict[str, Any] = {
        "block_count": size.layers + size.mtp, "nextn_predict_layers": size.mtp, "context_length": size.context,
        "embedding_length": size.hidden, "feed_forward_length": size.ffn,
        "attention.head_count": QUERIES_PER_KEY * size.kv_heads, "attention.head_count_kv": size.kv_heads,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7, "rope.dimension_count": ROTARY_DIM, "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": CONV_WIDTH, "ssm.state_size": DELTA_DIM, "ssm.group_count": size.key_heads,
        "ssm.time_step_rank": VALUES_PER_KEY * size.key_heads,
        "ssm.inner_size": VALUES_PER_KEY * size.key_heads * DELTA_DIM,
        "attention.recurrent_layers": recurrent + [False] * size.mtp, "full_attention_interval": size.interval,
        "vocab_size": size.vocab,
    }
    general = {"general.architecture": ARCHITECTURE, "general.type": "model", "general.name": name}
    return general | {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


def tokenizer_keys(vocab: int) -> dict[str, Any]:
    """A byte-level tokenizer of `vocab` ids: 256 bytes, fillers that only decode (" t1000"), control tokens."""
    first_control = vocab - len(CONTROL_TOKENS)
    vocabulary = {token: index for index, token in enumerate(byte_alphabet())}
    vocabulary |= {f"\u0120t{index}": index for index in range(256, first_control)}
    ids = {text: first_control + index for index, (text, _) in enumerate(CONTROL_TOKENS)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": ids[text], "content": text, **flags, "special": special} for text, special in CONTROL_TOKENS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocabulary, "merges": []}
    tree = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    return {
        "tokenizer.huggingface.json": json.dumps(tree, ensure_ascii=False, separators=(",", ":")),
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"], "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "q27app.eos_token_ids": [ids["<|im_end|>"], ids["<|endoftext|>"]],
    }
