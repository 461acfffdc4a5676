"""How a prompt's attention is cut into blocks: by tiles of rows, and by cuts of the keys where few tiles would leave most of the card idle.

Keys are cut at fixed positions (`Card.prompt_defines`), and the cuts of a row merged in ascending order: by the block that takes all of them, or,
where each block takes one, by a kernel behind it. The sums are the same, so that how a pass is cut changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from q27app.kernels.batch import Batch

QUERIES = 128
"""Lines of a block: a row of a head, or the rows' heads of a key head."""
MERGED_PRICE = 1.12
"""What a cut takes whose sums are written, and merged by another kernel, against one whose sums stay with their block: 1 to 1.08 on an H200, more where memory is slower."""
MORE_LAUNCHES = 6
"""Numbers of launches that are considered."""


@dataclass(frozen=True)
class PromptPlan:
    """tiles: of rows, each for `heads` heads or key heads. cuts: of the longest row. at_once: cuts of a launch, a block each; 0: blocks take all."""

    tiles: int
    heads: int
    cuts: int
    at_once: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles, self.heads, self.at_once or 1

    @property
    def launches(self) -> range:
        """The first cut of each."""
        return range(0, self.cuts, self.at_once or self.cuts)


def cut_of(defines: Mapping[str, int], position: int) -> int:
    """The cut that holds a position (attend_prefill.cu). defines: `Card.prompt_defines`."""
    size, count = defines["KEY_CUT"], defines["FIRST_CUTS"]
    return position // size if position < count * size else count + (position - count * size) // (2 * size)


def cut_begin(defines: Mapping[str, int], cut: int) -> int:
    """Its first position."""
    return defines["KEY_CUT"] * (cut + max(0, cut - defines["FIRST_CUTS"]))


def part_places(geometry, rows: int, cuts: int, start: int = 0) -> tuple[int, int, int, int]:
    """Addresses of what rows found in so many cuts (Attend's part_o), of totals and of part_ml, from `start` on; and where they end."""
    heads = rows * geometry.num_heads
    totals = start + 4 * heads * geometry.head_dim * cuts
    return start, totals, totals + 8 * heads, totals + 8 * heads * (1 + cuts)


def tile_grid(geometry, batch: Batch, shares: bool) -> tuple[int, int]:
    """(tiles of rows, heads that each is for, or key heads if a key head's queries share a tile)."""
    lines = QUERIES // (geometry.num_heads // geometry.num_kv_heads if shares else 1)
    return int((-(-np.diff(batch.row_starts) // lines)).sum()), geometry.num_kv_heads if shares else geometry.num_heads


def prompt_plan(card, geometry, batch: Batch, room: int) -> PromptPlan:
    """The quickest way. room: bytes for what the cuts of rows give, before they are merged."""
    defines, rows = card.prompt_defines(), batch.num_rows
    tiles, heads = min((tile_grid(geometry, batch, shares) for shares in (False, True)), key=prod)
    end = int(batch.positions[batch.row_starts[1:] - 1].max()) + 1
    cuts = cut_of(defines, end - 1) + 1
    blocks, none, one = tiles * heads, part_places(geometry, rows, 0)[-1], part_places(geometry, rows, 1)[-1]
    fitting = min(cuts, (room - none) // (one - none))
    if cuts == 1 or fitting < 1:
        return PromptPlan(tiles, heads, cuts, 0)
    borders = [*(cut_begin(defines, cut) for cut in range(cuts)), end]

    def merged(at_once: int) -> float:
        """Keys that the card goes through meanwhile, one block a multiprocessor."""
        total = 0.0
        for first in range(0, cuts, at_once):
            stop = min(first + at_once, cuts)
            longest = max(borders[first + 1] - borders[first], borders[stop] - borders[stop - 1])
            total += max(longest, blocks * (borders[stop] - borders[first]) / card.num_sms + longest / 2)   # the last ones end one after the other
        return MERGED_PRICE * total

    fewest = -(-cuts // fitting)
    at_once = min((-(-cuts // launches) for launches in range(fewest, fewest + MORE_LAUNCHES)), key=merged)
    return PromptPlan(tiles, heads, cuts, at_once if merged(at_once) < -(-blocks // card.num_sms) * end else 0)
