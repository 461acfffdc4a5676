"""Modules of training/, which is not installed with the package, for the tests of what it makes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

TRAINING = Path(__file__).resolve().parents[2] / "training"


@contextmanager
def training_module(name: str) -> Iterator[ModuleType]:
    """One by its name, found, and all that it imports, for as long."""
    sys.path.insert(0, str(TRAINING))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(TRAINING))
