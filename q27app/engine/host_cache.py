"""States and their KV blocks in host memory: where the end of a conversation goes when its blocks are needed on the device.

    entry     all tokens of a state, its recurrent part, its blocks in pieces of PIECE blocks
    piece     bytes of blocks that follow each other; entries that begin alike share the pieces that they have in common, so the
              next turn of a conversation costs what it adds

One budget of bytes for all; the least recently used entry goes first. The bytes are those that prefill computed, so a
state from here is as good as one that never left. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.kernels.batch import BLOCK_POSITIONS

PIECE = 16
MIN_TOKENS = 512
"""Shorter states are computed as quickly."""


@dataclass(eq=False)
class HostEntry:
    """tokens: int32 [n], n a multiple of 64. slot: uint8 [slot_bytes]. pieces: uint8 [at most PIECE, block_bytes] each."""

    tokens: np.ndarray
    slot: np.ndarray
    pieces: list[np.ndarray]
    is_shared: bool
    """Many conversations begin with it."""
    used: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def begins_with(tokens: np.ndarray, start: np.ndarray) -> bool:
    """Whether `tokens` begins with all of `start`; looks at its last block first."""
    size = len(start)
    return (size <= len(tokens) and np.array_equal(tokens[max(0, size - BLOCK_POSITIONS):size], start[-BLOCK_POSITIONS:])
            and np.array_equal(tokens[:size], start))


class HostCache:
    """budget: most bytes of all entries. min_tokens: shorter states are not kept. piece: blocks of one."""

    def __init__(self, budget: int, min_tokens: int = MIN_TOKENS, piece: int = PIECE) -> None:
        self._budget, self._min_tokens, self.piece = budget, min_tokens, piece
        self._entries: list[HostEntry] = []
        self._clock = 0
        self.num_kept = self.num_used = self.num_evicted = 0

    @property
    def num_bytes(self) -> int:
        """Of all entries; a piece that several share counts once. Any thread."""
        return _bytes_of(list(self._entries), [])

    def deepest(self, prompt: np.ndarray, least: int) -> HostEntry | None:
        """The longest entry of at least `least` tokens and fewer than the prompt that it begins with."""
        fitting = [entry for entry in self._entries if least <= entry.num_tokens < len(prompt)]
        for entry in sorted(fitting, key=lambda entry: -entry.num_tokens):
            if begins_with(prompt, entry.tokens):
                self._touch(entry)
                return entry
        return None

    def wants(self, tokens: np.ndarray) -> bool:
        """Whether a state is long enough and no entry goes on from it or is it."""
        return len(tokens) >= self._min_tokens and not any(begins_with(entry.tokens, tokens) for entry in self._entries)

    def holds(self, num_bytes: int) -> bool:
        """Whether an entry of so many bytes, its whole pieces counted, is within the budget."""
        return num_bytes <= self._budget

    def make_room(self, tokens: np.ndarray, slot_bytes: int, block_bytes: int, evicts: bool = True) -> list[np.ndarray] | None:
        """Let entries go until one of these tokens, which the budget `holds`, fits beside the others: first those of the same
        conversation some turns ago. The pieces that it need not copy, from its beginning on. evicts: else None, and none goes, where
        entries of other conversations would have to."""
        pieces = self._common_pieces(tokens)
        room = self._budget - slot_bytes - (len(tokens) // BLOCK_POSITIONS - self.piece * len(pieces)) * block_bytes
        left = [entry for entry in self._entries if entry.is_shared or not begins_with(tokens, entry.tokens)]
        if not evicts and _bytes_of(left, pieces) > room:
            return None
        while _bytes_of(left, pieces) > room:
            left.remove(min(left, key=lambda entry: entry.used))
            self.num_evicted += 1
        self._entries = left
        return pieces

    def keep(self, tokens: np.ndarray, slot: np.ndarray, export: Callable[[int, int], np.ndarray], block_bytes: int,
             is_shared: bool = False) -> bool:
        """Keep a state if the budget holds it. slot: becomes ours. export(start, stop): bytes of those of its blocks."""
        num_blocks = len(tokens) // BLOCK_POSITIONS
        if not self.holds(slot.nbytes + num_blocks * block_bytes):
            return False
        pieces = self.make_room(tokens, slot.nbytes, block_bytes) or []
        for start in range(self.piece * len(pieces), num_blocks, self.piece):
            pieces.append(export(start, min(start + self.piece, num_blocks)))
        entry = HostEntry(tokens, slot, pieces, is_shared)
        self._entries.append(entry)
        self._touch(entry)
        self.num_kept += 1
        return True

    def _common_pieces(self, tokens: np.ndarray) -> list[np.ndarray]:
        """The longest run of whole pieces that an entry has of these tokens."""
        best, size = [], self.piece * BLOCK_POSITIONS
        for entry in self._entries:
            most = min(len(tokens), entry.num_tokens) // size
            if most > len(best):
                different = np.flatnonzero(entry.tokens[:most * size] != tokens[:most * size])
                count = int(different[0]) // size if len(different) else most
                best = entry.pieces[:count] if count > len(best) else best
        return list(best)

    def _touch(self, entry: HostEntry) -> None:
        self._clock += 1
        entry.used = self._clock

    def clear(self) -> None:
        self._entries.clear()

    def to_dict(self) -> dict[str, Any]:
        """For /status."""
        return {"entries": len(self._entries), "bytes": self.num_bytes, "kept": self.num_kept, "used": self.num_used,
                "evicted": self.num_evicted}


def _bytes_of(entries: list[HostEntry], more: list[np.ndarray]) -> int:
    """Of these entries and some more pieces, each once."""
    pieces = {id(piece): piece.nbytes for group in (more, *(entry.pieces for entry in entries)) for piece in group}
    return sum(pieces.values()) + sum(entry.slot.nbytes for entry in entries)
