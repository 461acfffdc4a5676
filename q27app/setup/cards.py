"""Known NVIDIA cards, for planning without one at hand: capability, memory that a fresh driver leaves free, bandwidth.

A card that is present is asked itself (`gpu`); this table only names cards for `q27app plan --gpu` and gives the memory
bandwidth that the driver does not tell. What a card can do follows from its compute capability, never from its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from q27app.errors import UsageError

GIB = 1 << 30
OLDEST = (8, 0)
"""Compute capability of the oldest cards that the kernels are written for."""


@dataclass(frozen=True)
class KnownCard:
    """free_gib: what nvidia-smi shows as free with nothing running. bandwidth: device memory, GB/s."""

    name: str
    capability: tuple[int, int]
    free_gib: float
    bandwidth: int


CARDS = (
    KnownCard("RTX 3060 12GB", (8, 6), 11.6, 360),
    KnownCard("RTX 3080 Ti", (8, 6), 11.6, 912),
    KnownCard("RTX 3090", (8, 6), 23.4, 936),
    KnownCard("RTX 3090 Ti", (8, 6), 23.4, 1008),
    KnownCard("RTX 4060 Ti 16GB", (8, 9), 15.6, 288),
    KnownCard("RTX 4070 Ti SUPER", (8, 9), 15.6, 672),
    KnownCard("RTX 4080 SUPER", (8, 9), 15.6, 736),
    KnownCard("RTX 4090", (8, 9), 23.5, 1008),
    KnownCard("RTX 5060 Ti 16GB", (12, 0), 15.5, 448),
    KnownCard("RTX 5070 Ti", (12, 0), 15.5, 896),
    KnownCard("RTX 5080", (12, 0), 15.5, 960),
    KnownCard("RTX 5090", (12, 0), 31.4, 1792),
    KnownCard("RTX A4000", (8, 6), 15.6, 448),
    KnownCard("RTX A5000", (8, 6), 23.6, 768),
    KnownCard("RTX A6000", (8, 6), 47.5, 768),
    KnownCard("RTX 4000 Ada", (8, 9), 19.5, 360),
    KnownCard("RTX 6000 Ada", (8, 9), 47.5, 960),
    KnownCard("RTX PRO 6000", (12, 0), 95.0, 1792),
    KnownCard("A10", (8, 6), 22.5, 600),
    KnownCard("A30", (8, 0), 23.7, 933),
    KnownCard("A40", (8, 6), 44.9, 696),
    KnownCard("A100 40GB", (8, 0), 39.5, 1555),
    KnownCard("A100 80GB", (8, 0), 79.3, 2039),
    KnownCard("L4", (8, 9), 22.1, 300),
    KnownCard("L40S", (8, 9), 44.5, 864),
    KnownCard("H100 80GB", (9, 0), 79.1, 3350),
    KnownCard("H200", (9, 0), 139.8, 4800),
)


def find_card(text: str) -> KnownCard:
    """The card whose name holds every word of `text`, the shortest such name. Raises UsageError naming the table."""
    words = _words(text)
    found = [card for card in CARDS if words and set(words) <= set(_words(card.name))]
    if not found:
        names = ", ".join(card.name for card in CARDS)
        raise UsageError(f"no card {text[:60]!r} is known.", f"Give --vram GB and --arch instead, or one of: {names}.")
    return min(found, key=lambda card: len(card.name))


def bandwidth_of(name: str) -> int | None:
    """GB/s of the card that a driver calls `name` ("NVIDIA GeForce RTX 3090 Ti"), or None."""
    words = set(_words(name))
    found = [card for card in CARDS if set(_words(re.sub(r"\b\d+GB\b", "", card.name))) <= words]
    return max(found, key=lambda card: len(_words(card.name))).bandwidth if found else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def parse_arch(text: str) -> tuple[int, int]:
    """(8, 6) of "86", "8.6" or "sm_86". Raises UsageError."""
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)", text.strip().lower())
    if match is None:
        raise UsageError(f"architecture {text[:40]!r} is not one.", "Give a compute capability such as 86, 8.9 or sm_120.")
    return int(match[1]), int(match[2])
