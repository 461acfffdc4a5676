"""Snapshots never raise: no driver, half a driver, a card that tells little."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from q27app import gpu
from q27app.errors import GpuError, UsageError


class FakeNvml:
    """A driver with one card that answers some questions; NVMLError for the rest."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, init_works: bool = True) -> None:
        self.init_works = init_works
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.init_works:
            raise self.NVMLError("driver not loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA Test Card"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=24 << 30, used=1 << 30, free=23 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, 9)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 71_500

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def __getattr__(self, name: str):
        def refuse(*arguments):
            raise self.NVMLError(f"{name} is not supported")
        return refuse


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_card_that_tells_little_leaves_none(nvml):
    (card,) = gpu.read_gpus()
    assert (card.name, card.compute_capability, card.memory_free) == ("NVIDIA Test Card", (8, 9), 23 << 30)
    assert card.power_w == 71.5
    assert card.temperature_c is None and card.utilization_percent is None and card.pci_bus_id == ""
    assert not nvml.is_open


def test_the_driver_names_its_newest_cuda(nvml):
    assert gpu.read_driver() == gpu.DriverInfo("580.65.06", (13, 1))


def test_without_a_driver_there_are_no_cards(nvml):
    nvml.init_works = False
    assert gpu.read_gpus() == ()
    assert gpu.read_driver() is None


def test_without_the_library_there_are_no_cards(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.read_gpus() == ()


def test_a_device_file_is_enough_to_exist(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu, "_DRIVER_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(gpu, "_DEVICE_FOLDER", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not gpu.nvidia_device_exists()
    (tmp_path / "nvidia3").touch()
    assert gpu.nvidia_device_exists()


def test_a_card_in_the_drivers_folder_is_enough_to_exist(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu, "_DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(gpu, "_DRIVER_FOLDER", tmp_path)
    assert not gpu.nvidia_device_exists()
    (tmp_path / "0000:01:00.0").mkdir()
    assert gpu.nvidia_device_exists()


def test_the_host_tells_cpus_and_memory():
    host = gpu.read_host()
    assert host.num_cpus >= 1
    assert 0 < host.memory_available <= host.memory_total
    assert host.process_bytes > 1 << 20


@pytest.fixture
def shown(monkeypatch):
    """shown(wish, cards=..., chosen="") -> CUDA_VISIBLE_DEVICES after it. Two cards, the larger one second for NVML."""
    small = gpu.GpuInfo(0, "GPU-aaaa1111", "RTX 3060", (8, 6), 12 << 30, 0, 12 << 30, pci_bus_id="00000000:41:00.0")
    large = gpu.GpuInfo(1, "GPU-bbbb2222", "RTX 4090", (8, 9), 24 << 30, 0, 24 << 30, pci_bus_id="00000000:01:00.0")

    def ask(wish, cards=(small, large), chosen=""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
        monkeypatch.setattr(gpu, "read_gpus", lambda: cards)
        gpu.show_only(wish)
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        return os.environ["CUDA_VISIBLE_DEVICES"]

    ask.one = (small,)
    return ask


def test_the_process_sees_the_wished_card_alone_whatever_the_order(shown):
    assert shown("GPU-aaaa1111") == "GPU-aaaa1111" and shown("0") == "GPU-aaaa1111"
    assert shown("00000000:01:00.0") == "GPU-bbbb2222" == shown("rtx 4090") == shown("auto")
    assert shown("MIG-1234") == "MIG-1234"


def test_auto_leaves_one_card_and_a_choice_of_the_user_alone(shown):
    assert shown("auto", cards=shown.one) == "" and shown("auto", chosen="1") == "1"


def test_a_card_that_is_not_there_is_refused_with_those_that_are(shown):
    with pytest.raises(GpuError, match="no card is named so") as caught:
        shown("GPU-cccc3333")
    assert "GPU-aaaa1111 (RTX 3060)" in caught.value.hint
    with pytest.raises(UsageError, match="could be 2 cards"):
        shown("rtx")
