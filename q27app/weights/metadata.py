"""The JSON object in a `.q27` header: strict, bounded parsing and the one way it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from q27app.errors import FileFormatError

MAX_METADATA_BYTES = 48 << 20
"""A tokenizer.json of 250,000 tokens needs about 25 MiB as a JSON string."""

MAX_COMMAS = 2_000_000
MAX_BRACKETS = 1_000_000
"""Of the whole text, inside strings too: they bound what the parser builds from a hostile text, and its time.

A tokenizer of 250,000 tokens and merges has 750,000 commas and 250,000 brackets.
"""

_DAMAGED = "The file is damaged or incomplete; download or convert it again."


def parse_metadata(text: bytes, file: str) -> dict[str, Any]:
    """The object in `text`. FileFormatError, naming `file`, for anything that is not strict JSON in UTF-8.

    Refused beyond the grammar: a key that occurs twice in an object, NaN and infinities (also as an overflowing
    number), unpaired surrogates, more values than the limits above.
    """
    brackets = text.count(b"[") + text.count(b"{")
    for kind, count, limit in (("commas", text.count(b","), MAX_COMMAS), ("brackets", brackets, MAX_BRACKETS)):
        if count > limit:
            raise FileFormatError(f"{file}: the metadata has {count} {kind}, expected at most {limit}.", _DAMAGED)
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
        if b"\\u" in text:
            _refuse_surrogates(value)
    except RecursionError:
        raise FileFormatError(f"{file}: the metadata is nested too deeply.", _DAMAGED) from None
    except UnicodeDecodeError as problem:
        raise FileFormatError(
            f"{file}: the metadata is not UTF-8 (byte {problem.start}: {problem.reason}).", _DAMAGED
        ) from None
    except (ValueError, UnicodeEncodeError) as problem:
        raise FileFormatError(f"{file}: the metadata is not valid JSON: {problem}.", _DAMAGED) from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{file}: the metadata is a JSON {type(value).__name__}, expected an object.", _DAMAGED)
    return value


def format_metadata(metadata: Mapping[str, Any], file: str) -> bytes:
    """`metadata` as compact JSON in UTF-8, keys in order. FileFormatError for what JSON or the limits cannot hold."""
    try:
        text = json.dumps(
            dict(metadata), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
        ).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as problem:
        raise FileFormatError(f"{file}: the metadata cannot be written as JSON: {problem}.") from problem
    if len(text) > MAX_METADATA_BYTES:
        raise FileFormatError(f"{file}: {len(text)} bytes of metadata, expected at most {MAX_METADATA_BYTES}.")
    parse_metadata(text, file)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} does not fit a double")
    return value


def _refuse_surrogates(value: Any) -> None:
    """UnicodeEncodeError (a ValueError) if a string holds half a surrogate pair, which no UTF-8 output could carry."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            item.encode("utf-8")
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
