"""The models that can be named, with what their headers say and whether this machine's card holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from q27app.errors import Q27Error
from q27app.gpu import choose_card, read_gpus
from q27app.paths import DEMO, demo_model, installed_models
from q27app.setup.checkpoints import Checkpoint, checkpoint_of
from q27app.setup.machine import read_machine
from q27app.setup.plan import Machine, Wishes, make_plan


@dataclass(frozen=True)
class Row:
    """fits: None without a card. why: the window it would have, or what is in the way."""

    name: str
    path: str
    bytes: int
    tier: str
    fits: bool | None
    why: str


def list_models() -> list[Row]:
    """The bundled model first, then those of the models folder. A damaged file is listed with what is wrong with it."""
    card = choose_card(None, read_gpus())
    try:
        machine = read_machine(card) if card is not None else None
    except Q27Error:
        machine = None
    found = ([(DEMO, demo_model())] if demo_model().is_file() else []) + [(path.stem, path) for path in installed_models()]
    return [_row(name, path, machine) for name, path in found]


def _row(name: str, path: Path, machine: Machine | None) -> Row:
    size = path.stat().st_size
    try:
        checkpoint = checkpoint_of(path)
    except (Q27Error, OSError) as error:
        return Row(name, str(path), size, "damaged", False, str(error).splitlines()[0])
    fits, why = fit(checkpoint, machine)
    return Row(name, str(path), size, checkpoint.tier, fits, why)


def fit(checkpoint: Checkpoint, machine: Machine | None) -> tuple[bool | None, str]:
    """(whether the card holds it, with which window or why not)."""
    if machine is None:
        return None, "no NVIDIA card answers"
    try:
        plan = make_plan(machine, Wishes(checkpoint=checkpoint))
    except Q27Error as error:
        return False, error.message.splitlines()[0]
    return True, f"{plan.context} tokens x {plan.slots} on {machine.name}"
