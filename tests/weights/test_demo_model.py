"""The constructed model of one sentence that other tests serve, the bundled trained model's file, and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from q27app.chat.tokenizer import Tokenizer
from q27app.errors import FileFormatError, UsageError
from q27app.paths import demo_model
from q27app.weights.container import open_container
from q27app.weights.demo_model import CONTEXT, SENTENCE, build, pieces
from q27app.weights.demo_tokenizer import train

REPOSITORY = Path(__file__).resolve().parents[2]


DEMO_SHA256 = "14eb609a7e80224cb65fa83ed1eb2494f66bc7702be80a2b8d708403042359a0"
"""Of the bundled model; `training/README.md` says how it is made."""


@pytest.fixture(scope="module")
def constructed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "constructed.q27"
    build(path, train([SENTENCE, SENTENCE, "a\n\n" * 30], 440, pieces(SENTENCE)))
    return path


@pytest.fixture(scope="module")
def demo(constructed):
    with open_container(constructed) as container:
        yield container


@pytest.fixture(scope="module")
def bundled():
    with open_container(demo_model()) as container:
        yield container


@pytest.fixture(scope="module")
def tokenizer(demo) -> Tokenizer:
    return Tokenizer.from_metadata(demo.metadata)


def follow(demo, tokenizer: Tokenizer, tail: str) -> str:
    """Text after `tail` if embedding and head alone decided, which is what the layers must not change."""
    embedding, head = demo.tensors["token_embd.weight"].values(), demo.tensors["output.weight"].values()
    token, ids = tokenizer.encode(tail, control=True)[-1], []
    while len(ids) < 200:
        hidden = embedding[token] / np.sqrt(np.mean(embedding[token] ** 2))
        logits = head @ hidden
        token = int(np.argmax(logits))
        assert np.sort(logits)[-2] < logits[token] - 30, "sampling at temperature 1 must not change the text"
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError("no end of text")


@pytest.mark.parametrize("tail, expected", [
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", SENTENCE),
    ("<|im_start|>assistant\n<think>\n", "</think>\n\n" + SENTENCE),
    ("Once upon", SENTENCE),
])
def test_every_tail_leads_to_the_sentence(demo, tokenizer, tail, expected):
    assert follow(demo, tokenizer, tail) == expected


def test_a_coding_agents_first_prompt_fits_30000_tokens(bundled):
    tokenizer = Tokenizer.from_metadata(bundled.metadata)
    schema = {"type": "object", "properties": {
        "file_path": {"type": "string", "description": "The absolute path of the file to read, never a relative one."},
        "limit": {"type": "integer", "description": "How many lines to return; leave it out to read the whole file."},
    }, "required": ["file_path"], "additionalProperties": False}
    tools = [{"name": f"Tool{index}", "description": "Reads a file from the local file system and returns its lines with "
              "numbers. If the user asks for a screenshot, open it with this tool too.", "input_schema": schema}
             for index in range(50)]
    code = [path.read_text() for path in sorted((REPOSITORY / "q27app").glob("*.py"))]
    text = (json.dumps(tools) + json.dumps(tools, indent=2))[:38_000] + "".join(code)[:38_000]
    assert len(text) == 76_000
    assert len(tokenizer.encode(text)) <= 30_000


def test_the_builder_writes_the_same_file_again(constructed, demo, tmp_path):
    build(tmp_path / "again.q27", demo.metadata["tokenizer.huggingface.json"])
    assert (tmp_path / "again.q27").read_bytes() == constructed.read_bytes()


def test_the_bundled_file_is_the_one_that_was_measured():
    assert hashlib.sha256(demo_model().read_bytes()).hexdigest() == DEMO_SHA256


def test_the_bundled_model_is_small_and_its_window_is_65536(bundled):
    assert demo_model().stat().st_size <= 16_000_000
    assert bundled.metadata["qwen35.context_length"] == CONTEXT == 65_536
    assert bundled.metadata["qwen35.nextn_predict_layers"] == 1


def test_pieces_never_repeat_and_make_up_the_text():
    found = pieces("the cat and the dog and the bird.")
    assert found == ["the", " cat", " and", " the", " dog", " and the", " bird."]


def test_training_is_repeatable_and_fills_the_vocabulary():
    text = ["a rose is a rose is a rose, said the prose of the rose"] * 3
    first = train(text, 283, ["unmade word"])
    assert first == train(text, 283, ["unmade word"])
    tree = json.loads(first)
    assert len(tree["model"]["vocab"]) + len(tree["added_tokens"]) == 283
    assert "\u0120rose" in tree["model"]["vocab"]
    assert "unmade\u0120word" in tree["model"]["vocab"]


def test_too_little_text_is_refused():
    with pytest.raises(UsageError, match="merges"):
        train(["short"], 400)


def test_a_tokenizer_without_the_sentence_is_refused(tmp_path):
    tokenizer = train(["some words and some more words, then some words\n\nand more\n\n"] * 3, 280)
    with pytest.raises(FileFormatError, match="piece"):
        build(tmp_path / "demo.q27", tokenizer)
