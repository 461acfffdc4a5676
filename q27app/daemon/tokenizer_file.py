"""Where a model's tokenizer comes from: what is named, else the model's own, else a file beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q27app.chat.tokenizer import Tokenizer
from q27app.errors import FileFormatError

_OWN = ("tokenizer.huggingface.json", "tokenizer.ggml.tokens")


def open_tokenizer(model: Path, named: str = "", metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model file, or of a tokenizer.json or .tok file in its place.

    named: a file to take instead. metadata: the model's, where it has been read. Raises FileFormatError if there is none.
    """
    path = Path(named).expanduser() if named else model
    if path.suffix in (".json", ".tok"):
        return Tokenizer.from_file(path)
    metadata = read_metadata(path) if metadata is None or named else metadata
    if any(key in metadata for key in _OWN):
        return Tokenizer.from_metadata(metadata)
    beside = [path.with_suffix(".tok"), path.with_name(path.stem + ".tokenizer.json")]
    found = next((candidate for candidate in beside if candidate.is_file()), None)
    if found is None:
        raise FileFormatError(
            f"{path}: the model carries no tokenizer, and none lies beside it.",
            f"Put {beside[0].name} or {beside[1].name} there, or set model.tokenizer.",
        )
    return Tokenizer.from_file(found)


def read_metadata(path: Path) -> Mapping[str, Any]:
    """Metadata of a .q27 or GGUF file."""
    if path.suffix == ".gguf":
        from q27app.weights.gguf_file import open_gguf

        with open_gguf(path) as source:
            return source.metadata
    from q27app.weights.container import open_container

    with open_container(path) as container:
        return dict(container.metadata)
