"""Builds a constructed checkpoint that answers every chat prompt with one sentence, for tests that need a known answer.

The greedy successor of a token depends on that token alone. Each successor s has a code, a row of the Walsh-Hadamard
matrix (exact, orthogonal, zero-mean, without loss in Q4 and Q8): a token's embedding is the code of its successor plus a
little noise of its own, the head's row s is the code of s. What the layers add to the residual stream is random and too
small to matter, so every operation runs and none decides. Logits are far enough apart that sampling changes nothing.

    tail of the prompt       successor
    "\\n\\n" (no thinking)     first token of the sentence
    "\\n" (after <think>)     </think>, then "\\n\\n"
    a token of the sentence  the next one; after the last, <|im_end|>
    anything else            first token of the sentence

    python -m q27app.weights.demo_model DST --tokenizer FILE     a tokenizer.json, or an earlier one's .q27
    python -m q27app.weights.demo_model DST --train TEXT...      train a new tokenizer on text files
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from q27app.errors import FileFormatError, Q27Error, UsageError
from q27app.weights.codecs import encode
from q27app.weights.container import open_container
from q27app.weights.convert import tier_metadata
from q27app.weights.demo_tokenizer import byte_symbols, train
from q27app.weights.tiers import tier_entries
from q27app.weights.writer import TensorEntry, Writer

SENTENCE = ("Hello! This is the small demo model that comes with q27app: it knows one sentence and says it to everybody, "
            "but the way here was real. Your prompt went through a tokenizer; four layers read every token of your text, "
            "and this answer came back one piece at a time. When you can read it, all parts of the program work together. "
            "Now give it something bigger: convert a checkpoint of your own and serve that instead.")
VOCAB_SIZE = 5888
HIDDEN = 256
FFN = 256
NUM_LAYERS = 4
ATTENTION_LAYER = 3
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM = 2, 1, 256, 64
KEY_HEADS, VALUE_HEADS, DELTA_DIM, CONV_WIDTH = 1, 3, 128, 4
CONTEXT = 65_536
SEED = 27
NOISE = 0.05
"""Of an embedding, against a code of plus and minus one."""
HEAD_SCALE = 0.16
"""Head rows; with a normed stream a successor's logit is HIDDEN * HEAD_SCALE, about 41."""
OTHER_ROWS = 0.02
"""Head rows of tokens that nothing leads to."""
WRITER_SCALE = 0.002
"""Weights that write to the residual stream."""
TIER, GENERATION = "q4s", "3.6"


def build(path: Path, tokenizer: str, overwrite: bool = False) -> None:
    """Write the demo to `path`. tokenizer: tokenizer.json text. Raises FileFormatError if that can't spell the sentence."""
    tree = json.loads(tokenizer)
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    control = {token["content"]: token["id"] for token in tree["added_tokens"]}
    size = max(max(vocabulary.values()), max(control.values())) + 1
    successors = _successors(vocabulary, control, size)
    tensors = _tensors(successors)
    plan = tier_entries(TIER, GENERATION, {name: values.shape for name, values in tensors.items()}, None)
    entries = [TensorEntry(name, dtype, tensors[name].shape) for name, dtype in plan.dtypes.items()]
    metadata = _metadata(tokenizer, control)
    metadata |= tier_metadata(plan, GENERATION, metadata)
    with Writer(path, metadata, entries, overwrite) as writer:
        for entry in entries:
            writer.write(entry.name, *encode(tensors[entry.name].reshape(entry.rows, entry.cols), entry.dtype))


def pieces(text: str) -> list[str]:
    """`text` cut at its spaces, each piece with the space before it; a piece that occurred already takes the next along."""
    found: list[str] = []
    pending = ""
    for word in re.findall(r" ?[^ ]+", text):
        pending += word
        if pending not in found:
            found.append(pending)
            pending = ""
    assert not pending, "the last word occurred before"
    return found


def _successors(vocabulary: Mapping[str, int], control: Mapping[str, int], size: int) -> np.ndarray:
    """int64 [vocabulary]: the token that follows each token."""
    newline, blank_line = vocabulary["\u010a"], vocabulary["\u010a\u010a"]
    missing = [piece for piece in pieces(SENTENCE) if byte_symbols(piece) not in vocabulary]
    if missing:
        raise FileFormatError(f"the tokenizer has no token {missing[0]!r}, a piece of the demo's sentence.",
                              "Train one: python -m q27app.weights.demo_model DST --train TEXT...")
    sentence = [vocabulary[byte_symbols(piece)] for piece in pieces(SENTENCE)]
    successors = np.full(size, sentence[0])
    successors[sentence] = [*sentence[1:], control["<|im_end|>"]]
    successors[newline] = control["</think>"]
    successors[control["</think>"]] = blank_line
    return successors


def _codes(count: int) -> np.ndarray:
    """float32 [count, HIDDEN]: rows 1 .. count of the Walsh-Hadamard matrix (row 0 is constant)."""
    if count >= HIDDEN:
        raise FileFormatError(f"the demo's sentence has {count} successors, its width holds {HIDDEN - 1}.")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < HIDDEN:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix[1:count + 1]


def _tensors(successors: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.Generator(np.random.PCG64(SEED))

    def uniform(rows: int, cols: int, scale: float) -> np.ndarray:
        """Whole numbers scaled: the same on every machine."""
        return random.integers(-1000, 1001, (rows, cols)).astype(np.float32) * np.float32(scale / 1000)

    vocab = len(successors)
    targets, code_of = np.unique(successors, return_inverse=True)
    codes = _codes(len(targets))
    head = uniform(vocab, HIDDEN, OTHER_ROWS)
    head[targets] = codes * np.float32(HEAD_SCALE)
    tensors = {"token_embd.weight": codes[code_of] + uniform(vocab, HIDDEN, NOISE),
               "output_norm.weight": np.ones(HIDDEN, np.float32), "output.weight": head}
    spread = (3.0 / HIDDEN) ** 0.5  # keeps the variance of what it multiplies
    for index in range(NUM_LAYERS):
        block = f"blk.{index}."
        tensors |= {
            block + "attn_norm.weight": np.ones(HIDDEN, np.float32),
            block + "post_attention_norm.weight": np.ones(HIDDEN, np.float32),
            block + "ffn_gate.weight": uniform(FFN, HIDDEN, spread),
            block + "ffn_up.weight": uniform(FFN, HIDDEN, spread),
            block + "ffn_down.weight": uniform(HIDDEN, FFN, WRITER_SCALE),
        }
        if index == ATTENTION_LAYER:
            width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
            tensors |= {
                block + "attn_q.weight": uniform(2 * width, HIDDEN, spread),
                block + "attn_k.weight": uniform(kv_width, HIDDEN, spread),
                block + "attn_v.weight": uniform(kv_width, HIDDEN, spread),
                block + "attn_output.weight": uniform(HIDDEN, width, WRITER_SCALE),
                block + "attn_q_norm.weight": np.ones(HEAD_DIM, np.float32),
                block + "attn_k_norm.weight": np.ones(HEAD_DIM, np.float32),
            }
        else:
            width = VALUE_HEADS * DELTA_DIM
            channels = 2 * KEY_HEADS * DELTA_DIM + width
            tensors |= {
                block + "attn_qkv.weight": uniform(channels, HIDDEN, spread),
                block + "attn_gate.weight": uniform(width, HIDDEN, spread),
                block + "ssm_beta.weight": uniform(VALUE_HEADS, HIDDEN, spread),
                block + "ssm_alpha.weight": uniform(VALUE_HEADS, HIDDEN, spread),
                block + "ssm_a": np.full(VALUE_HEADS, -0.25, np.float32),
                block + "ssm_dt.bias": np.zeros(VALUE_HEADS, np.float32),
                block + "ssm_conv1d.weight": uniform(channels, CONV_WIDTH, 0.5),
                block + "ssm_norm.weight": np.ones(DELTA_DIM, np.float32),
                block + "ssm_out.weight": uniform(HIDDEN, width, WRITER_SCALE),
            }
    return tensors


def _metadata(tokenizer: str, control: Mapping[str, int]) -> dict[str, Any]:
    is_recurrent = [index != ATTENTION_LAYER for index in range(NUM_LAYERS)]
    return {
        "general.architecture": "qwen35",
        "general.name": "q27app demo",
        "qwen35.block_count": NUM_LAYERS,
        "qwen35.nextn_predict_layers": 0,
        "qwen35.context_length": CONTEXT,
        "qwen35.embedding_length": HIDDEN,
        "qwen35.feed_forward_length": FFN,
        "qwen35.attention.head_count": NUM_HEADS,
        "qwen35.attention.head_count_kv": NUM_KV_HEADS,
        "qwen35.attention.key_length": HEAD_DIM,
        "qwen35.attention.value_length": HEAD_DIM,
        "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen35.attention.recurrent_layers": is_recurrent,
        "qwen35.full_attention_interval": ATTENTION_LAYER + 1,
        "qwen35.rope.freq_base": 1e7,
        "qwen35.rope.dimension_count": ROTARY_DIM,
        "qwen35.ssm.conv_kernel": CONV_WIDTH,
        "qwen35.ssm.state_size": DELTA_DIM,
        "qwen35.ssm.group_count": KEY_HEADS,
        "qwen35.ssm.time_step_rank": VALUE_HEADS,
        "qwen35.ssm.inner_size": VALUE_HEADS * DELTA_DIM,
        "tokenizer.huggingface.json": tokenizer,
        "tokenizer.ggml.eos_token_id": control["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": control["<|endoftext|>"],
    }


def _read_tokenizer(path: Path) -> str:
    if path.suffix == ".q27":
        with open_container(path) as container:
            return str(container.metadata["tokenizer.huggingface.json"])
    return path.read_text(encoding="utf-8")


def main(arguments: list[str]) -> None:
    """DST (--tokenizer FILE | --train TEXT...)."""
    if len(arguments) < 3 or arguments[1] not in ("--tokenizer", "--train"):
        raise UsageError("expected DST --tokenizer FILE, or DST --train TEXT...", "See the head of demo_model.py.")
    files = [Path(name) for name in arguments[2:]]
    is_training = arguments[1] == "--train"
    if is_training:
        tokenizer = train([file.read_text(encoding="utf-8") for file in files], VOCAB_SIZE, pieces(SENTENCE))
    else:
        tokenizer = _read_tokenizer(files[0])
    build(Path(arguments[0]), tokenizer, overwrite=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Q27Error as problem:
        sys.exit(str(problem))
