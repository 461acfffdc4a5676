"""Which backend a name opens, and that both follow the interface."""

from __future__ import annotations

import inspect

import pytest

from q27app import gpu
from q27app.errors import GpuError, UsageError
from q27app.kernels import open_backend
from q27app.kernels.backend import Backend, State
from q27app.kernels.numpy_backend import NumpyBackend
from q27app.kernels.numpy_state import NumpyState


def test_auto_without_a_device_is_numpy(monkeypatch):
    monkeypatch.setattr(gpu, "nvidia_device_exists", lambda: False)
    assert open_backend("auto").name == "numpy"


def test_auto_with_a_device_is_never_numpy(monkeypatch):
    monkeypatch.setattr(gpu, "nvidia_device_exists", lambda: True)
    try:
        name = open_backend("auto").name
    except GpuError:
        return
    assert name == "cuda"


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match="'metal' is unknown"):
        open_backend("metal")


@pytest.mark.parametrize("protocol, kind", [(Backend, NumpyBackend), (State, NumpyState)])
def test_every_method_of_the_interface_has_its_signature(protocol, kind):
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            expected, found = inspect.signature(method).parameters, inspect.signature(getattr(kind, name)).parameters
            assert list(expected) == list(found), name
            assert [p.default for p in expected.values()] == [p.default for p in found.values()], name
