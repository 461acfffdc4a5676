"""Launchers of attention over the paged cache: rows in, then the split family for few rows or the tiles of prefill."""

from __future__ import annotations

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.batch import BLOCK_POSITIONS, Batch
from q27app.kernels.card import BLOCK_SHARED, cut_count
from q27app.kernels.cuda_prompts import QUERIES, PromptPlan, part_places, prompt_plan
from q27app.kernels.memory import CudaBuffer

ATTEND_ROWS = 16
"""Rows of one launch of the split attention; its scratch is sized for them."""
COUNTERS = 64
"""Launches of a stage that can count their items."""
ITEM_ROWS = (1, 4, 8, 16)
"""Most rows of an item, by kernel: attend_decode_1 and so on."""
FEW_BLOCKS = {"warps": 2, "warpgroups": 3}
"""Blocks a multiprocessor for one row over turned keys: with more of them it takes up to a third more time at 32,000 positions."""
TABLE_COPIES = 4
"""Of the table of pairs of 5-bit keys, for one row by warpgroups (Plan)."""
MERGE_DIMS = 128
MERGE_AT_ONCE = 4
"""Blocks of attend_merge that begin at once on a multiprocessor, by their registers. Where there are more, attend_merge_many merges,
of which another number fits (MERGE_BLOCKS in attend_decode.cu)."""
OWN_SEQS = 4
"""Up to so many sequences attend_decode does attend_rows' work too, where keys and values are plain and it goes by warpgroups."""
MAKER_ROWS = 4
"""Most rows of an item of attend_decode_make, whose blocks make what they need of the rows. Where items of so many rows cannot all begin at
once, attend_rows is the quicker one."""
MAKER_HEADS = 256, 64, 0
"""Numbers of a head and its rotary ones, and query heads of a key head modulo 2, that attend_decode_make is for (MAKES_ROWS in attend_decode.cu)."""
STEP = 32
"""Positions that a block of prefill attends at a time by warps."""
MERGE_PROMPT = 8
"""Heads of rows of a block of attend_prefill_merge."""


def decode_by_warpgroups(card, form, head_dim: int, group: int) -> bool:
    """Whether attend_decode is built for warpgroups (attend_few_warpgroup.cuh): not for keys that need no expanding, where it is the
    slower one. One way for all numbers of rows, or their bits would differ. form: the KVFormat; group: query heads of a key head."""
    return card.has_warpgroups and form.key.storage != np.float16 and head_dim % 64 == 0 and group <= 8


def decode_block(card, form, head_dim: int, group: int, item_rows: int) -> tuple[int, int]:
    """(threads, bytes of dynamic shared memory) of attend_decode_N (Plan). form: the KVFormat."""
    half_keys, turned = form.key.storage == np.float16, form.value.low_bits > 0
    copies, pairs = head_dim // 128 if turned else 1, 4 << 2 * form.key.low_bits + 2 if form.key.low_bits else 0
    key_tile, value_tile = (BLOCK_POSITIONS * row for row in (form.key_row_bytes(1, head_dim), form.value_row_bytes(1, head_dim)))
    if decode_by_warpgroups(card, form, head_dim, group):
        groups = -(-item_rows * group // 8)
        columns = 8 * (groups if groups <= 4 else groups + groups % 2)
        tiles = 2 * key_tile + (2 + turned) * value_tile
        pairs *= TABLE_COPIES if item_rows == 1 and form.key.low_bits == 4 else 1
        return 128, tiles + columns * (head_dim * 2 + 2 * copies * BLOCK_POSITIONS * 2 + (4 + 1 + 4) * 4) + 32 + pairs + 48 + 16 + 1024
    warps = 4 if item_rows <= 4 else item_rows
    columns = 2 * warps * -(-item_rows * group // (2 * warps))
    pipelined = card.is_wide and (not half_keys or item_rows == 16)
    tiles = (2 if pipelined or not half_keys else 1) * key_tile + (2 + turned if pipelined else 2 if turned or not half_keys else 1) * value_tile
    buffers = 2 if pipelined else 1
    weights = buffers * copies * columns * BLOCK_POSITIONS * 2
    exchanged = columns * (4 * 64 + 2 * 4) if pairs and warps >= 8 and (card.is_wide or item_rows <= 8) else 0
    return 32 * warps, tiles + columns * (head_dim + 32) * 2 + weights + 2 * 4 * columns * 4 + (1 + buffers) * columns * 4 + pairs + 48 + exchanged


def prefill_block(card, form, head_dim: int) -> tuple[int, int]:
    """(threads, bytes of dynamic shared memory) of attend_prefill (attend_warp.cuh, attend_warpgroup.cuh). form: the KVFormat."""
    if card.has_warpgroups:
        return 384, 2048 + 6 * BLOCK_POSITIONS * head_dim * 2
    tile, plain = STEP * head_dim * 2, 2 * head_dim
    rows = form.key_row_bytes(1, head_dim), form.value_row_bytes(1, head_dim)
    return 2 * QUERIES, sum(3 * tile if row == plain else 2 * tile + 2 * STEP * row for row in rows)


def _starts_early(batch: Batch) -> bool:
    """Whether the first kernel of the stage may: a draft step moves the positions, and later kernels look at them before they wait."""
    return batch.phase not in ("prefill", "draft")


class Attention:
    """The attend stage of a backend; owns no memory."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._planned: tuple[Batch, PromptPlan] | None = None

    def attend(self, y: CudaBuffer, layer, o: CudaBuffer | None) -> None:
        backend, state, batch = self._backend, self._backend.state, self._backend.batch
        geometry = state.geometry
        width = 2 * geometry.num_heads * geometry.head_dim + 2 * geometry.num_kv_heads * geometry.head_dim
        if y.shape[1] != width or o is not None and o.shape[1] != geometry.num_heads * geometry.head_dim:
            raise Q27Error(f"attend: y has {y.shape[1]} columns, expected {width}.")
        ready = backend.ready.attended(layer, o) if o is not None else None
        args = self._args(y, layer, o, batch)
        if ready is not None:
            args.ready = ready
        if o is not None and (maker := self._maker()):
            return self._decode(args, y, o, batch, maker)
        tasks = 2 * geometry.num_kv_heads
        if o is not None:
            args.q_half, args.q_factor = backend.scratch.queries(batch.num_rows)
            tasks += geometry.num_heads
        backend.launch("attend_rows", "attend_rows", (batch.num_rows, -(-tasks // 8)), 256, 0, args, dependent=_starts_early(batch))
        if o is not None:
            (self._prefill if backend.is_prefill else self._decode)(args, y, o, batch)

    def store(self, y: CudaBuffer, layer) -> None:
        """The batch's keys and values of y into the cache as they are, without norm and rope: how a measurement fills a deep
        cache with the codec's own writer."""
        backend, batch = self._backend, self._backend.batch
        grid = (batch.num_rows, -(-2 * backend.state.geometry.num_kv_heads // 8))
        backend.launch("attend_rows", "store_rows", grid, 256, 0, self._args(y, layer, None, batch), dependent=False)

    def _args(self, y: CudaBuffer, layer, o: CudaBuffer | None, batch: Batch) -> cuda_args.Attend:
        backend, state, area, scratch = self._backend, self._backend.state, self._backend.area, self._backend.scratch
        args = cuda_args.Attend()
        args.y, args.q_norm, args.k_norm = y.address, layer.q_norm.address, layer.k_norm.address
        args.rope, args.positions, args.row_starts = scratch.rope, area.at("positions"), area.at("row_starts")
        args.block_tables, args.blocks, args.block_bytes = area.at("tables"), state.blocks, state.block_bytes
        args.layer_offset, args.counter = layer.kv_index * state.layer_bytes, scratch.attend_counters
        args.part_ml, args.part_o, args.max_splits = scratch.part_ml, scratch.part_o, scratch.max_splits
        args.out, args.out_stride = (o.address, o.shape[1]) if o is not None else (0, 0)
        args.num_seqs, args.rows, args.y_stride = batch.num_seqs, batch.num_rows, y.shape[1]
        args.max_blocks, args.first_position, args.eps = area.table_stride, layer.first_position, backend.eps
        return args

    def _prefill(self, args: cuda_args.Attend, y: CudaBuffer, o: CudaBuffer, batch: Batch) -> None:
        backend, geometry, card = self._backend, self._backend.state.geometry, self._backend.device.card
        threads, shared = prefill_block(card, backend.state.form, geometry.head_dim)
        parts, room = backend.scratch.behind_queries(batch.num_rows)
        if self._planned is None or self._planned[0] is not batch:
            self._planned = batch, prompt_plan(card, geometry, batch, room)
        plan = self._planned[1]
        args.max_splits, args.part_o = plan.at_once, 0
        if plan.at_once:
            args.part_o, args.totals, args.part_ml, _ = part_places(geometry, batch.num_rows, plan.at_once, parts)
        for args.first_cut in plan.launches:
            backend.launch("attend_prefill", "attend_prefill", plan.grid, threads, shared, args, dependent=False)
            if plan.at_once:
                backend.launch("attend_prefill", "attend_prefill_merge", (-(-batch.num_rows * geometry.num_heads // MERGE_PROMPT),), 256, 0, args, dependent=False)

    def _item_rows(self, largest: int) -> tuple[int, int, int]:
        """Rows of an item for sequences of up to `largest` rows: all of them, or as many as the kernels take on this card. With
        decode_block of it."""
        state, card = self._backend.state, self._backend.device.card
        dim, group = state.geometry.head_dim, state.geometry.num_heads // state.geometry.num_kv_heads
        kernels = ITEM_ROWS[:-1] if decode_by_warpgroups(card, state.form, dim, group) else ITEM_ROWS
        fitting = [(rows, *block) for rows in kernels if (block := decode_block(card, state.form, dim, group, rows))[1] <= card.shared_bytes]
        return next((found for found in fitting if found[0] >= largest), fitting[-1])

    def _makes(self, batch: Batch) -> bool:
        """Whether an attend_decode may make queries, keys and values of the rows itself, in every item: worth it for few rows alone."""
        backend, state = self._backend, self._backend.state
        geometry, group = state.geometry, state.geometry.num_heads // state.geometry.num_kv_heads
        return (batch.phase != "prefill" and state.form.name == "fp8" and batch.num_seqs <= OWN_SEQS and batch.num_rows <= ATTEND_ROWS
                and decode_by_warpgroups(backend.device.card, state.form, geometry.head_dim, group)
                and (batch.is_single or (geometry.head_dim, geometry.rotary_dim, group % 2) == MAKER_HEADS))

    def is_deep(self, batch: Batch) -> bool:
        """Whether several rows of a sequence have more items of MAKER_ROWS rows than blocks."""
        if batch.is_single or not self._makes(batch):
            return False
        card, starts = self._backend.device.card, batch.row_starts
        defines, lengths = card.attend_defines(), np.diff(starts)
        cuts = [cut_count(defines, int(batch.positions[first]) + int(rows)) for first, rows in zip(starts, lengths)]
        items = int((-(-lengths // MAKER_ROWS) * cuts).sum()) * self._backend.state.geometry.num_kv_heads
        return items > card.num_sms * self._blocks(MAKER_ROWS, self._item_rows(MAKER_ROWS)[2])

    def _maker(self) -> tuple[str, int] | None:
        """The attend_decode that makes the rows, and the most rows of its items."""
        batch = self._backend.batch
        if not self._makes(batch) or self.is_deep(batch):
            return None
        return ("attend_decode_own", 1) if batch.is_single else ("attend_decode_make", MAKER_ROWS)

    def _blocks(self, item_rows: int, shared: int) -> int:
        """Blocks of attend_decode a multiprocessor."""
        card = self._backend.device.card
        return max(1, min(card.attend_blocks(item_rows), card.sm_shared // (shared + BLOCK_SHARED)))

    def _decode(self, args: cuda_args.Attend, y: CudaBuffer, o: CudaBuffer, batch: Batch, maker: tuple[str, int] | None = None) -> None:
        """Whole sequences, as many as the scratch holds rows for, a launch. maker: `_maker`."""
        backend, area, card, scratch = self._backend, self._backend.area, self._backend.device.card, self._backend.scratch
        geometry, starts = backend.state.geometry, batch.row_starts
        seq = launches = 0
        while seq < batch.num_seqs:
            stop = seq + 1
            while stop < batch.num_seqs and starts[stop + 1] - starts[seq] <= ATTEND_ROWS:
                stop += 1
            first, rows = int(starts[seq]), int(starts[stop] - starts[seq])
            item_rows, threads, shared = self._item_rows(maker[1] if maker else int(np.diff(starts[seq:stop + 1]).max()))
            args.num_seqs, args.row_starts = stop - seq, area.at("row_starts", seq)
            args.block_tables, args.counter = area.at("tables", seq * area.table_stride), scratch.attend_counters + 4 * launches
            skip = first * args.max_splits * geometry.num_heads * 4
            args.part_ml, args.part_o = scratch.part_ml - 2 * skip, scratch.part_o - geometry.head_dim * skip
            blocks = self._blocks(item_rows, shared)
            group = geometry.num_heads // geometry.num_kv_heads
            few = FEW_BLOCKS["warpgroups" if decode_by_warpgroups(card, backend.state.form, geometry.head_dim, group) else "warps"]
            if item_rows == 1 and backend.state.form.key.low_bits and blocks > few:
                blocks, shared = few, max(shared, card.sm_shared // few // 1024 * 1024 - BLOCK_SHARED)   # so that no more fit
            kernel = maker[0] if maker else f"attend_decode_{item_rows}"
            backend.launch("attend_decode", kernel, (card.num_sms * blocks,), threads, shared, args, dependent=not maker or _starts_early(batch))
            merge = cuda_args.Attend.from_buffer_copy(args)
            merge.positions, merge.part_ml, merge.part_o = area.at("positions", first), scratch.part_ml, scratch.part_o
            merge.y, merge.out, merge.ready_row = y.row(first), o.row(first), first
            grid = (rows, geometry.num_heads, max(1, geometry.head_dim // MERGE_DIMS))
            name = "attend_merge" if grid[0] * grid[1] * grid[2] <= MERGE_AT_ONCE * card.num_sms else "attend_merge_many"
            backend.launch("attend_decode", name, grid, 256, 0, merge)
            seq, launches = stop, launches + 1
