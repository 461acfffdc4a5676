"""Texts as token ids: what networks are compared on. A document is one text, read from position 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from q27app.errors import UsageError

if TYPE_CHECKING:
    from q27app.chat.tokenizer import Tokenizer

MAX_FILE_BYTES = 256 << 20
MAX_DOCUMENTS = 100_000


@dataclass(frozen=True)
class Document:
    """One text. At least two tokens, or there is nothing to predict."""

    name: str
    tokens: tuple[int, ...]

    @property
    def following(self) -> np.ndarray:
        """int64 [n]: the next token of each position, -1 after the last."""
        return np.asarray([*self.tokens[1:], -1], np.int64)


def fingerprint(documents: Sequence[Document]) -> str:
    """Names a corpus by its ids."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.asarray(document.tokens, np.int32).tobytes() + b"|")
    return digest.hexdigest()[:16]


def from_texts(paths: Sequence[str], tokenizer: Tokenizer, size: int) -> list[Document]:
    """Files of text, each cut into documents of `size` tokens; what remains after the last whole one counts too."""
    found: list[Document] = []
    for path in paths:
        ids = tokenizer.encode(_read(path).decode("utf-8", errors="replace"))
        found += [Document(f"{Path(path).name}:{start}", tuple(ids[start:start + size])) for start in range(0, len(ids), size)]
    return found


def from_tokens(paths: Sequence[str]) -> list[Document]:
    """Files of JSON lines, each an array of ids or an object with "tokens" and maybe "name"; or one line of ids with commas."""
    found: list[Document] = []
    for path in paths:
        for number, line in enumerate(_read(path).splitlines(), 1):
            if line.strip():
                found.append(_from_line(line, f"{Path(path).name}:{number}", f"{path}:{number}"))
    return found


def _from_line(line: bytes, name: str, where: str) -> Document:
    try:
        value: Any = json.loads(line if line.lstrip()[:1] in (b"[", b"{") else b"[" + line + b"]")
    except ValueError as error:
        raise UsageError(f"{where}: neither JSON nor ids with commas.", 'Such as {"tokens": [1, 2, 3]}.') from error
    if isinstance(value, dict):
        name, value = str(value.get("name", name))[:200], value.get("tokens")
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise UsageError(f"{where}: expected an array of token ids.", 'Such as {"tokens": [1, 2, 3]}.')
    return Document(name, tuple(value))


def held_out(tokenizer: Tokenizer, metadata: Any, split: str = "held") -> list[Document]:
    """The bundled model's held-out conversations with the expected answer, as its template renders them, the tasks in turn."""
    from itertools import zip_longest

    from q27app.bench.demo_eval import load_cases
    from q27app.bench.demo_probe import answered
    from q27app.chat.template import open_template

    template = open_template(metadata, tokenizer)
    by_task: dict[str, list[Document]] = {}
    for number, case in enumerate(case for case in load_cases() if case.split == split):
        rendered = template.render(answered(case).request, case.thinking)
        by_task.setdefault(case.task, []).append(Document(f"{case.task}:{number}", tuple(rendered.tokens[:rendered.stable_len])))
    return [document for group in zip_longest(*by_task.values()) for document in group if document is not None]


def bounded(documents: Sequence[Document], vocab_size: int, max_tokens: int, window: int) -> list[Document]:
    """Documents of 2 to `window` tokens (longer ones cut), in order, until `max_tokens`. Raises UsageError for ids that the
    vocabulary lacks, or where nothing is left."""
    found, total = [], 0
    for document in documents[:MAX_DOCUMENTS]:
        bad = next((token for token in document.tokens if token >= vocab_size), None)
        if bad is not None:
            raise UsageError(f"{document.name}: token id {bad} is outside the vocabulary of {vocab_size}.",
                             "The ids belong to another tokenizer.")
        tokens = document.tokens[:min(window, max_tokens - total)]
        if len(tokens) >= 2:
            found.append(Document(document.name, tokens))
            total += len(tokens)
        if total >= max_tokens - 1:
            break
    if not found:
        raise UsageError("the corpus holds no text of two tokens.", "Give --text, --tokens or --held-out.")
    return found


def _read(path: str) -> bytes:
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB.", "Give a part of it.")
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from error
