"""Snapshots of the machine: its NVIDIA cards and its host. The only user of pynvml and psutil.

Nothing here raises: a machine without a driver has no cards, and a figure that a card doesn't tell is None. Snapshots are
immutable and may cross threads. Bytes are bytes, powers watts, temperatures degrees Celsius.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q27app.errors import UsageError

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_DEVICE_FOLDER = Path("/dev")


@dataclass(frozen=True)
class GpuInfo:
    """One card at one moment."""

    index: int
    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_total: int | None
    memory_used: int | None
    memory_free: int | None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    fan_percent: int | None = None
    pci_bus_id: str = ""


@dataclass(frozen=True)
class HostInfo:
    """The host at one moment. process_bytes: resident memory of this process."""

    num_cpus: int
    cpu_percent: float | None
    memory_total: int | None
    memory_available: int | None
    process_bytes: int | None


@dataclass(frozen=True)
class DriverInfo:
    """version: of the driver ("580.65.06"); cuda: newest CUDA that it runs, (major, minor)."""

    version: str
    cuda: tuple[int, int] | None


@dataclass(frozen=True)
class CardUse:
    """Who uses a card. users: (pid, name, bytes), the largest first. pcie: (generation, width) now, and the most it could."""

    users: tuple[tuple[int, str, int], ...] = ()
    has_display: bool = False
    pcie: tuple[int, int] | None = None
    pcie_max: tuple[int, int] | None = None
    power_default_w: float | None = None


def nvidia_device_exists() -> bool:
    """Whether this machine has an NVIDIA device, usable or not. Looks at files first: no driver call where they tell."""
    try:
        if any(_DEVICE_FOLDER.glob("nvidia[0-9]*")) or any(_DRIVER_FOLDER.iterdir()):
            return True
    except OSError:
        pass
    return bool(read_gpus())  # WSL has neither


def read_gpus() -> tuple[GpuInfo, ...]:
    """Every card that the driver shows, in PCI order; () without one."""
    return _with_nvml(_read_all, ())


def card_used(pci_bus_id: str) -> int | None:
    """Bytes in use by everybody on the card at this address; None where the driver does not tell."""
    def read(nvml: Any) -> int:
        return nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())).used

    return _with_nvml(read, None)


def read_driver() -> DriverInfo | None:
    """The driver's versions, or None without a working one."""
    return _with_nvml(_read_driver, None)


def driver_trouble() -> str:
    """Why the driver does not answer, in NVML's words ("Driver/library version mismatch"), or ""."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # the library is absent, or NVML's own kinds
        return str(error) or type(error).__name__
    pynvml.nvmlShutdown()
    return ""


def read_card_use(index: int) -> CardUse:
    """Programs on the card, its link and its display; what the driver does not tell is absent."""
    return _with_nvml(lambda nvml: _read_use(nvml, index), CardUse())


def process_bytes(pid: int) -> int | None:
    """Memory of all cards that a process holds, or None where the driver does not tell (containers, WSL)."""
    sizes = [size for card in read_gpus() for user, _, size in read_card_use(card.index).users if user == pid]
    return sum(sizes) or None


def read_host() -> HostInfo:
    """CPU load since the last call, and memory."""
    import os

    try:
        import psutil

        memory = psutil.virtual_memory()
        return HostInfo(psutil.cpu_count() or 1, psutil.cpu_percent(interval=None), memory.total, memory.available,
                        psutil.Process().memory_info().rss)
    except Exception:  # psutil raises its own kinds and OSErrors on restricted /proc; a snapshot is never worth an error
        return HostInfo(os.cpu_count() or 1, None, None, None, None)


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
        raise UsageError(f"the card {wish[:60]!r} could be {len(found)} cards.", f"Give a UUID: {names}.")
    return found[0] if found else None


def show_only(wish: str) -> None:
    """Before CUDA starts: let this process see the wished card alone, by its UUID, so that it is CUDA's device 0 whatever either
    side's order is. "auto" with one card, or where CUDA_VISIBLE_DEVICES chose already, leaves things alone. Raises GpuError for
    a card that is not there, UsageError for a wish that could be several."""
    from q27app.config import set_process_variable, variable
    from q27app.errors import GpuError

    set_process_variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    cards = read_gpus()
    if wish == "auto" and (len(cards) < 2 or variable("CUDA_VISIBLE_DEVICES")):
        return
    if wish.startswith("MIG-"):  # NVML lists whole cards only
        set_process_variable("CUDA_VISIBLE_DEVICES", wish)
        return
    card = choose_card(None if wish == "auto" else wish, cards)
    if card is None or not card.uuid:
        names = ", ".join(f"{each.uuid} ({each.name})" for each in cards) or "none"
        raise GpuError(f"model.gpu is {wish[:80]!r}, and no card is named so.", f"Cards: {names}. q27app setup chooses one.")
    set_process_variable("CUDA_VISIBLE_DEVICES", card.uuid)


def _with_nvml(read: Callable[[Any], Any], absent: Any) -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, a driver of another version: all mean that no card can be asked
        return absent
    try:
        return read(pynvml)
    except Exception:
        return absent
    finally:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass


def _tried(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = call(*arguments)
    except Exception:  # a counter that this card or driver lacks
        return None
    return value.decode() if isinstance(value, bytes) else value


def _read_all(nvml: Any) -> tuple[GpuInfo, ...]:
    cards = (_read_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return tuple(card for card in cards if card is not None)


def _read_card(nvml: Any, index: int) -> GpuInfo | None:
    handle = _tried(nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    memory = _tried(nvml.nvmlDeviceGetMemoryInfo, handle)
    load = _tried(nvml.nvmlDeviceGetUtilizationRates, handle)
    power = _tried(nvml.nvmlDeviceGetPowerUsage, handle)
    limit = _tried(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    capability = _tried(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _tried(nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = getattr(pci, "busId", b"")
    return GpuInfo(
        index=index,
        uuid=_tried(nvml.nvmlDeviceGetUUID, handle) or "",
        name=_tried(nvml.nvmlDeviceGetName, handle) or f"NVIDIA device {index}",
        compute_capability=tuple(capability) if capability else None,
        memory_total=getattr(memory, "total", None),
        memory_used=getattr(memory, "used", None),
        memory_free=getattr(memory, "free", None),
        utilization_percent=getattr(load, "gpu", None),
        temperature_c=_tried(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        sm_clock_mhz=_tried(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=_tried(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        fan_percent=_tried(nvml.nvmlDeviceGetFanSpeed, handle),
        pci_bus_id=bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id),
    )


def _read_driver(nvml: Any) -> DriverInfo:
    cuda = _tried(nvml.nvmlSystemGetCudaDriverVersion)
    pair = (cuda // 1000, cuda % 1000 // 10) if cuda else None
    return DriverInfo(_tried(nvml.nvmlSystemGetDriverVersion) or "", pair)


def _read_use(nvml: Any, index: int) -> CardUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    found: dict[int, int] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _tried(call, handle) or ():
            found[process.pid] = max(found.get(process.pid, 0), getattr(process, "usedGpuMemory", None) or 0)
    users = sorted(((pid, _process_name(pid), size) for pid, size in found.items()), key=lambda user: -user[2])
    now = (_tried(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle), _tried(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle))
    most = (_tried(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle), _tried(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle))
    default = _tried(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    return CardUse(tuple(users), bool(_tried(nvml.nvmlDeviceGetDisplayActive, handle)),
                   now if all(now) else None, most if all(most) else None, None if default is None else default / 1000)


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()[:40] or "?"
    except OSError:
        return "?"
