"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from q27app.setup.plan import RUNTIME_BYTES, Plan


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A JSON-ready description; "schema" counts changes of its shape."""
    machine = asdict(plan.machine)
    return {
        "schema": 1, "machine": machine,
        "model": {"name": plan.checkpoint.name, "path": plan.checkpoint.path, "generation": plan.checkpoint.generation,
                  "tier": plan.tier, "bytes": plan.checkpoint.bytes_of(plan.tier)},
        "kv": plan.kv, "context": plan.context, "slots": plan.slots, "peak": plan.peak, "reserve": plan.reserve,
        "runtime": RUNTIME_BYTES, "memory": plan.memory.to_dict(), "settings": plan.settings(),
        "choices": [asdict(choice) for choice in plan.choices],
        "alternatives": [asdict(entry) for entry in plan.alternatives], "warnings": list(plan.warnings),
    }


def plan_text(plan: Plan) -> str:
    """Choices with reasons, the memory, alternatives, warnings."""
    machine = plan.machine
    number = ".".join(map(str, machine.capability))
    lines = [f"{machine.name}, compute capability {number}, {machine.free / 1e9:.2f} GB free", ""]
    width = max(len(choice.value) for choice in plan.choices)
    lines += [f"  {choice.what:<10} {choice.value:<{width}}  {choice.reason}" for choice in plan.choices]
    lines += ["", *(f"  {name:<10} {size / 1e9:8.2f} GB" for name, size in budget_rows(plan))]
    if plan.alternatives:
        lines += ["", "Also fits:"]
        lines += [f"  {entry.tier:<8} {entry.kv:<8} {entry.context:>7} tokens x {entry.slots}  {entry.costs}"
                  for entry in plan.alternatives]
    lines += ["", *(f"Note: {text}" for text in plan.warnings)] if plan.warnings else []
    return "\n".join(lines)


def budget_rows(plan: Plan) -> tuple[tuple[str, int], ...]:
    """(what, bytes) of the card's free memory; the last row is what is left."""
    memory = plan.memory
    return (("weights", memory.weights), ("KV cache", memory.num_blocks * memory.block_bytes),
            ("state", memory.num_slots * memory.slot_bytes), ("scratch", memory.scratch), ("runtime", RUNTIME_BYTES),
            ("reserve", plan.reserve), ("left", plan.machine.free - plan.peak - plan.reserve))


def table_line(plan: Plan) -> str:
    """One line: card, free, model, tier, KV format, window, slots, peak."""
    machine = plan.machine
    return (f"{machine.name:<26} sm_{machine.capability[0]}{machine.capability[1]:<3} {machine.free / 2**30:6.1f} GiB  "
            f"{plan.checkpoint.name:<12} {plan.tier:<7} {plan.kv:<7} {plan.context:>7} x {plan.slots}  "
            f"peak {plan.peak / 1e9:6.2f} GB, reserve {plan.reserve / 1e9:5.2f} GB")
