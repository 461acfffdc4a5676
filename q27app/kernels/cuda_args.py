"""The parameter blocks of the kernels: each class is the struct of the same name in a `.cu` or `.cuh` file, field by field.

A kernel takes one block by value. Pointers are device addresses (0 = null).
"""

from __future__ import annotations

import ctypes

MAX_SEGMENTS = 4
POINTER, INT, FLOAT, LONG = ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64


def _fields(**groups: str) -> list[tuple[str, type]]:
    """p: pointers, l: 64-bit integers, i: integers, f: floats; names separated by spaces, groups in order."""
    kinds = {"p": POINTER, "l": LONG, "i": INT, "f": FLOAT}
    return [(name, kinds[group[0]]) for group, names in groups.items() for name in names.split()]


class Segment(ctypes.Structure):
    """Rows of a row list that share a number type (quant.cuh)."""

    _fields_ = _fields(i="first_tile num_tiles first_row num_rows kind tile_bytes", l="offset")


class Ready(ctypes.Structure):
    """Rows that are left ready for the next stage (ready.cuh)."""

    _fields_ = _fields(p="records", i="units", f="scale unscale")


class ReadyFloats(ctypes.Structure):
    _fields_ = [("ready", Ready), *_fields(p="out", i="cols")]


class PairSizes(ctypes.Structure):
    _fields_ = _fields(p="weights norm out", i="kind rows cols tile_bytes wrap")


class RowSizes(ctypes.Structure):
    _fields_ = _fields(p="weights norm gain out", i="kind rows cols tile_bytes wrap gain_rows")


class Rows(ctypes.Structure):
    """Activation rows (staging.cuh)."""

    _fields_ = [*_fields(p="x norm gate row_map halves starts inverse", i="cols units wrap row_groups x_stride gate_stride", f="eps"),
                ("ready", Ready), *_fields(p="follow next")]


class LinearRows(ctypes.Structure):
    _fields_ = [
        *_fields(p="plans gathers weights out border"),
        ("rows_in", Rows),
        ("ready", Ready),
        ("segments", Segment * MAX_SEGMENTS),
        ("group_steps", ctypes.c_int * MAX_SEGMENTS),
        *_fields(i="rows out_stride out_rows per_row rounds places"),
    ]


class LinearTiles(ctypes.Structure):
    _fields_ = [
        *_fields(p="weights x inverse out partial"),
        ("segments", Segment * MAX_SEGMENTS),
        *_fields(i="num_segments rows units wrap x_stride out_stride out_rows splits part_stride"),
    ]


class Repack(ctypes.Structure):
    _fields_ = _fields(p="data scales tiles", l="tile_stride", i="kind rows cols units row_bytes groups group_cols part")


class Embed(ctypes.Structure):
    _fields_ = _fields(p="weights norm hidden hidden_norm tokens out", i="kind tile_bytes vocab width", f="eps", i2="wrap_units")


class FinalNorm(ctypes.Structure):
    _fields_ = _fields(p="x norm out", i="width", f="eps")


class Hidden(ctypes.Structure):
    _fields_ = _fields(p="final_rows out slots row_starts slot_ids accepted keeps", l="slot_bytes offset", i="num_seqs width")


class CopyWords(ctypes.Structure):
    _fields_ = _fields(p="source target", i="words is_ready")


class Rope(ctypes.Structure):
    _fields_ = _fields(p="positions frequencies table", i="half")


class Halves(ctypes.Structure):
    _fields_ = _fields(p="x norm row_map out inverse", i="width padded x_stride", f="eps", i2="remainder")


class SiluMul(ctypes.Structure):
    _fields_ = _fields(p="gate_up out", i="width")


class Attend(ctypes.Structure):
    _fields_ = [*_fields(
        p="y q_norm k_norm rope positions row_starts block_tables blocks part_ml part_o q_half q_factor out counter",
        l="block_bytes layer_offset", i="num_seqs rows y_stride out_stride max_blocks first_position max_splits", f="eps",
    ), ("ready", Ready), *_fields(i="ready_row first_cut", p="totals")]


class Delta(ctypes.Structure):
    _fields_ = [
        *_fields(p="y conv a dt_bias norm slots positions row_starts slot_ids accepted record out channels gates pairs ahead "
                   "lacks lacking", l="slot_bytes state_offset window_offset state_stride window_stride record_stride ahead_bytes lacking_stride", p2="keeps"),
        ("ready", Ready),
        *_fields(i="layer num_seqs y_stride z_offset beta_offset alpha_offset out_stride deferred num_keeps", f="eps"),
    ]


MAX_SETTLED = 64
"""Slots of a launch of delta_settle."""


class Settle(ctypes.Structure):
    _fields_ = [("delta", Delta), ("slots", ctypes.c_int * MAX_SETTLED), ("rows", ctypes.c_int * MAX_SETTLED)]


class Sample(ctypes.Structure):
    _fields_ = _fields(
        p="logits work temperature top_k top_p min_p presence frequency seeds positions penalty_starts penalty_ids "
          "penalty_counts masks num_logprobs part_best part_top tokens margins logprobs logprob_ids "
          "part_mass list list_sizes floors",
        i="n vocab mask_words skip_from skip adjusts",
    )


class Checksum(ctypes.Structure):
    _fields_ = _fields(p="words sum", l="count")


class DraftNext(ctypes.Structure):
    _fields_ = _fields(
        p="drawn margins limits tokens positions draw_positions penalty_starts penalty_ids penalty_counts drafts draft_margins "
          "frequencies table",
        i="step rows half",
    )


class DraftTurn(ctypes.Structure):
    _fields_ = [("next", DraftNext), ("embed", Embed), *_fields(p="part_best part_top")]


class Follow(ctypes.Structure):
    _fields_ = _fields(p="drawn accepted positions row_starts tokens out_positions draw_positions", i="num_seqs")


class TakeDrafts(ctypes.Structure):
    _fields_ = _fields(p="tokens drawn row_starts drafts", i="rows num_seqs chain_rows")


class Accept(ctypes.Structure):
    _fields_ = _fields(p="drawn tokens row_starts logit_rows accepted", i="num_seqs n")


class Peaks(ctypes.Structure):
    _fields_ = _fields(p="data out", l="words", i="rounds")
