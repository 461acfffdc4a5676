"""Findings for machines that are not in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from q27app import cli, gpu
from q27app.gpu import CardUse, DriverInfo, GpuInfo
from q27app.setup import doctor


@pytest.fixture
def machine(monkeypatch):
    """machine(...) fakes what the driver tells."""
    def fake(device=True, driver=None, trouble="", cards=(), use=CardUse()):
        monkeypatch.setattr(gpu, "nvidia_device_exists", lambda: device)
        monkeypatch.setattr(gpu, "read_driver", lambda: driver)
        monkeypatch.setattr(gpu, "driver_trouble", lambda: trouble)
        monkeypatch.setattr(gpu, "read_gpus", lambda: cards)
        monkeypatch.setattr(gpu, "read_card_use", lambda index: use)

    return fake


def found():
    return {finding.id: finding for finding in doctor.run_doctor()}


def test_a_machine_without_a_device_is_warned_and_no_more(machine, capsys):
    machine(device=False)
    assert found()["GPU-NONE"].severity == "warning" and "CUDA-NVCC" not in found()
    assert cli.run(["doctor"]) == 0 and cli.run(["doctor", "--strict"]) == 1
    assert "GPU-NONE" in capsys.readouterr().out


def test_a_driver_that_was_updated_wants_a_reboot(machine):
    machine(trouble="Driver/library version mismatch")
    finding = found()["GPU-DRIVER-MISMATCH"]
    assert finding.severity == "failure" and finding.fix == "sudo reboot"


def test_a_device_without_a_driver_is_a_failure_not_a_cpu(machine):
    machine(trouble="NVML Shared Library Not Found")
    assert found()["GPU-DRIVER"].severity == "failure" and cli.run(["doctor"]) == 1


def test_without_path_and_headers_there_are_two_findings(machine, monkeypatch):
    machine(driver=DriverInfo("580.65", (13, 0)))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(doctor, "TOOLKITS", ())
    assert {"CUDA-NVCC", "CUDA-HEADERS", "CUDA-COMPILER"} <= set(found())


def test_cards_are_looked_at(machine):
    card = GpuInfo(0, "GPU-0011aabb", "NVIDIA GeForce RTX 3090", (8, 6), 24 << 30, 0, 20 << 30, power_limit_w=250.0)
    old = GpuInfo(1, "GPU-1", "GTX 1080", (6, 1), 8 << 30, 0, 8 << 30)
    machine(driver=DriverInfo("580.65", (13, 0)), cards=(card, old),
            use=CardUse(((7, "game", 4 << 30),), pcie=(4, 4), pcie_max=(4, 16), power_default_w=350.0))
    findings = found()
    assert {"GPU-CARD", "GPU-USERS", "GPU-POWER", "GPU-PCIE", "GPU-TOO-OLD"} <= set(findings)
    assert findings["GPU-POWER"].fix == "sudo nvidia-smi -i 0 -pl 350"


@pytest.mark.parametrize("nvcc, driver, capability, needle", [
    ((13, 0), (13, 0), (9, 0), ""), ((13, 1), (13, 0), (8, 6), ""), ((12, 9), (13, 0), (12, 0), ""), ((13, 0), (12, 4), (8, 6), "newer than the driver"),
    ((12, 4), (12, 8), (12, 0), "it takes 12.8"), ((11, 4), (12, 0), (8, 9), "it takes 11.8"), ((12, 0), None, None, "")])
def test_compilers_are_held_against_driver_and_card(nvcc, driver, capability, needle):
    verdict = doctor.compiler_verdict(nvcc, driver, capability)
    assert needle in verdict and bool(verdict) == bool(needle)


def test_the_compiler_is_asked_for_its_version(machine, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    machine(driver=DriverInfo("550", (12, 4)), cards=(GpuInfo(0, "GPU-1", "A10", (8, 6), 24 << 30, 0, 20 << 30),))
    assert "13.0 is newer" in found()["CUDA-VERSIONS"].evidence
    machine(driver=DriverInfo("580", (13, 0)), cards=(GpuInfo(0, "GPU-1", "A10", (8, 6), 24 << 30, 0, 20 << 30),))
    assert "CUDA-VERSIONS-OK" in found() and found()["KERNELS"].fix == "q27app kernels build"
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert found()["CUDA-VERSIONS"].severity == "failure"


def test_a_clock_of_another_decade_is_told():
    assert doctor.check_clock(0.0)[0].id == "CLOCK" and doctor.check_clock()[0].id == "CLOCK-OK"


def test_a_service_of_another_version_is_told(machine):
    from q27app.setup.service import unit_path

    machine(device=False)
    assert found()["SERVICE-NONE"].severity == "ok"
    unit_path().parent.mkdir(parents=True)
    unit_path().write_text("[Unit]\n")
    assert found()["SERVICE-UNIT"].fix == "q27app service install"


def test_a_damaged_model_is_a_failure(machine, monkeypatch, tmp_path):
    damaged = tmp_path / "m.q27"
    data = bytearray(Path(doctor.demo_model()).read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    monkeypatch.setenv("Q27APP_MODEL__PATH", str(damaged))
    machine(device=False)
    assert found()["MODEL"].severity == "failure" and "MODEL-DEMO-OK" in found()


def test_every_id_is_documented():
    import re

    source = Path(doctor.__file__).read_text()
    ids = set(re.findall(r'"([A-Z]+(?:-[A-Z]+)*)", "(?:ok|warning|failure)"', source)) | {"CUDA-PYCUDA", "CUDA-BINDINGS", "MODEL", "SERVICE"}
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert len(ids) > 20 and [name for name in sorted(ids) if f"`{name}`" not in text] == []


def test_every_complaint_has_a_fix(machine):
    machine()
    assert [item for item in doctor.run_doctor() if item.severity == "failure" and not item.fix] == []


def test_the_bundle_holds_no_secrets(machine, tmp_path, monkeypatch):
    machine(trouble=f"{Path.home()}/x sk-abcdefghij GPU-0123456789ab")
    monkeypatch.setenv("Q27APP_SERVER__API_KEYS", "very-secret")
    assert cli.run(["doctor", "--bundle", str(tmp_path / "b")]) == 1
    text = (tmp_path / "b").read_text()
    json.loads(text)
    assert not [word for word in ("sk-abc", "very-secret", "0123456789ab", f"{Path.home()}/") if word in text]
    assert "Q27APP_SERVER__API_KEYS" in text
