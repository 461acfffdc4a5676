"""Trains the demo model's tokenizer: byte-level BPE, 4,096 ids, the family's control tokens last, digits single, words
with the same ids whatever sign or blank stands before them: what is copied from a request into JSON is then the same ids.

    python training/tokenizer.py OUT.json [--size 4096] [--seed 1]

Text: a sample of the curriculum, this repository's code and documents, and Python's own language reference and docstrings for
ordinary English. The trainer is q27app's (`q27app.weights.demo_tokenizer`), in plain Python; same text, same tokenizer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from curriculum.mix import conversation  # noqa: E402
from curriculum.pools import repository_lines  # noqa: E402
from q27app.weights.demo_tokenizer import train  # noqa: E402

DOCUMENTED = ("argparse", "collections", "csv", "datetime", "decimal", "email.message", "functools", "http.client", "inspect",
              "itertools", "json", "logging", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "string",
              "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "typing", "unittest", "urllib.parse")
JOINED = ("the", "of", "and", "is", "was", "that", "with", "this", "to")
"""Too frequent to spend an id on the blank before them; they begin few other words."""
SAMPLE_CHARS = {256: 500_000, 512: 900_000, 2048: 400_000}


def curriculum_text(seed: int) -> Iterator[str]:
    """Conversations of a few lengths, contents only: what the templates write is short and always there."""
    rng = random.Random(seed)
    for length, wanted in SAMPLE_CHARS.items():
        size = 0
        while size < wanted:
            found = conversation(rng, length)
            texts = [found.system or "", *(step.text for step in found.steps), *(step.reasoning or "" for step in found.steps)]
            texts += [json.dumps(tool, sort_keys=True, separators=(",", ":")) for tool in found.tools]
            texts += [json.dumps(call["arguments"], separators=(",", ":")) for step in found.steps for call in step.calls]
            size += sum(map(len, texts))
            yield "\n".join(texts)


def reference_text() -> Iterator[str]:
    """Python's language reference and docstrings of its library."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for name in DOCUMENTED:
        module = __import__(name, fromlist=["_"])
        yield from filter(None, (inspect.getdoc(item) for item in vars(module).values() if callable(item) or inspect.ismodule(item)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    texts = [*curriculum_text(options.seed), "\n".join(repository_lines()), *reference_text()]
    options.out.write_text(train(texts, options.size, joined=JOINED), encoding="utf-8")
    print(f"{options.out}: {options.size} ids from {sum(map(len, texts)) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
