"""The card of this machine as a plan needs it: chosen by UUID, index or name; what is free, who uses it."""

from __future__ import annotations

from pathlib import Path

from q27app.errors import GpuError, UsageError
from q27app.gpu import GpuInfo, read_card_use, read_driver, read_gpus
from q27app.setup.cards import bandwidth_of
from q27app.setup.plan import Machine, User


def choose_card(wish: str | None, cards: tuple[GpuInfo, ...] | None = None) -> GpuInfo | None:
    """The card that `wish` names: UUID or its beginning, PCI address, index, or part of a name. None without any, or if
    none is named so. Without a wish the card with the most memory. Raises UsageError if several could be meant."""
    cards = read_gpus() if cards is None else cards
    if not cards or wish is None:
        return max(cards, key=lambda card: card.memory_total or 0, default=None)
    text = wish.strip().lower()
    for name in (lambda card: card.uuid, lambda card: card.pci_bus_id, lambda card: str(card.index)):
        exact = [card for card in cards if name(card).lower() == text]
        if exact:
            return exact[0]
    words = text.split()
    found = [card for card in cards if (len(text) >= 8 and card.uuid.lower().startswith(text))
             or all(word in card.name.lower() for word in words)]
    if len(found) > 1:
        names = ", ".join(f"{card.uuid} ({card.name}, {card.pci_bus_id})" for card in found)
        raise UsageError(f"--gpu {wish[:60]!r} could be {len(found)} cards.", f"Give a UUID: {names}.")
    return found[0] if found else None


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
