"""Recorded passes, with a driver that notes its calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from q27app.errors import GpuError
from q27app.kernels.graph import Graph


class Driver:
    """Of cuda-bindings what a graph needs: every call returns (code, values...)."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str):
        def call(*_):
            self.calls.append(name)
            values = {"cuStreamEndCapture": ("graph",), "cuGraphGetNodes": (["a", "b"], 2), "cuGraphInstantiate": ("exec",)}
            return (int(name == self.fails), *values.get(name, ()))

        return call


def check(result: tuple):
    code, *values = result
    if code:
        raise GpuError("CUDA error 2.")
    return values[0] if len(values) == 1 else values


def test_a_pass_is_recorded_replayed_and_given_back_once():
    driver, ran = Driver(), []
    graph = Graph.capture(driver, check, "stream", lambda: ran.append(1))
    graph()
    graph()
    assert ran == [1] and graph.num_nodes == 2 and graph.is_open
    graph.close()
    graph.close()
    assert not graph.is_open
    assert driver.calls.count("cuGraphExecDestroy") == 1 and driver.calls.count("cuGraphLaunch") == 2
    assert driver.calls.count("cuGraphDestroy") == 1


def test_an_error_while_recording_ends_the_capture():
    driver = Driver()

    def run() -> None:
        raise ValueError("of the pass")

    with pytest.raises(ValueError, match="of the pass"):
        Graph.capture(driver, check, "stream", run)
    assert driver.calls[-1] == "cuStreamEndCapture" and "cuGraphInstantiate" not in driver.calls


def test_a_graph_that_cannot_be_made_leaves_nothing():
    driver = Driver("cuGraphInstantiate")
    with pytest.raises(GpuError):
        Graph.capture(driver, check, "stream", lambda: None)
    assert driver.calls[-1] == "cuGraphDestroy"
