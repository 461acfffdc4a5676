"""What `begin` works out of a batch once, for all the stages that follow: checks, tiles, places of keys, RoPE tables.

A tile is 64 positions of one sequence that begin at a multiple of 64. Prefill computes every tile at its full size, the
rows at their absolute places in it and zeros elsewhere, so that shapes, and with them the order of every sum, depend on
positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels.batch import BLOCK_POSITIONS, MAX_DECODE_ROWS, MAX_KEEPS, Batch
from q27app.kernels.numpy_state import NumpyState, Pages
from q27app.kernels.reference import rope_table

TILE = BLOCK_POSITIONS


@dataclass(frozen=True)
class Tile:
    """Rows start .. stop of the batch, of sequence `seq`, at places first .. of the tile of positions base .. base + 64."""

    seq: int
    base: int
    first: int
    start: int
    stop: int

    @property
    def is_full(self) -> bool:
        return self.stop - self.start == TILE

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.stop - self.start)

    def padded(self, x: np.ndarray) -> np.ndarray:
        """x's rows of this tile in their places, [64, ...]; a view if the tile is full."""
        if self.is_full:
            return x[self.rows]
        out = np.zeros((TILE, *x.shape[1:]), x.dtype)
        out[self.places] = x[self.rows]
        return out


@dataclass
class Pass:
    """A begun batch. tiles: None in the row family. physical: int64 [rows], where each row's key goes.
    seq_of_row: int [rows]."""

    batch: Batch
    state: NumpyState
    tiles: list[Tile] | None
    physical: np.ndarray
    seq_of_row: np.ndarray
    _rope: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)
    _pages: dict[int, Pages] = field(default_factory=dict, repr=False)

    def rope(self) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the rows' positions, computed once a pass."""
        if self._rope is None:
            geometry = self.state.geometry
            self._rope = rope_table(self.batch.positions, geometry.rotary_dim, geometry.rope_theta)
        return self._rope

    def pages(self, seq: int) -> Pages:
        """Where the sequence's positions lie, worked out once a pass."""
        if seq not in self._pages:
            self._pages[seq] = Pages(self.batch.block_tables[seq])
        return self._pages[seq]

    def sequences(self) -> list[tuple[int, slice]]:
        """(slot, rows) of each sequence."""
        starts = self.batch.row_starts
        return [(int(slot), slice(int(starts[i]), int(starts[i + 1]))) for i, slot in enumerate(self.batch.slots)]


def begin_pass(batch: Batch, state: NumpyState) -> Pass:
    """Check the batch against the state and prepare it. Raises Q27Error naming what does not fit."""
    check_batch(batch, state)
    seq_of_row = np.repeat(np.arange(batch.num_seqs), np.diff(batch.row_starts))
    block = batch.block_tables[seq_of_row, batch.positions // BLOCK_POSITIONS].astype(np.int64)
    physical = block * BLOCK_POSITIONS + batch.positions % BLOCK_POSITIONS
    tiles = _tiles(batch) if batch.phase == "prefill" else None
    return Pass(batch, state, tiles, physical, seq_of_row)


def _tiles(batch: Batch) -> list[Tile]:
    tiles = []
    for seq in range(batch.num_seqs):
        start, end = int(batch.row_starts[seq]), int(batch.row_starts[seq + 1])
        while start < end:
            position = int(batch.positions[start])
            first = position % TILE
            stop = min(end, start + TILE - first)
            tiles.append(Tile(seq, position - first, first, start, stop))
            start = stop
    return tiles


def check_batch(batch: Batch, state: NumpyState) -> None:
    """Raise Q27Error unless every row has its place."""
    starts, rows = np.asarray(batch.row_starts), batch.num_rows
    lengths = np.diff(starts)
    _require(len(starts) == batch.num_seqs + 1 and starts[0] == 0 and (lengths > 0).all(),
             f"row_starts {starts.tolist()} with {batch.num_seqs} sequences, expected ascending starts from 0")
    _require(len(batch.tokens) == rows and len(batch.positions) == rows,
             f"{len(batch.tokens)} tokens and {len(batch.positions)} positions, expected {rows} of each")
    slots = np.asarray(batch.slots)
    _require(len(set(slots.tolist())) == len(slots) and (slots >= 0).all() and (slots < state.num_slots).all(),
             f"slots {slots.tolist()}, expected different ones from 0 to {state.num_slots - 1}")
    offsets = np.arange(rows) - np.repeat(starts[:-1], lengths)
    first = np.asarray(batch.positions)[starts[:-1]]
    _require((first >= 0).all() and (batch.positions == np.repeat(first, lengths) + offsets).all(),
             "positions are not contiguous in each sequence")
    tables = batch.block_tables
    last_block = (first + lengths - 1) // BLOCK_POSITIONS
    _require(tables.ndim == 2 and len(tables) == batch.num_seqs and (last_block < tables.shape[1]).all(),
             f"block tables {list(tables.shape)} are too short for blocks up to {int(last_block.max())}")
    needed = np.arange(tables.shape[1]) <= last_block[:, None]
    _require(((tables >= 0) & (tables < state.num_blocks) | ~needed).all(),
             f"a block table names a block outside 0 to {state.num_blocks - 1}")
    logit_rows = np.asarray(batch.logit_rows)
    _require(not len(logit_rows) or (0 <= logit_rows[0] and logit_rows[-1] < rows and (np.diff(logit_rows) > 0).all()),
             f"logit_rows {logit_rows.tolist()}, expected ascending rows below {rows}")
    if batch.phase != "prefill":
        _require((lengths <= MAX_DECODE_ROWS).all(),
                 f"{int(lengths.max())} rows of one sequence in phase {batch.phase}, at most {MAX_DECODE_ROWS} are allowed")
    _check_keeps(batch, state, lengths, first)
    if batch.deferred:
        _require(batch.phase in ("decode", "verify"), f"phase {batch.phase} cannot be deferred")
        _require(rows <= state.max_record_rows,
                 f"{rows} deferred rows, the state records at most {state.max_record_rows}")


def _check_keeps(batch: Batch, state: NumpyState, lengths: np.ndarray, first: np.ndarray) -> None:
    used = [*np.asarray(batch.slots).tolist(), *(keep.slot for keep in batch.keeps)]
    _require(not batch.keeps or batch.phase == "prefill" and len(batch.keeps) <= MAX_KEEPS and len(set(used)) == len(used),
             f"{len(batch.keeps)} keeps in a {batch.phase} pass, expected at most {MAX_KEEPS} in a prefill, into slots of their own")
    for keep in batch.keeps:
        _require(0 <= keep.seq < batch.num_seqs and 0 <= keep.slot < state.num_slots and 16 <= keep.rows <= lengths[keep.seq]
                 and (first[keep.seq] + keep.rows) % BLOCK_POSITIONS == 0, f"a keep, {keep}, does not fit the pass")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Q27Error(f"batch refused: {message}.")
