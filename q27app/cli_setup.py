"""Commands about this machine: plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from q27app.errors import GpuError, UsageError

if TYPE_CHECKING:
    from q27app.setup.plan import Machine, Wishes

MAX_VRAM = 4096


@click.command()
@click.option("--gpu", metavar="NAME", help="A card of this machine (index, UUID, part of its name), else a known card's name.")
@click.option("--vram", type=float, metavar="GB", help="Free memory to plan with, GiB.")
@click.option("--arch", metavar="86", help="Compute capability to plan for.")
@click.option("--model", "-m", metavar="M", help="A .q27 to plan for; default: the 27B in the best tier that fits.")
@click.option("--generation", type=click.Choice(["3.6", "3.8"]), default="3.6", show_default=True)
@click.option("--tier", metavar="T", help="Tier to plan with.")
@click.option("--kv", metavar="F", help="KV format to plan with.")
@click.option("--ctx", type=click.IntRange(64), metavar="N", help="Window to plan for, tokens.")
@click.option("--slots", type=click.IntRange(1, 64), metavar="N", help="Requests at once.")
@click.option("--embed", type=click.Choice(["auto", "device", "host"]), default="auto", show_default=True,
              help="Where the embedding table lies.")
@click.option("--prefer", type=click.Choice(["speed", "balanced", "quality", "window"]), default="balanced", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(gpu: str | None, vram: float | None, arch: str | None, model: str | None, generation: str, tier: str | None,
         kv: str | None, ctx: int | None, slots: int | None, embed: str, prefer: str, as_json: bool) -> None:
    """Say what a card should run, and why.

    Without options for the card of this machine. Nothing is loaded and nothing is changed.
    """
    from q27app.paths import resolve_model
    from q27app.setup.checkpoints import checkpoint_of
    from q27app.setup.plan import TooSmall, Wishes, make_plan
    from q27app.setup.plan_text import plan_dict, plan_text

    wishes = Wishes(tier, kv, ctx, slots, generation, prefer, checkpoint_of(resolve_model(model)) if model else None, embed)
    try:
        made = make_plan(_machine(gpu, vram, arch), wishes)
    except TooSmall as error:
        if error.fits is not None and as_json:
            click.echo(json.dumps(plan_dict(error.fits) | {"instead": error.message}))
        elif error.fits is not None:
            click.echo(plan_text(error.fits))
        raise
    click.echo(json.dumps(plan_dict(made)) if as_json else plan_text(made))


def _machine(gpu: str | None, vram: float | None, arch: str | None) -> Machine:
    """The card of this machine, a known one, or one made of figures. Raises UsageError or GpuError."""
    from q27app.setup.cards import GIB, find_card, parse_arch
    from q27app.gpu import choose_card
    from q27app.setup.machine import read_machine
    from q27app.setup.plan import Machine

    if vram is not None and not 0 < vram <= MAX_VRAM:
        raise UsageError(f"--vram is {vram:g}, expected GiB above 0 and at most {MAX_VRAM}.")
    if vram is not None and arch is not None and gpu is None:
        return Machine(f"a card of {vram:g} GiB", parse_arch(arch), int(vram * GIB))
    card = choose_card(gpu)
    if card is not None:
        machine = read_machine(card)
        name, capability, free = machine.name, machine.capability, machine.free
        if vram is None and arch is None:
            return machine
    elif gpu is not None:
        known = find_card(gpu)
        name, capability, free = known.name, known.capability, int(known.free_gib * GIB)
    elif vram is not None:
        raise UsageError("--vram alone does not say what the card can do.", "Add --arch, such as 86, or name it with --gpu.")
    else:
        raise GpuError("no NVIDIA card answers on this machine.",
                       "Plan for another with --gpu NAME, or --vram GB --arch 86; q27app doctor says what is missing.")
    return Machine(name, parse_arch(arch) if arch else capability, int(vram * GIB) if vram is not None else free)
