"""The checks of `checks.py` as tests, for a machine with a card: `pytest -m gpu`."""

from __future__ import annotations

import pytest

from q27app.gpu import nvidia_device_exists
from tests.gpu import checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not nvidia_device_exists(), reason="no NVIDIA device")]


@pytest.mark.parametrize("section", ["stages", "models"])
def test_the_card_equals_numpy(section, capsys):
    assert checks.main([section]) == 0, capsys.readouterr().out
