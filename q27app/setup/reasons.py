"""Words for a plan: why each choice was made, what else would fit and at what price, what to look out for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q27app.model.budget import KV_FORMATS, kv_formats_for
from q27app.setup.checkpoints import PERPLEXITY

if TYPE_CHECKING:
    from q27app.model.budget import MemoryPlan
    from q27app.setup.plan import Alternative, Choice, Plan, _Search

REDUCED_CONTEXTS = (131_072, 65_536, 32_768)


def choices(search: _Search, tier: str, kv: str, memory: MemoryPlan) -> tuple[Choice, ...]:
    """tier, KV format, context, slots, drafts."""
    from q27app.setup.plan import Choice

    wishes, native = search.wishes, search.native
    asked = "asked for"
    at_native = memory.max_context >= native
    context_why = asked if wishes.context else ("the native window" if at_native else
                                                f"what fits; the native window is {native} tokens")
    if memory.num_slots > 1:
        slots_why = "each with this window"
    else:
        slots_why = "a second one would shorten the window" if not at_native else "a second native window does not fit"
    drafts = search.checkpoint.config.num_mtp_layers
    return (
        Choice("model", search.checkpoint.name, "the file given" if search.checkpoint.path else
               f"generation {search.checkpoint.generation}" if not wishes.checkpoint else "the largest of the family that fits"),
        Choice("tier", tier, _tier_reason(search, tier)),
        Choice("KV format", kv, asked if wishes.kv else _kv_reason(search, kv, at_native)),
        Choice("context", str(memory.max_context), context_why),
        _embedding(search, tier, kv, memory),
        Choice("slots", str(memory.num_slots), asked if wishes.slots else slots_why),
        Choice("drafts", "on" if drafts else "off", "the model's own draft layer, at a depth that follows how many are accepted"
               if drafts else "the checkpoint has no draft layer"),
    )


def _embedding(search: _Search, tier: str, kv: str, memory: MemoryPlan) -> Choice:
    from q27app.setup.plan import Choice

    size = search.checkpoint.embed_bytes(tier)
    if search.in_host[tier, kv, memory.max_context, memory.num_slots]:
        why = "asked for" if search.wishes.embed == "host" else f"{size / 1e9:.2f} GB of the card become window"
        return Choice("embedding", "host", why)
    return Choice("embedding", "device", "it is the head as well" if not size else "asked for" if search.wishes.embed == "device" else
                  "moving it to host memory would buy no window")


def _tier_reason(search: _Search, tier: str) -> str:
    size = f"{search.checkpoint.bytes_of(tier) / 1e9:.2f} GB"
    if search.checkpoint.path:
        return f"the file's own, {size}"
    if search.wishes.tier:
        return f"asked for, {size}"
    tiers = search.tiers()
    if tier == tiers[-1]:
        why = {"speed": "the fastest", "balanced": "the smallest that is as good as the best",
               "quality": "the best", "window": "the smallest"}[search.wishes.prefer]
        return f"{why}, {size}"
    return f"a larger one would shorten the window, {size}"


def _kv_reason(search: _Search, kv: str, at_native: bool) -> str:
    note = KV_FORMATS[kv].note
    if len(search.formats) == 1:
        return f"{note}; the smallest there is"
    if at_native:
        return f"{note}; the most exact that holds the native window"
    return f"{note}; the longest window"


def alternatives(search: _Search, plan: Plan) -> tuple[Alternative, ...]:
    """Other configurations that fit: longer window, other formats, better and faster tiers, more slots."""
    from q27app.setup.plan import Alternative

    found: list[Alternative] = []

    def add(tier: str, kv: str, context: int | None, slots: int | None) -> None:
        memory = search.tried(tier, kv, context, slots)
        if memory is None or (tier, kv, memory.max_context, memory.num_slots) == (plan.tier, plan.kv, plan.context, plan.slots):
            return
        entry = Alternative(tier, kv, memory.max_context, memory.num_slots, _costs(search, plan, tier, kv, memory))
        if entry not in found:
            found.append(entry)

    for kv in kv_formats_for(plan.machine.capability, search.checkpoint.config.head_dim) if not search.wishes.kv else ():
        if kv != plan.kv:
            add(plan.tier, kv, None, 1)
    if not search.checkpoint.path:
        table = PERPLEXITY.get(search.checkpoint.generation, PERPLEXITY["3.6"])
        for tier in sorted(table, key=search.checkpoint.bytes_of):
            if tier != plan.tier and (tier == "q4s" or table[tier] < table.get(plan.tier, 99)):
                add(tier, plan.kv, None, 1)
    for slots in (2, 4):
        if slots > plan.slots:
            for context in REDUCED_CONTEXTS:
                if context < plan.context and search.tried(plan.tier, plan.kv, context, slots):
                    add(plan.tier, plan.kv, context, slots)
                    break
    return tuple(found)


def _costs(search: _Search, plan: Plan, tier: str, kv: str, memory: MemoryPlan) -> str:
    parts = []
    if kv != plan.kv:
        parts.append(KV_FORMATS[kv].note)
    if memory.num_slots != plan.slots:
        parts.append(f"{memory.num_slots} requests at once" if memory.num_slots > 1 else "one request at a time")
    if memory.max_context != plan.context:
        parts.append(f"window {memory.max_context - plan.context:+d} tokens")
    if tier != plan.tier:
        checkpoint = search.checkpoint
        share = checkpoint.streamed(tier) / checkpoint.streamed(plan.tier)
        parts.append(f"{share:.2f} times the time for a token")
        table = PERPLEXITY.get(checkpoint.generation, {})
        if tier in table and plan.tier in table and checkpoint.config.hidden_size == 5120:
            parts.append(f"perplexity {table[tier]:.3f} instead of {table[plan.tier]:.3f}")
    return ", ".join(parts)


def warnings(search: _Search, plan: Plan) -> tuple[str, ...]:
    """What the user should know before relying on it."""
    from q27app.setup.plan import DESKTOP_BYTES, SHORT_CONTEXT, WSL_BYTES

    machine, found = plan.machine, []
    if plan.context < SHORT_CONTEXT and search.wishes.context is None:
        found.append(f"a window of {plan.context} tokens is short for a coding agent, which needs about {SHORT_CONTEXT}.")
    if plan.context > search.native:
        found.append(f"the window is beyond the native {search.native} tokens; quality is not warranted there.")
    if machine.has_display:
        found.append(f"a desktop runs on this card: {DESKTOP_BYTES / 1e9:.1f} GB are kept for it.")
    if machine.is_wsl:
        found.append(f"under WSL other programs' memory is not shown: {WSL_BYTES / 1e9:.1f} GB are kept for them.")
    for user in machine.users[:4]:
        found.append(f"{user.name} (process {user.pid}) holds {user.nbytes / 1e9:.1f} GB of this card.")
    if machine.capability >= (12, 0) and machine.driver_cuda and machine.driver_cuda < (12, 8):
        found.append(f"the driver runs CUDA {'.'.join(map(str, machine.driver_cuda))}; this card needs 12.8 or newer.")
    return tuple(found)
