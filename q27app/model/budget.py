"""The memory plan: how free bytes become weights, scratch, slots and KV blocks. Pure arithmetic.

The engine that allocates, `/status` and the wizard read the same object, so they cannot disagree. Sizes are bytes,
contexts are tokens. A plan never exceeds `free - margin`; what does not fit raises `OutOfMemory` with a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from q27app.errors import OutOfMemory, UsageError
from q27app.kernels.batch import BLOCK_POSITIONS, MAX_DECODE_ROWS
from q27app.kernels.kv_formats import KV_FORMATS, kv_format as find_kv_format
from q27app.model.config import ModelConfig

MIN_CONTEXT = 2048
MAX_CONTEXT = 655_360
"""Longest window that may be asked for: two and a half times the 27B's native one."""
CONTEXT_STEP = 1024
MAX_CUTS = 480
"""More than the cuts of the longest context on any card (attend_decode.cu)."""
MIN_MOVED_CONTEXT = 32_768
"""Shortest window for which the embedding leaves a card on which the model would else not fit."""


@dataclass(frozen=True)
class MemoryPlan:
    """free: bytes before anything is loaded. margin: bytes left alone. blocks are shared by all slots. runtime: what the driver's
    context and programs took before `free` was read."""

    free: int
    weights: int
    scratch: int
    graphs: int
    margin: int
    slot_bytes: int
    num_slots: int
    block_bytes: int
    num_blocks: int
    kv_format: str
    max_context: int
    reasons: list[str] = field(default_factory=list)
    num_kept_slots: int = 0
    """Slots of kept states, beside those of requests."""
    runtime: int = 0

    @property
    def used(self) -> int:
        """Bytes of everything that the plan allocates."""
        return (self.weights + self.scratch + self.graphs + (self.num_slots + self.num_kept_slots) * self.slot_bytes
                + self.num_blocks * self.block_bytes)

    @property
    def held(self) -> int:
        """Bytes of the card that this process holds in all."""
        return self.used + self.runtime

    def to_dict(self) -> dict:
        return asdict(self) | {"used": self.used, "held": self.held}

    def table(self) -> str:
        """The plan as aligned text, for start-up and errors."""
        rows = [
            ("weights", self.weights),
            ("KV cache", self.num_blocks * self.block_bytes),
            ("state", (self.num_slots + self.num_kept_slots) * self.slot_bytes),
            ("scratch", self.scratch),
            ("graphs", self.graphs),
            ("reserve", self.margin),
            ("free after", self.free - self.used),
            *([("runtime", self.runtime)] if self.runtime else []),
        ]
        return "\n".join(f"  {name:<10} {size / 1e9:9.3f} GB" for name, size in rows)


LACKING_ROWS: dict[tuple[int, int], int] = {(9, 0): 3}
"""Rows that states may lack, by compute capability (kernels/cuda_lacking.py); none elsewhere."""


def slot_bytes(config: ModelConfig, window_rows: int | None = None, lacking_rows: int = 0) -> int:
    """Recurrent state of one sequence: delta states, convolution windows and one hidden row, all float32.

    window_rows: kept inputs of a convolution; None = those that it looks back on, a card keeps one more (delta.cuh).
    lacking_rows: for which there is room beside the states (delta_flow.cu), with four numbers more for each 64 value dims."""
    delta = config.delta_value_heads * config.delta_head_dim**2
    window = (config.conv_width - 1 if window_rows is None else window_rows) * config.conv_channels
    beside = lacking_rows * (config.delta_key_heads + config.delta_value_heads) * config.delta_head_dim
    if lacking_rows:
        beside += 4 * config.delta_value_heads * max(1, config.delta_head_dim // 64)
    return 4 * (config.num_delta_layers * (delta + window + beside) + config.hidden_size)


def block_bytes(config: ModelConfig, kv_format: str) -> int:
    """Keys and values of 64 positions in every layer that has them, the draft layer included."""
    form = find_kv_format(kv_format)
    row = form.key_row_bytes(config.num_kv_heads, config.head_dim)
    row += form.value_row_bytes(config.num_kv_heads, config.head_dim)
    return BLOCK_POSITIONS * config.num_kv_layers * row


def automatic_kv_formats(compute_capability: tuple[int, int] | None, head_dim: int) -> list[str]:
    """KV formats that may be chosen without being asked for, the most exact first; None: the NumPy backend."""
    if compute_capability is None:
        return ["fp32"]
    return [name for name in kv_formats_for(compute_capability, head_dim) if KV_FORMATS[name].is_automatic]


def kv_formats_for(compute_capability: tuple[int, int], head_dim: int | None = None) -> list[str]:
    """Names of the KV formats that a card of this capability computes with, the most exact first; those that code heads of
    head_dim numbers, if that is given."""
    return [form.name for form in KV_FORMATS.values() if form.kernel_code is not None
            and compute_capability >= form.min_compute_capability and (head_dim is None or form.fits(head_dim))]


PREFILL_ROWS, LARGE_PREFILL_ROWS, LARGE_CARD_BYTES = 1024, 2048, 40 << 30
"""Rows of a prefill pass on a card, and on one with so much free memory: more rows fill its multiprocessors better."""


def card_prefill_rows(free: int) -> int:
    """Rows of a prefill pass where nobody says. free: bytes of the card before anything is loaded."""
    return LARGE_PREFILL_ROWS if free >= LARGE_CARD_BYTES else PREFILL_ROWS


def scratch_bytes(config: ModelConfig, max_rows: int, max_logit_rows: int) -> int:
    """Activations of a pass (`model.layers.Scratch` and `model.forward.Model`), float32."""
    per_row = (config.attention_project_width + config.attention_width + config.delta_project_width
               + config.delta_width + config.intermediate_size + 2 * config.hidden_size)
    if config.num_mtp_layers:
        per_row += 3 * config.hidden_size
    return 4 * (max_rows * per_row + max_logit_rows * config.vocab_size)


def card_scratch_bytes(config: ModelConfig, max_rows: int, max_logit_rows: int, max_record_rows: int = MAX_DECODE_ROWS) -> int:
    """What a card takes beside weights, slots and blocks, before anything is there to ask: activations, their fp16 copies, what
    the stages of a layer share, sums of attention's cuts, the sampler's work and the rows that wait for a commit. A few
    percent too much rather than too little."""
    halves = 2 * max(config.intermediate_size, 2 * config.hidden_size, config.attention_width, config.delta_width)
    ready = -(-config.intermediate_size // 256) * 576   # cuda_ready.ready_bytes of a row
    attended = 2 * config.attention_width + 4 * config.num_heads + -(-config.attention_width // 256) * 576   # queries, and rows left ready
    shared = max(4 * max(2 * config.hidden_size, config.delta_project_width, config.attention_width), ready, attended)
    cuts = 4 * MAX_DECODE_ROWS * MAX_CUTS * config.num_heads * (config.head_dim + 2)
    sampler = (4 * max_logit_rows + max_logit_rows // 8) * config.vocab_size
    record = 4 * config.num_delta_layers * max_record_rows * config.delta_project_width
    tables = 4 * 2 * 64 * (MAX_CONTEXT // BLOCK_POSITIONS) + 4 * 64 * config.delta_width   # and words of heads (cuda_ready.HEAD_ROWS)
    return scratch_bytes(config, max_rows, max_logit_rows) + max_rows * (halves + shared) + cuts + sampler + record + tables + (8 << 20)


def plan_memory(
    config: ModelConfig, *, free: int, weights: int, scratch: int, kv_format: str, graphs: int = 0, margin: int = 0,
    context: int | None = None, slots: int | None = None, max_auto_slots: int = 1, window_rows: int | None = None, runtime: int = 0,
    lacking_rows: int = 0,
) -> MemoryPlan:
    """Size slots and context. context, slots: wishes; None = auto. runtime: bytes that are no longer among the free ones. window_rows, lacking_rows:
    see `slot_bytes`.

    auto context: the native window, or the largest multiple of 1,024 that fits every slot. A wish that does not fit is
    refused with the largest that would. Windows above the native one are allowed when asked for, with a reason that warns.
    """
    reasons: list[str] = []
    if context is not None and context < BLOCK_POSITIONS:
        raise UsageError(f"context is {context} tokens, expected at least {BLOCK_POSITIONS}.")
    if context is not None and context > max(MAX_CONTEXT, config.max_context):
        raise UsageError(f"context is {context} tokens, expected at most {max(MAX_CONTEXT, config.max_context)}.")
    if slots is not None and not 1 <= slots <= 4096:
        raise UsageError(f"slots is {slots}, expected 1 to 4096.")
    per_slot, per_block = slot_bytes(config, window_rows, lacking_rows), block_bytes(config, kv_format)
    num_slots = slots or max_auto_slots
    room = free - margin - weights - scratch - graphs

    def largest(count: int) -> int:
        blocks = (room - count * per_slot) // per_block // count if per_block else 0
        return max(0, blocks) * BLOCK_POSITIONS

    target = config.max_context if context is None else context
    while slots is None and num_slots > 1 and largest(num_slots) < target:
        num_slots -= 1
    if slots is None:
        reasons.append(f"slots: {num_slots} (auto, of at most {max_auto_slots})")
    else:
        reasons.append(f"slots: {num_slots} (asked for)")
    fits = largest(num_slots)
    if context is None:
        max_context = min(config.max_context, fits // CONTEXT_STEP * CONTEXT_STEP if fits < config.max_context else fits)
        why = "the native window" if max_context == config.max_context else "what fits"
        reasons.append(f"context: {max_context} (auto: {why})")
    else:
        max_context = context
        reasons.append(f"context: {max_context} (asked for)")
        if max_context > config.max_context:
            reasons.append(f"context: beyond the native window of {config.max_context}; quality is not warranted there")
    blocks = num_slots * -(-max_context // BLOCK_POSITIONS)
    plan = MemoryPlan(free, weights, scratch, graphs, margin, per_slot, num_slots, per_block, blocks, kv_format,
                      max_context, reasons, runtime=runtime)
    minimum = min(MIN_CONTEXT, config.max_context) if context is None else context
    if fits < minimum:
        best = fits // BLOCK_POSITIONS * BLOCK_POSITIONS
        raise OutOfMemory(
            f"{config.name} with a context of {max(max_context, minimum)} tokens in {num_slots} slot(s) does not fit: "
            f"{free / 1e9:.2f} GB are free, largest context that fits is {best} tokens.\n{plan.table()}",
            "Choose a smaller --ctx, fewer --slots, a smaller tier or KV format, or free memory on the card.",
        )
    return plan


def with_shared_slots(plan: MemoryPlan, most: int) -> MemoryPlan:
    """More slots, `most` at most, for half of what the plan leaves. They bring no blocks: a request waits while others hold too many."""
    count = min(most, plan.num_slots + max(0, plan.free - plan.margin - plan.used) // 2 // max(1, plan.slot_bytes))
    if count <= plan.num_slots:
        return plan
    reason = f"slots: {count} in all, which share the blocks of {plan.num_slots} whole window{'s' * (plan.num_slots > 1)}"
    return replace(plan, num_slots=count, reasons=[*plan.reasons, reason])


def place_embedding(plan: Callable[[int], MemoryPlan], weights: int, embed_bytes: int, wish: str, wanted: int) -> tuple[MemoryPlan, bool]:
    """(memory plan, whether the embedding table stays in host memory). plan: from bytes of weights on the card. embed_bytes: of
    a table that may stay there, 0 if none may. wish: host, device or auto, which moves it where that buys window, up to
    `wanted` tokens; where nothing fits otherwise, only for a window that is worth it. Raises OutOfMemory."""
    if wish == "host" and embed_bytes:
        return plan(weights - embed_bytes), True
    refusal = None
    try:
        there = plan(weights)
    except OutOfMemory as error:
        there, refusal = None, error
    if wish == "auto" and embed_bytes and (there is None or there.max_context < wanted):
        try:
            moved = plan(weights - embed_bytes)
        except OutOfMemory:
            moved = None
        if moved is not None and moved.max_context > (there.max_context if there else min(MIN_MOVED_CONTEXT, wanted) - 1):
            reason = f"embedding: in host memory (auto: {embed_bytes / 1e9:.2f} GB of the card become window)"
            return replace(moved, reasons=[*moved.reasons, reason]), True
    if there is None:
        raise refusal
    return there, False


def plan_with_best_format(config: ModelConfig, formats: Sequence[str], **sizes: Any) -> MemoryPlan:
    """`plan_memory` with the first of `formats` that holds the wished window, or the native one; else with the one that
    holds the longest. sizes: the other arguments of `plan_memory`. Raises OutOfMemory where none fits."""
    wanted = sizes.get("context") or config.max_context
    best: MemoryPlan | None = None
    refusal: OutOfMemory | None = None
    for name in formats:
        try:
            plan = plan_memory(config, kv_format=name, **sizes)
        except OutOfMemory as error:
            refusal = error
            continue
        if best is None or min(plan.max_context, wanted) > min(best.max_context, wanted):
            best = plan
    if best is None:
        raise refusal or UsageError("no KV format can be used here.")
    why = "the most exact that holds the window" if best.max_context >= wanted else "the longest window"
    return replace(best, reasons=[f"KV format: {best.kv_format} (auto: {why})", *best.reasons])
