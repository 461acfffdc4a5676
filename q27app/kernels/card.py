"""What a card can do, and what the kernels are built for on it: features by capability, never by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from q27app.errors import UsageError

AMPERE_SHARED = 99 * 1024
AMPERE_THREADS = 1536
BLOCK_SHARED = 1024
PROMPT_CUT, FIRST_CUTS = 4096, 8
MAX_CONTEXT = 655_360
"""Longest window that scratch is made for."""

SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}
"""Most shared memory of a block, KiB, by compute capability."""


@dataclass(frozen=True)
class Card:
    """capability: of the target the kernels are compiled for. shared_bytes: most shared memory of a block."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int
    max_threads: int = 2048
    """Threads of a multiprocessor."""
    forced: bool = False
    """Built as PTX for an older capability than the card's own."""

    @property
    def target(self) -> str:
        number = f"{self.capability[0]}{self.capability[1]}" + "a" * self.has_warpgroups
        return f"compute_{number}" if self.forced else f"sm_{number}"

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_warpgroups(self) -> bool:
        """Matrix instructions of four warps; they are of this very capability."""
        return self.capability in WARPGROUP_KINDS and not self.forced

    @property
    def is_wide(self) -> bool:
        """Enough shared memory for 16 rows in one pass."""
        return self.shared_bytes >= 200 * 1024

    @property
    def sm_shared(self) -> int:
        """Shared memory that the blocks of a multiprocessor divide; each takes BLOCK_SHARED of it beside its own."""
        return self.shared_bytes + BLOCK_SHARED

    @property
    def row_ring(self) -> int:
        """Units of 3 to 8 rows that a warp of the row family has on their way through shared memory (row_ring.cuh)."""
        return 4 if self.is_wide else 2

    def linear_tiles_defines(self) -> dict[str, int]:
        return {"WARPGROUPS": int(self.has_warpgroups), "TILE_SHARED": self.sm_shared}

    def attend_defines(self) -> dict[str, int]:
        """Cuts of the keys: fixed positions, chosen per card; CUT_n up to BORDER_n."""
        if self.is_wide:
            cuts = {"CUT_0": 128, "BORDER_0": 4096, "CUT_1": 512, "BORDER_1": 65536, "CUT_2": 1024}
        else:
            cuts = {"CUT_0": 128, "BORDER_0": 2048, "CUT_1": 512, "BORDER_1": 32768, "CUT_2": 2048}
        return cuts | {"BORDER_2": 1 << 18, "CUT_3": 8192, "WIDE": int(self.is_wide)}

    def prompt_defines(self) -> dict[str, int]:
        """Cuts of the keys in prefill, at fixed positions: FIRST_CUTS of KEY_CUT keys, then of twice as many."""
        return {"KEY_CUT": PROMPT_CUT, "FIRST_CUTS": FIRST_CUTS}

    def attend_blocks(self, item_rows: int) -> int:
        """Blocks of the split attention that registers allow on a multiprocessor (__launch_bounds__ in attend_decode.cu)."""
        return {1: 4, 4: 3, 8: 2 if self.is_wide or self.has_warpgroups else 1, 16: 1}[item_rows]


WARPGROUP_KINDS: frozenset[tuple[int, int]] = frozenset({(9, 0)})
"""Capabilities whose warpgroup matrix instructions are used."""


def card_of(capability: str) -> Card:
    """A card of a kind, to compile for: "86". Its multiprocessors are not known. Raises UsageError."""
    kinds = {f"{major}{minor}": (major, minor) for major, minor in SHARED_KIB}
    if capability not in kinds:
        raise UsageError(f"There is no kind of card {capability[:20]!r}, expected one of {', '.join(kinds)}.")
    kind = kinds[capability]
    few = kind[0] >= 12 or kind in ((8, 6), (8, 9))
    return Card(f"compute capability {kind[0]}.{kind[1]}", kind, 0, SHARED_KIB[kind] * 1024, AMPERE_THREADS if few else 2048)


def forced_card(card: Card, capability: str | None) -> Card:
    """The card as one of an older kind: "86" gives compute_86 code, no fp8, 99 KiB of shared memory a block."""
    if not capability:
        return card
    if capability != "86":
        raise UsageError(f"Architecture {capability!r} cannot be forced, expected 86.")
    return Card(card.name, (8, 6), card.num_sms, min(card.shared_bytes, AMPERE_SHARED), AMPERE_THREADS, True)


def cut_count(defines: Mapping[str, int], keys: int) -> int:
    """Cuts that hold `keys` keys (attend_decode.cu)."""
    total, low = 0, 0
    for name, high in (("CUT_0", defines["BORDER_0"]), ("CUT_1", defines["BORDER_1"]), ("CUT_2", defines["BORDER_2"]), ("CUT_3", keys)):
        total += -(-max(0, min(keys, high) - low) // defines[name])
        low = high
    return total
