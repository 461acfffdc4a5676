"""Each stage of a pass, timed over all layers that have it: microseconds, GB/s, TFLOP/s, share of the measured peaks.

The model is a whole one, so that no matrix stays in a cache between two of its uses. A stage is recorded once (a CUDA
graph; NumPy just runs) over its layers and replayed; the backend's `download` is the barrier. What counts:

    bytes    weights as the backend keeps them, keys and values or recurrent state read and written, activations
    flops    2 a multiplication of a matrix; 4 a query head, dim and key of attention; 8 a delta head and element of S
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from q27app.bench.journal import Journal
from q27app.bench.report import Column, Report
from q27app.kernels.batch import BLOCK_POSITIONS, MAX_DECODE_ROWS, Batch
from q27app.kernels.kv_formats import kv_format as format_of
from q27app.model.forward import Model
from q27app.model.weights import AttentionLayer, DeltaLayer

USUAL_KV = {"numpy": "fp32", "cuda": "fp16"}
"""Backend -> KV format where none is asked for."""
COLUMNS = (
    Column("pass", "pass"), Column("stage", "stage"), Column("calls", "calls", 0), Column("us", "us each", 1), Column("mb", "MB", 2),
    Column("gb_per_s", "GB/s", 0), Column("memory_percent", "of peak %", 0), Column("tflop_per_s", "TFLOP/s", 2),
    Column("compute_percent", "of peak %", 1), Column("share_percent", "of the pass %", 1),
)


@dataclass(frozen=True)
class Stage:
    """run: one call for `layer`. bytes, flops: of one call."""

    name: str
    layers: Sequence[Any]
    run: Callable[[Any], None]
    num_bytes: int
    flops: int


def make_batch(rows: int, position: int, num_blocks: int, phase: str) -> Batch:
    """One sequence in slot 0, `rows` rows from `position` on; the last row's logits in prefill, else all."""
    wanted = [rows - 1] if phase == "prefill" else range(rows)
    return Batch(
        phase=phase, tokens=np.full(rows, 5, np.int32), positions=np.arange(position, position + rows, dtype=np.int32),
        row_starts=np.asarray([0, rows], np.int32), slots=np.zeros(1, np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None], logit_rows=np.asarray(wanted, np.int32), deferred=phase == "verify")


def stages(model: Model, kv_name: str, rows: int, position: int, phase: str) -> list[Stage]:
    """The stages of a pass, in order. `model.backend.begin` must have seen the pass."""
    backend, config, layers = model.backend, model.config, model.weights.layers
    x, scratch = model.x.rows(rows), model.scratch
    deltas = [layer for layer in layers if isinstance(layer, DeltaLayer)]
    attentions = [layer for layer in layers if isinstance(layer, AttentionLayer)]
    ai, ao, di, do, h = (getattr(scratch, name).rows(rows) for name in
                         ("attention_in", "attention_out", "delta_in", "delta_out", "ffn"))
    logits = 1 if phase == "prefill" else rows

    def matrix(name: str, some: Sequence[Any], run: Callable[[Any], None], weight: Callable[[Any], Any], width: int) -> Stage:
        """width: activations of a row that are read and written, float32."""
        first = weight(some[0])
        return Stage(name, some, run, first.nbytes + 4 * rows * width, 2 * rows * first.shape[0] * first.shape[1])

    def product(layer: Any) -> Any:
        return layer.project

    hidden, ffn = config.hidden_size, config.intermediate_size
    found = []
    if deltas:
        width, state = config.delta_width, config.delta_value_heads * config.delta_head_dim ** 2
        found += [
            matrix("delta project", deltas, lambda w: backend.project(w.norm, w.project, x, di), product,
                   hidden + config.delta_project_width),
            Stage("delta", deltas, lambda w: backend.delta(di, w, do), (1 if phase == "verify" else 2) * 4 * state
                  + 4 * rows * (config.delta_project_width + width), 8 * rows * state),
            matrix("delta out", deltas, lambda w: backend.add_linear(w.output, do, x), lambda w: w.output, width + 2 * hidden)]
    if attentions:
        form, width = format_of(kv_name), config.attention_width
        row_bytes = form.key_row_bytes(config.num_kv_heads, config.head_dim) + form.value_row_bytes(config.num_kv_heads, config.head_dim)
        seen = sum(position + row + 1 for row in range(rows))
        found += [
            matrix("attention project", attentions, lambda w: backend.project(w.norm, w.project, x, ai), product,
                   hidden + config.attention_project_width),
            Stage("attend", attentions, lambda w: backend.attend(ai, w, ao), (position + 2 * rows) * row_bytes
                  + 4 * rows * (config.attention_project_width + width), 4 * seen * width),
            matrix("attention out", attentions, lambda w: backend.add_linear(w.output, ao, x), lambda w: w.output, width + 2 * hidden)]
    found += [
        matrix("gate up", layers, lambda w: backend.gate_up(w.feed_forward.norm, w.feed_forward.gate_up, x, h),
               lambda w: w.feed_forward.gate_up, hidden + ffn),
        matrix("down", layers, lambda w: backend.add_linear(w.feed_forward.down, h, x), lambda w: w.feed_forward.down, ffn + 2 * hidden)]
    head = model.weights.head
    found.append(Stage("head", [model.weights] * 4, lambda w: backend.head(
        w.final_norm, w.head, x, model.final_rows.rows(rows), model.logit_rows.rows(logits)),
        head.nbytes + 4 * (2 * rows * hidden + logits * config.vocab_size), 2 * logits * head.shape[0] * head.shape[1]))
    return found


def timed(model: Model, run: Callable[[], None], groups: int, group: int) -> float:
    """Median seconds of one `run`, in groups that end at a barrier."""
    barrier = model.x.rows(1)
    run()
    model.backend.download(barrier)
    taken = []
    for _ in range(groups):
        start = time.perf_counter()
        for _ in range(group):
            run()
        model.backend.download(barrier)
        taken.append((time.perf_counter() - start) / group)
    return float(np.median(taken))


def passes(settings: Mapping[str, Any]) -> list[tuple[str, int, int, str]]:
    """(name, rows, position, phase) of every pass that is asked for."""
    found = [(f"{rows} rows at {position:,}", rows, position, "verify" if rows > 1 else "decode")
             for position in settings["positions"] for rows in settings["rows"]]
    return found + [(f"prefill {rows:,}", rows, 0, "prefill") for rows in settings["prefill"]]


def measure(model: Model, state: Any, journal: Journal, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Rows for every pass and stage that the journal lacks. state: of one slot, with blocks for the longest pass."""
    for name, rows, position, phase in passes(settings):
        batch = make_batch(rows, position, state.num_blocks, phase)
        repeats = (3, 1) if phase == "prefill" or model.backend.name == "numpy" else (5, 4)
        if not journal.has(f"{name}|whole"):
            def run(batch: Batch = batch) -> None:
                model.forward(batch, state, warm_mtp=False)

            run()
            seconds = timed(model, run if phase == "prefill" else model.backend.record(run), *repeats)
            journal.add(f"{name}|whole", stage="whole pass", **{"pass": name}, seconds=seconds, calls=1, bytes=0, flops=0)
            say(f"{name}: {1000 * seconds:.3f} ms")
        model.backend.begin(batch, state)
        for stage in stages(model, settings["kv"], rows, position, phase):
            key = f"{name}|{stage.name}"
            if not journal.has(key):
                each = _stage_seconds(model, stage, repeats, phase != "prefill")
                journal.add(key, stage=stage.name, **{"pass": name}, seconds=each, calls=1 if stage.name == "head" else len(stage.layers),
                            bytes=stage.num_bytes, flops=stage.flops)


def _stage_seconds(model: Model, stage: Stage, repeats: tuple[int, int], is_recorded: bool) -> float:
    def run() -> None:
        for layer in stage.layers:
            stage.run(layer)

    run()
    return timed(model, model.backend.record(run) if is_recorded else run, *repeats) / len(stage.layers)


def blocks_needed(settings: Mapping[str, Any]) -> int:
    longest = max(position + rows for _, rows, position, _ in passes(settings))
    return -(-longest // BLOCK_POSITIONS)


def max_rows(settings: Mapping[str, Any]) -> int:
    return max([MAX_DECODE_ROWS, *settings["prefill"]])


def make_report(journal: Journal, peaks: Mapping[str, float | None]) -> Report:
    """peaks: gb_per_s and tflop_per_s of this machine, None where they were not measured."""
    whole = {row["pass"]: row["seconds"] for row in journal.rows.values() if row.get("stage") == "whole pass"}
    rows = [_figures(row, peaks, whole) for row in journal.rows.values() if "stage" in row]
    notes = []
    if peaks["gb_per_s"]:
        compute = f"{peaks['tflop_per_s']:,.1f} TFLOP/s" if peaks["tflop_per_s"] else "not measured"
        notes.append(f"Measured peaks of this machine: {peaks['gb_per_s']:,.0f} GB/s, {compute}.")
    notes.append("A stage is replayed over all its layers; a whole pass has no barrier between stages, so the shares' sum differs from 100%.")
    return Report("kernels", journal.stamp, COLUMNS, rows, {"settings": journal.settings, "peaks": dict(peaks)}, notes)


def _figures(row: Mapping[str, Any], peaks: Mapping[str, float | None], whole: Mapping[str, float]) -> dict[str, Any]:
    seconds, num_bytes, flops = row["seconds"], row["bytes"], row["flops"]
    gb, tflop = num_bytes / seconds / 1e9, flops / seconds / 1e12
    total = whole.get(row["pass"])
    return {
        **{name: row[name] for name in ("pass", "stage", "calls", "bytes", "flops")}, "us": 1e6 * seconds,
        "mb": num_bytes / 1e6 or None, "gb_per_s": gb or None, "tflop_per_s": tflop or None,
        "memory_percent": 100 * gb / peaks["gb_per_s"] if peaks["gb_per_s"] and gb else None,
        "compute_percent": 100 * tflop / peaks["tflop_per_s"] if peaks["tflop_per_s"] and tflop else None,
        "share_percent": 100 * row["calls"] * seconds / total if total else None,
    }


def host_peaks(num_floats: int = 32 << 20, width: int = 1024) -> dict[str, float | None]:
    """What NumPy reaches on this host: a dot product longer than the caches, and one large matrix product."""
    data, square = np.ones(num_floats, np.float32), np.ones((width, width), np.float32)
    reading, product = (min(_seconds(run) for _ in range(5)) for run in (lambda: data.dot(data), lambda: square @ square))
    return {"gb_per_s": data.nbytes / reading / 1e9, "tflop_per_s": 2 * width ** 3 / product / 1e12}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
