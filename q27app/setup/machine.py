"""The card of this machine as a plan needs it: chosen by UUID, index or name; what is free, who uses it."""

from __future__ import annotations

from pathlib import Path

from q27app.errors import GpuError
from q27app.gpu import GpuInfo, read_card_use, read_driver
from q27app.setup.cards import bandwidth_of
from q27app.setup.plan import Machine, User


def read_machine(card: GpuInfo) -> Machine:
    """What a plan needs of a card. Raises GpuError if the driver does not tell."""
    if card.compute_capability is None or card.memory_free is None:
        raise GpuError(f"{card.name}: the driver tells neither capability nor free memory.", "Check nvidia-smi.")
    use = read_card_use(card.index)
    driver = read_driver()
    return Machine(
        card.name, card.compute_capability, card.memory_free, card.memory_total or 0, card.uuid,
        driver.cuda if driver else None, tuple(User(*user) for user in use.users), use.has_display, is_wsl(),
        bandwidth_of(card.name))


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Linux below Windows, where the driver does not show other programs' memory."""
    return (root / "dev/dxg").exists()
