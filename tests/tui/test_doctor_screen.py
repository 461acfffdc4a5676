"""The doctor's findings on a screen: at every size, the fix to copy, looked for again."""

from __future__ import annotations

import pytest

from q27app.setup import doctor
from q27app.setup.doctor import Finding

FINDINGS = [
    Finding("PYTHON", "ok", "3.12.4 at /home/ada/.local/share/q27app/venv/bin/python"),
    Finding("GPU-DRIVER-OK", "ok", "driver 580.65, CUDA up to 13.0"),
    Finding("GPU-POWER", "warning", "NVIDIA GeForce RTX 5090 GPU-1: limited to 400 of 575 W", "sudo nvidia-smi -i 0 -pl 575"),
    Finding("CUDA-NVCC", "failure", "no nvcc on PATH or in /usr/local/cuda", "installers/install.sh"),
    Finding("CONFIG-OK", "ok", "/home/ada/.config/q27app/config.toml"),
    Finding("PORT", "warning", "127.0.0.1:8027: Address already in use; a daemon may run", "q27app status"),
    Finding("DISK-OK", "ok", "412 GB free at /home/ada/.local/share"),
]


@pytest.fixture
def found(monkeypatch):
    """What the doctor finds; a test may change it."""
    findings = list(FINDINGS)
    monkeypatch.setattr(doctor, "run_doctor", lambda: list(findings))
    return findings


async def test_findings_are_readable_at_every_size(found, daemon_of, open_screens, same_at_all_sizes):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("d")
        await screens.shows("CUDA-NVCC")
        await same_at_all_sizes(screens, "doctor")


async def test_the_worst_comes_first_and_its_fix_is_copied(found, daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("d")
        await screens.shows("1 failure   2 warnings   4 ok")
        await screens.shows("installers/install.sh")
        await screens.pilot.press("y")
        assert screens.app._clipboard == "installers/install.sh"
        await screens.pilot.press("down")
        await screens.shows("sudo nvidia-smi -i 0 -pl 575")
        await screens.pilot.press("enter")
        await screens.shows("escape close")
        await screens.pilot.press("y")
        assert "limited to 400 of 575 W" in screens.app._clipboard


async def test_it_looks_again(found, daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        await screens.pilot.press("d")
        await screens.shows("1 failure")
        found[:] = [Finding("PYTHON", "ok", "3.12.4")]
        await screens.pilot.press("r")
        await screens.shows("0 failures   0 warnings   1 ok")
        await screens.pilot.press("escape")
        await screens.shows("1 card")
