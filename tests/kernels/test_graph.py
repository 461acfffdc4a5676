"""Recorded passes, with a driver that notes its calls."""

from __future__ import annotations

import gc
import weakref
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


class Area:
    """Holds page-locked memory, say."""


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


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_in_cycles_is_not_collected_while_recording(fails):
    driver, gone_after = Driver(), []

    def run() -> None:
        for _ in range(3):
            area = Area()
            area.itself = area
            weakref.finalize(area, lambda: gone_after.append(driver.calls[-1]))
        del area
        many = [[] for _ in range(20_000)]   # enough for a collection of the young at any usual threshold
        assert many and not gone_after
        if fails:
            raise ValueError("of the pass")

    assert gc.isenabled()
    if fails:
        with pytest.raises(ValueError, match="of the pass"):
            Graph.capture(driver, check, "stream", run)
    else:
        Graph.capture(driver, check, "stream", run)
    assert gc.isenabled()
    gc.collect()
    assert len(gone_after) == 3 and "cuStreamBeginCapture" not in gone_after


def test_the_collector_stays_off_where_it_was_off():
    gc.disable()
    try:
        Graph.capture(Driver(), check, "stream", lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_graph_that_cannot_be_made_leaves_nothing():
    driver = Driver("cuGraphInstantiate")
    with pytest.raises(GpuError):
        Graph.capture(driver, check, "stream", lambda: None)
    assert driver.calls[-1] == "cuGraphDestroy"
