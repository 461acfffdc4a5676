"""How prefill's matrix products are cut for a card: shapes of blocks, and the parts of out that each of them takes.

No choice made here changes a bit of the result (linear_tiles.cu): it is about how many blocks a card has for its last wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from q27app.kernels.card import BLOCK_SHARED, Card
from q27app.kernels.cuda_weights import TILE_ROWS, UNIT_BYTES, UNIT_COLS, Segment

RING_START, MAX_STAGES, WARP_STAGES = 2048, 8, 4
"""As in tiles_warpgroup.cuh; stages of tiles_warp.cuh."""


@dataclass(frozen=True)
class TileShape:
    """How a block of linear_tiles cuts out: weight tiles, tokens, threads. at_once: blocks on a multiprocessor. share: of the speed
    that the largest blocks reach where they fill the card; it serves to choose."""

    name: str
    tiles: int
    tokens: int
    threads: int
    at_once: int
    share: float

    def shared_bytes(self, card: Card, kind: int) -> int:
        """Dynamic shared memory (tiles_warp.cuh, tiles_warpgroup.cuh)."""
        stage, room = self.tiles * UNIT_BYTES[kind] + self.tokens * UNIT_COLS * 2, card.sm_shared // self.at_once - BLOCK_SHARED
        if not card.has_warpgroups:
            return max(2, min(WARP_STAGES, room // stage)) * stage
        return RING_START + min(MAX_STAGES, (room - RING_START) // stage) * stage


@dataclass(frozen=True)
class TilePart:
    """What one launch computes: these rows of the matrix for `rows` tokens from `first_token`, a multiple of 64, on, in as many K
    splits side by side."""

    shape: TileShape
    segments: tuple[Segment, ...]
    first_token: int
    rows: int
    splits: int = 1

    @property
    def tile_blocks(self) -> int:
        return sum(-(-segment.num_tiles // self.shape.tiles) for segment in self.segments)

    @property
    def token_blocks(self) -> int:
        return -(-self.rows // self.shape.tokens)

    @property
    def blocks(self) -> int:
        return self.tile_blocks * self.token_blocks * self.splits

    def cost(self, card: Card) -> float:
        """Time, in blocks of one tile and one token that a multiprocessor does one after the other at full speed. Blocks by warps that
        have less company than there is room for wait for themselves: half of the time does not depend on how many there are."""
        waves, room = -(-self.blocks // max(1, card.num_sms)), self.shape.at_once
        rest = waves % room
        if rest and not card.has_warpgroups:
            waves += (room - rest) / 2
        return waves * self.shape.tiles * self.shape.tokens / self.shape.share / self.splits


LAUNCH_COST = 100.0
"""Of one more launch."""
MAX_TILE_SPLITS, MIN_SPLIT_UNITS = 4, 16
SIDE_BY_SIDE_ROWS = 512
"""Prefill rows up to which the K splits of a matrix run side by side."""


def tile_splits(card: Card, segments: Sequence[Segment], units: int) -> int:
    """K splits of a matrix whose sums are added to the residual, in prefill: fixed for matrix and card, whatever the rows. Few rows
    make few blocks of a narrow matrix; those that run one after the other cost long prompts a few percent of it."""
    if not card.has_warpgroups:
        return 1
    blocks = sum(-(-segment.num_tiles // 8) for segment in segments)
    return max(1, min(MAX_TILE_SPLITS, units // MIN_SPLIT_UNITS, card.num_sms // max(1, blocks)))


def tile_shapes(card: Card) -> tuple[TileShape, ...]:
    """The shapes that kernels are built for, the one for long prompts first."""
    if not card.has_warpgroups:
        return (TileShape("wide", 16, 128, 256, 1, 1.0), TileShape("medium", 8, 128, 128, 2, 0.94), TileShape("slim", 8, 64, 128, 2, 0.86),
                TileShape("few", 4, 64, 128, 3, 0.7))
    return (TileShape("wide", 8, 256, 384, 1, 1.0), TileShape("medium", 8, 128, 384, 1, 0.76), TileShape("slim", 8, 64, 384, 2, 0.55),
            TileShape("few", 4, 64, 256, 3, 0.42))


def fitting_shapes(card: Card, kind: int) -> list[TileShape]:
    """Those whose blocks find room with weights of that number type."""
    return [shape for shape in tile_shapes(card) if shape.shared_bytes(card, kind) <= card.shared_bytes]


def cut_segments(segments: Sequence[Segment], tiles: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The first `tiles` tiles of the segments, and the rest."""
    head, tail = [], []
    for segment in segments:
        taken = min(max(0, tiles), segment.num_tiles)
        tiles -= segment.num_tiles
        if taken:
            head.append(replace(segment, num_tiles=taken, num_rows=min(segment.num_rows, taken * TILE_ROWS)))
        if taken < segment.num_tiles:
            tail.append(replace(segment, first_tile=segment.first_tile + taken, num_tiles=segment.num_tiles - taken,
                                first_row=segment.first_row + taken * TILE_ROWS, num_rows=segment.num_rows - taken * TILE_ROWS,
                                offset=segment.offset + taken * segment.tile_bytes))
    return tuple(head), tuple(tail)


@lru_cache(maxsize=4096)
def tile_plan(card: Card, segments: tuple[Segment, ...], rows: int, splits: int = 1) -> tuple[TilePart, ...]:
    """One launch, or two where whole waves of large blocks and smaller ones for what is left end sooner. segments: of one number type;
    splits: that run side by side."""
    shapes = fitting_shapes(card, segments[0].kind)

    def best(some: tuple[Segment, ...], first_token: int, count: int) -> TilePart:
        return min((TilePart(shape, some, first_token, count, splits) for shape in shapes), key=lambda part: part.cost(card))

    plans = [(best(segments, 0, rows),)]
    for shape in shapes:
        whole = TilePart(shape, segments, 0, rows, splits)
        for waves in range(1, 1 + whole.blocks // max(1, card.num_sms))[-2:]:
            tokens = waves * card.num_sms // (whole.tile_blocks * splits) * shape.tokens
            if 0 < tokens < rows:
                plans.append((TilePart(shape, segments, 0, tokens, splits), best(segments, tokens, rows - tokens)))
            head, tail = cut_segments(segments, waves * card.num_sms // (whole.token_blocks * splits) * shape.tiles)
            if head and tail:
                plans.append((TilePart(shape, head, 0, rows, splits), best(tail, 0, rows)))
    return min(plans, key=lambda plan: sum(part.cost(card) for part in plan) + LAUNCH_COST * len(plan))


