"""Fixtures of the tests that run CUDA kernels on the CPU."""

from __future__ import annotations

import pytest

from tests.kernels.emulation.emulated_device import EmulatedDevice


@pytest.fixture
def device():
    """An emulated card; fails the test if a kernel wrote past an allocation."""
    device = EmulatedDevice()
    yield device
    device.check_guards()
