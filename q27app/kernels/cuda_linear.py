"""Launchers of the matrix stages. The phase chooses the family: rows (1 to 16 at a time) or tiles (prefill)."""

from __future__ import annotations

from dataclasses import dataclass

from q27app.errors import Q27Error
from q27app.kernels import cuda_args, cuda_tiles
from q27app.kernels.cuda_follow import FollowedRows, Measured
from q27app.kernels.cuda_ready import ReadyRows, part_of
from q27app.kernels.cuda_weights import (
    BLOCK_WARPS, FUSED_ROWS, KIND_F16, KIND_Q4, KIND_Q8, PLAN_BYTES, TILE_ROWS, UNIT_COLS, CudaVector, CudaWeight, group_steps,
    rows_shared_bytes,
)
from q27app.kernels.memory import CudaBuffer

KIND_NAMES = {KIND_F16: "f16", KIND_Q8: "q8", KIND_Q4: "q4"}
SHORT_ROW = 6144
"""Numbers of a row that halve_short_rows holds."""
MOST_ROWS = 16


@dataclass(frozen=True)
class Gated:
    """The gated norm that a delta rule's output still lacks: addresses of the norm [128] and of z in row 0, floats a row."""

    norm: int
    gate: int
    stride: int


def _check(weight: CudaWeight, width_in: int, width_out: int, paired: bool, what: str) -> None:
    if not isinstance(weight, CudaWeight) or weight.paired != paired and what != "head":
        raise Q27Error(f"{what}: the weight is not a row list for this stage.")
    if weight.shape[1] != width_in or weight.shape[0] != width_out:
        raise Q27Error(f"{what}: weight {list(weight.shape)}, expected [{width_out}, {width_in}].")


def _reciprocal(divisor: int) -> int:
    """2^32 / divisor rounded up, as 32 signed bits: 0 for 1."""
    value = -(-(1 << 32) // divisor) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _share_out(args: cuda_args.LinearRows, weight: CudaWeight) -> None:
    """How blocks and warps share the row list out; needs args.rows."""
    shares = weight.shares
    for index, segment in enumerate(weight.segments):
        args.group_steps[index] = group_steps(segment, weight.units)
    args.plans, args.gathers = weight.plans, weight.plans + shares.rounds * shares.blocks * BLOCK_WARPS * PLAN_BYTES
    args.per_row, args.rounds, args.places = _reciprocal(args.rows), shares.rounds, shares.places


def _parts(rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of each launch of the row family."""
    return [(start, min(MOST_ROWS, rows - start)) for start in range(0, rows, MOST_ROWS)]


class LinearStages:
    """project, add_linear, gate_up, head, mtp_input of a backend; owns no memory."""

    def __init__(self, backend) -> None:
        self._backend, self.ready, self.followed = backend, ReadyRows(backend), FollowedRows(backend)

    def project(self, norm: CudaVector | None, weight: CudaWeight, x: CudaBuffer, y: CudaBuffer) -> None:
        _check(weight, x.shape[1], y.shape[1], False, "project")
        self._run("store", norm, weight, x, y, x.shape[0])
        if weight.is_f16 and self._backend.is_prefill:   # what the delta rule and attention see of a prompt is worth a second pass
            self._tiles("add", norm, weight, x, y, x.shape[0], 0, y.shape[1], is_remainder=True)

    def add_linear(self, weight: CudaWeight, h: CudaBuffer, x: CudaBuffer, gated: Gated | None = None, norm: CudaVector | None = None) -> None:
        """gated: h is what the delta rule gave, its gated norm is still to be applied. norm: what x goes through next."""
        _check(weight, h.shape[1], x.shape[1], False, "add_linear")
        if self._backend.is_prefill:
            self.ready.finish(h)
        ready = self.ready.of(h)
        if ready is not None:
            follow = self.followed.leave(norm if len(weight.segments) == 1 else None, x)   # of one matrix groups of columns begin at multiples of 32
            for start, rows in _parts(x.shape[0]):
                self._ready_rows(weight, part_of(ready, start), x, start, rows, norm, follow)
            return
        self.followed.forget(x)
        self._run("add", None, weight, h, x, x.shape[0], gated=gated)

    def gate_up(self, norm: CudaVector, weight: CudaWeight, x: CudaBuffer, h: CudaBuffer) -> None:
        _check(weight, x.shape[1], 2 * h.shape[1], weight.paired, "gate_up")
        ready = self.ready.leave(norm, weight, h)
        if weight.paired:
            self._run("gate_up", norm, weight, x, h, x.shape[0], ready=ready)
            return
        both = self._backend.scratch.wide(x.shape[0], 2 * h.shape[1])
        self._run("store", norm, weight, x, both, x.shape[0])
        args = cuda_args.SiluMul(both.address, h.address, h.shape[1])
        self._backend.launch("rows", "silu_mul", (x.shape[0],), 256, 0, args)

    def logits(self, weight: CudaWeight, final: CudaBuffer, logit_rows: int, count: int, logits: CudaBuffer) -> None:
        """logits [count, vocab] = final[logit_rows] W^T; logit_rows: device address of int32 [count]."""
        _check(weight, final.shape[1], logits.shape[1], False, "head")
        self._run("store", None, weight, final, logits, count, logit_rows)

    def _run(self, stage: str, norm: CudaVector | None, weight: CudaWeight, x: CudaBuffer, out: CudaBuffer, rows: int,
             row_map: int = 0, gated: Gated | None = None, ready: cuda_args.Ready | None = None) -> None:
        measured = self.followed.measure(norm, x)
        if stage != "add":
            self.followed.forget(out)
        if self._backend.is_prefill:
            self._tiles({"store": "plain"}.get(stage, stage), norm, weight, x, out, rows, row_map, out.shape[1])
            return
        for start, count in _parts(rows):
            self._rows(stage, norm, weight, x, out, start, count, row_map, gated, ready, measured)

    def _rows(self, stage: str, norm: CudaVector | None, weight: CudaWeight, x: CudaBuffer, out: CudaBuffer, start: int,
              rows: int, row_map: int, gated: Gated | None, ready: cuda_args.Ready | None, measured: Measured | None) -> None:
        """ready: where gate_up leaves what comes out, in place of `out`. measured: how rows behind a norm are taken."""
        backend, card = self._backend, self._backend.device.card
        source = "gated" if gated else "norm" if norm else "plain"
        rows_in = cuda_args.Rows()
        rows_in.x, rows_in.row_map = (x.address, row_map + 4 * start) if row_map else (x.row(start), 0)
        rows_in.norm, rows_in.eps = (norm.address if norm else gated.norm if gated else 0), backend.eps
        if gated:
            rows_in.gate, rows_in.gate_stride = gated.gate + 4 * gated.stride * start, gated.stride
        rows_in.cols, rows_in.units, rows_in.wrap, rows_in.x_stride = weight.shape[1], weight.units, weight.wrap, x.shape[1]
        fused = rows <= FUSED_ROWS and rows_shared_bytes(rows, weight.activation_units, True, weight.shares.places, card.row_ring) <= card.shared_bytes   # very wide rows are not
        rows_in.row_groups = 2 if rows > 8 else 1
        if measured is not None:
            rows_in.follow, rows_in.next = self.followed.address(measured.of, start), self.followed.address(measured.next, start)
        is_left = measured is not None and measured.of is not None
        if is_left:
            fused, rows_in.ready = False, self.followed.records(x, start)
            source = "followed_few" if rows <= FUSED_ROWS else "followed" if rows <= 8 else "followed_wide"
        elif not fused:
            rows_in.halves, rows_in.starts, rows_in.inverse = backend.scratch.staged
            backend.launch("linear_rows", f"stage_{source}", (rows,), 512, 0, rows_in)
            source = "wide" if rows > 8 else "halves"
        args = cuda_args.LinearRows(rows_in=rows_in)
        if ready is not None:
            args.ready = part_of(ready, start)
        shared = rows_shared_bytes(rows, weight.activation_units, fused, weight.shares.places, card.row_ring, is_left)
        self._launch_rows(f"{source}_{stage}", args, weight, out, start, rows, shared)

    def _ready_rows(self, weight: CudaWeight, ready: cuda_args.Ready, x: CudaBuffer, start: int, rows: int, norm: CudaVector | None, follow: int | None) -> None:
        """add_linear of rows that the stage before left ready; ready: from row `start` on. follow: by which Follow x is left for `norm`, too."""
        args = cuda_args.LinearRows()
        if follow is not None and norm is not None:
            args.ready, args.rows_in.norm, args.rows_in.follow = self.followed.records(x, start), norm.address, self.followed.address(follow, start)
        args.rows_in.cols, args.rows_in.units, args.rows_in.wrap, args.rows_in.ready = weight.shape[1], weight.units, weight.wrap, ready
        shared = rows_shared_bytes(rows, 0, False, weight.shares.places, self._backend.device.card.row_ring, True)
        source = "few" if rows <= FUSED_ROWS else "halves" if rows <= 8 else "wide"
        self._launch_rows(f"ready_{source}_add", args, weight, x, start, rows, shared)

    def _launch_rows(self, name: str, args: cuda_args.LinearRows, weight: CudaWeight, out: CudaBuffer, start: int, rows: int, shared: int) -> None:
        args.weights, args.out, args.border = weight.address, out.row(start), self._backend.scratch.border
        args.segments = weight.segment_args()
        args.rows, args.out_stride, args.out_rows = rows, out.shape[1], out.shape[1]
        _share_out(args, weight)
        self._backend.launch("linear_rows", f"linear_rows_{name}", (weight.shares.blocks,), 512, shared, args)

    def _tiles(self, stage: str, norm: CudaVector | None, weight: CudaWeight, x: CudaBuffer, out: CudaBuffer, rows: int,
               row_map: int, out_rows: int, is_remainder: bool = False) -> None:
        """is_remainder: of the activations, take what their rounding to fp16 loses."""
        if not rows:
            return
        backend = self._backend
        card, padded = backend.device.card, weight.activation_units * UNIT_COLS
        halves, inverse = backend.scratch.halves(rows, padded)
        backend.launch("rows", "halve_short_rows" if padded <= SHORT_ROW else "halve_rows", (rows,), 256, 0, cuda_args.Halves(
            x.address, norm.address if norm else 0, row_map, halves, inverse, x.shape[1], padded, x.shape[1], backend.eps,
            int(is_remainder)), dependent=False)
        splits = cuda_tiles.tile_splits(card, weight.segments, weight.units) if stage == "add" else 1
        nbytes = splits * rows * out_rows * 4
        together = splits > 1 and rows <= cuda_tiles.SIDE_BY_SIDE_ROWS and backend.scratch.holds(nbytes)
        partial = backend.scratch.split_sums(nbytes) if together else 0
        args = cuda_args.LinearTiles(weights=weight.address, x=halves, inverse=inverse, out=out.address, partial=partial, rows=rows,
                                     units=weight.units, wrap=weight.wrap, x_stride=padded, out_stride=out.shape[1], out_rows=out_rows,
                                     splits=splits, part_stride=rows * out_rows)
        kinds = {kind: tuple(segment for segment in weight.segments if segment.kind == kind) for kind in {s.kind for s in weight.segments}}
        parts = [part for some in kinds.values() for part in cuda_tiles.tile_plan(card, some, rows, splits if together else 1)]
        # those after the first may run beside it: they wait for nothing but its start
        for index, part in enumerate(sorted(parts, key=lambda part: (-part.cost(card), part.segments[0].first_tile))):
            self._tile_part(stage, args, part, index > 0)
        if together:
            backend.launch("linear_tiles", "linear_tiles_merge", (rows,), 256, 0, args, dependent=False)

    def _tile_part(self, stage: str, whole: cuda_args.LinearTiles, part: cuda_tiles.TilePart, dependent: bool) -> None:
        """One launch. whole: the parameters of all of out."""
        card, shape, kind, first = self._backend.device.card, part.shape, part.segments[0].kind, part.first_token
        args = cuda_args.LinearTiles.from_buffer_copy(whole)
        args.x, args.inverse, args.out = whole.x + 2 * whole.x_stride * first, whole.inverse + 4 * first, whole.out + 4 * first * whole.out_stride
        args.partial = whole.partial and whole.partial + 4 * first * whole.out_rows
        args.segments[:len(part.segments)] = [segment.args() for segment in part.segments]
        args.num_segments, args.rows = len(part.segments), part.rows
        grid = (min(part.blocks, shape.at_once * card.num_sms),) if card.has_warpgroups else (part.token_blocks, part.tile_blocks)
        self._backend.launch("linear_tiles", f"linear_tiles_{stage}_{shape.name}_{KIND_NAMES[kind]}", grid, shape.threads,
                             shape.shared_bytes(card, kind), args, dependent)

    # rows in and out

    def embed(self, weight: CudaWeight, tokens: int, x: CudaBuffer) -> None:
        self.followed.forget(x)
        args = self._embed_args(weight, tokens, x.shape[1])
        args.out = x.address
        # what changed the positions must have ended, as later kernels look at them before they wait
        self._backend.launch("rows", "embed", (x.shape[0],), 512, 0, args, dependent=False)

    def mtp_input(self, enorm: CudaVector, hnorm: CudaVector, weight: CudaWeight, embed: CudaWeight, tokens: int,
                  hidden: CudaBuffer, x: CudaBuffer, turn: cuda_args.DraftTurn | None = None) -> None:
        """turn: of the draft step before, whose draw becomes the batch here."""
        width = hidden.shape[1]
        joined = self._backend.scratch.wide(x.shape[0], 2 * width)
        args = self._embed_args(embed, tokens, width)
        args.norm, args.hidden, args.hidden_norm, args.out = enorm.address, hidden.address, hnorm.address, joined.address
        if turn is None:
            self._backend.launch("rows", "mtp_rows", (x.shape[0], 2), 512, 0, args, dependent=not self._backend.is_prefill)
        else:
            turn.embed = args
            self._backend.launch("draft", "draft_turn", (x.shape[0], 3), 512, 0, turn)
        self.project(None, weight, joined, x)

    def _embed_args(self, weight: CudaWeight, tokens: int, width: int) -> cuda_args.Embed:
        if len(weight.segments) != 1 or weight.paired or weight.shape[1] != width:
            raise Q27Error(f"embedding {list(weight.shape)}, expected one matrix of {width} columns.")
        segment = weight.segments[0]
        args = cuda_args.Embed()
        args.weights, args.tokens, args.kind, args.tile_bytes = weight.address, tokens, segment.kind, segment.tile_bytes
        args.vocab, args.width, args.eps, args.wrap_units = weight.shape[0], width, self._backend.eps, weight.wrap
        return args

    def final_norm(self, norm: CudaVector, x: CudaBuffer, final: CudaBuffer) -> None:
        args = cuda_args.FinalNorm(x.address, norm.address, final.address, x.shape[1], self._backend.eps)
        self._backend.launch("rows", "final_norm", (x.shape[0],), 512, 0, args)


assert TILE_ROWS == 16
