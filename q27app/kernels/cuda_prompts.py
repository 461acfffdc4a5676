"""How a prompt's attention is cut into blocks: by tiles of rows, and by cuts of the keys where few tiles would leave most of the card idle.

Keys are cut at fixed positions (`Card.prompt_defines`), and the cuts of a row merged in ascending order: by the block that takes all of them, or,
where each block takes one, by a kernel behind it. The sums are the same, so that how a pass is cut changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def part_bytes(geometry) -> int:
    """Of what a row's heads found in a cut."""
    return geometry.num_heads * (geometry.head_dim + 2) * 4


def prompt_plan(card, geometry, batch: Batch, room: int) -> PromptPlan:
    """The quickest way. room: bytes for what the cuts of rows give, before they are merged."""
    defines, lengths, group = card.prompt_defines(), np.diff(batch.row_starts), geometry.num_heads // geometry.num_kv_heads
    alone, shared = (int((-(-lengths // rows)).sum()) for rows in (QUERIES, QUERIES // group))
    tiles, heads = min((alone, geometry.num_heads), (shared, geometry.num_kv_heads), key=lambda each: each[0] * each[1])
    end = int(batch.positions[batch.row_starts[1:] - 1].max()) + 1
    cuts = cut_of(defines, end - 1) + 1
    blocks, totals = tiles * heads, batch.num_rows * geometry.num_heads * 8
    fitting = min(cuts, (room - totals) // (batch.num_rows * part_bytes(geometry)))
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
