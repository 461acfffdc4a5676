"""Fixtures that every room may use: the oracle folder, scratch directories, the scale of `long` tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machine")   # no example fails for how fast the machine is

REPOSITORY = Path(__file__).resolve().parents[1]


def _shared_folder() -> Path | None:
    for candidate in (os.environ.get("Q27APP_SHARED"), REPOSITORY.parent / "shared"):
        if candidate and (Path(candidate) / "oracle").is_dir():
            return Path(candidate)
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the independent oracle and the reference vocabulary."""
    folder = _shared_folder()
    if folder is None:
        pytest.skip("no oracle folder: set Q27APP_SHARED or put it beside the checkout as ../shared")
    return folder


@pytest.fixture(scope="session")
def long_scale() -> float:
    """Share of the full volume that tests marked `long` run (CI: 0.1)."""
    return float(os.environ.get("Q27APP_LONG_SCALE", "1.0"))


@pytest.fixture(autouse=True)
def scratch_directories(tmp_path, monkeypatch):
    """Every directory of `paths` points below the test's own folder; no test sees the user's files."""
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "home" / name.lower()))
    for name in list(os.environ):
        if name.startswith("Q27APP_") and name not in ("Q27APP_SHARED", "Q27APP_LONG_SCALE"):
            monkeypatch.delenv(name)
