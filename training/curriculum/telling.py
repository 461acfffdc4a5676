"""Whether a request tells which of the declared tools it means: by words of it that no other declaration has as many of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

UNTELLING = frozenset("a an the one this that of in to for and with is what how or by on at".split())


@lru_cache(1 << 16)
def _stem(part: str) -> str:
    return re.sub(r"(?<=..)(e|s|es|ed|ing)$", "", part)


def telling_words(text: str) -> set[str]:
    """Lower-case words of a text or an identifier, plural and verb endings off, those that tell nothing left out."""
    return {_stem(part.lower()) for part in re.findall(r"[A-Z]?[a-z]+", text) if part.lower() not in UNTELLING}


def tool_words(tool: Mapping[str, Any]) -> set[str]:
    """Words of a declaration: of the name, the description and the parameters' names."""
    function = tool["function"]
    return telling_words(" ".join([function["name"], function["description"], *function["parameters"]["properties"]]))


def tells(text: str, values: Iterable[Any], called: set[str], others: Iterable[set[str]]) -> bool:
    """Whether a request with these values has more words of the called tool than of each other one, words of the values aside."""
    said = telling_words(text) - telling_words(" ".join(value for value in values if isinstance(value, str)))
    own = len(said & called)
    return all(len(said & words) < own for words in others)
