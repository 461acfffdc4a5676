"""A kernel that may start while the one before still runs waits for it by itself: all that are launched so, in an engine's life."""

from __future__ import annotations

import queue
import re
import time

import numpy as np
import pytest

from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import Request, SamplingParams
from q27app.kernels.compiler import SOURCES, expand
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_ready import ReadyRows
from q27app.weights.synthetic import synthesize
from tests.kernels import cuda_checks
from tests.kernels.counting_device import CARDS, CountingDevice
from tests.kernels.made import make_batch

WAIT = "wait_for_earlier"
_MACRO = re.compile(r"^#define (\w+)\((NAME)?[^)]*\)(?:.*\\\n)*.*\n", re.MULTILINE)


class Names(dict):
    """Functions of a module: their names."""

    def __missing__(self, name: str) -> str:
        return name


class NotingDevice(CountingDevice):
    """Notes every launch: (kernel, dependent). puts: which of them copy to the arrays of a pass, an allocation of their own."""

    def __init__(self, card) -> None:
        super().__init__(card)
        self.launches: list[tuple[str, bool]] = []
        self.puts: set[int] = set()

    def module(self, job):
        return Names()

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        super().launch(function, grid, block, shared, args, dependent)
        if function == "copy_words" and args.target in self.held:
            self.puts.add(len(self.launches))
        self.launches.append((function, dependent))


def plain(text: str) -> str:
    """Without comments and the bounds of launches."""
    return re.sub(r" ?__launch_bounds__\((?:[^()]|\([^()]*\))*\)", "", re.sub(r"//[^\n]*", "", text))


def blocks_of(text: str) -> dict[str, list[str]]:
    """Bodies of the functions and structures that stand at the left, by name."""
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^(?![ }#/])([^\n;]*?)\b(\w+)(\((?:[^;{}()]|\([^()]*\))*\))?(?: : [\w<>, ]+)? (?:const )?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        found.setdefault(match[2], []).append(match[4])
    for match in re.finditer(r'^extern "C" __global__ void [^\n]*?(\w+)\(const __grid_constant__ [^\n]*\{(.*)\}$', text, re.MULTILINE):
        found.setdefault(match[1], []).append(match[2])
    return found


def waiting(text: str) -> set[str]:
    """Kernels and functions of all sources that wait, themselves or by what they call."""
    text = plain(text)
    bodies = blocks_of(text)
    for macro in _MACRO.finditer(text):
        for use in re.finditer(rf"^{macro[1]}\((\w+),", text, re.MULTILINE):
            bodies.setdefault(use[1], []).append(macro[0])
    known = {WAIT}
    while True:
        more = {name for name, some in bodies.items() if all(any(re.search(rf"\b{called}\b", body) for called in known) for body in some)}
        if more <= known:
            return known
        known |= more


def run(device: NotingDevice, path, monkeypatch, **options) -> None:
    monkeypatch.setattr("q27app.kernels.open_backend", lambda *_: CudaBackend(device))
    engine = Engine(EngineConfig(model=path, backend="cuda", context=4096, slots=2, **options))
    try:
        engine.start()
        while engine.status().state in ("loading", "unloaded"):
            time.sleep(0.01)
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        for name, temperature in (("a", 0.0), ("b", 0.8)):
            engine.submit(Request(name, tuple(range(1000, 1100)), SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature)), inbox.put)
        ended = 0
        while ended < 2:
            ended += inbox.get(timeout=120).finish is not None
    finally:
        engine.close()


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("draft", ["off", "auto"])
@pytest.mark.parametrize("leaves", [False, True], ids=["floats", "left ready"])
def test_what_starts_early_waits(card, draft, leaves, monkeypatch, tmp_path):
    """leaves: the device says that rows of the weights are of a usual length, so that stages leave each other theirs."""
    path = tmp_path / "made.q27"
    synthesize(path, "nano", "chain", "q4s")
    device = NotingDevice(CARDS[card])
    if leaves:
        for name in ("_pair_sizes", "_row_sizes"):
            monkeypatch.setattr(ReadyRows, name, lambda *rest: np.ones(4096, np.float32))
    run(device, path, monkeypatch, draft=draft)
    waits = set().union(*(waiting(expand(file.stem)) for file in SOURCES.glob("*.cu")))
    early = {name for name, dependent in device.launches if dependent}
    assert len(early) > 12 and {"delta_one", "attend_merge"} <= early
    assert ({"linear_rows_ready_few_add", "linear_rows_followed_few_store", "linear_rows_followed_few_gate_up"} <= early) == leaves
    assert early <= waits, f"{sorted(early - waits)} may start early and do not wait"


def test_kernels_that_do_not_wait_are_told_apart():
    text = 'extern "C" __global__ void one(const __grid_constant__ A p) { f(p); }\n__device__ void f(const A& p) {\n  wait_for_earlier();\n}\n' \
           'extern "C" __global__ void two(const __grid_constant__ A p) {\n  // wait_for_earlier\n}\n'
    assert waiting(text) == {WAIT, "one", "f"}


def test_a_kernel_leaves_only_after_it_waited():
    """Where a kernel itself waits, no thread returns before."""
    for file in SOURCES.glob("*.cu*"):
        text = plain(file.read_text())
        for name, some in blocks_of(text).items():
            for body in some:
                before = body.partition(WAIT + "()")
                assert not before[1] or not re.search(r"\breturn;", before[0]) or name == "Columns", f"{file.name}: {name}"


def test_whoever_looks_early_comes_after_a_kernel_that_started_when_all_before_it_ended(monkeypatch, tmp_path):
    """Attention and the delta step look at positions, block tables, states and keys of earlier passes before they wait; a pass begins with a kernel
    that moves positions, or with a copy."""
    path = tmp_path / "made.q27"
    synthesize(path, "nano", "chain", "q4s")
    device = NotingDevice(CARDS["wide"])
    run(device, path, monkeypatch, draft="auto", fixed_draft=True, max_draft=4)   # not by what draft steps cost here
    movers, seen = ("follow", "draft_next", "draft_turn", "take_drafts", "rope_angles"), set()
    has_moved = True
    for index, (name, dependent) in enumerate(device.launches):
        if name in movers or index in device.puts:
            has_moved = True
            seen.add(name)
        elif not dependent:
            has_moved = False
        assert not (has_moved and (name.startswith("attend_") or name in ("delta_step", "delta_steps", "delta_one", "delta_many", "delta_flow", "delta_fold"))), f"{name} may see old positions"
    assert device.puts and {"follow", "draft_turn", "take_drafts", "rope_angles"} <= seen


def test_each_deferred_pass_keeps_its_own_hidden_rows():
    """Also where two have the same arrays; once where it is committed before a chain begins behind it."""
    device = NotingDevice(CARDS["wide"])
    backend = CudaBackend(device)
    state, rows = cuda_checks.open_state(backend, 256), cuda_checks.sampling_rows(1)
    backend._final = backend.empty((16, 256), "float32", "final")
    batch = make_batch("verify", [[5, 6, 7]], [3], [0], [[0]], deferred=True)
    for commits, ahead in ((False, True), (False, True), (True, True), (True, False)):
        before = len(device.launches)
        backend.begin(batch, state)
        if commits:
            backend.commit()
        if ahead:
            backend.begin_ahead(rows)
        assert [name for name, _ in device.launches[before:]].count("keep_hidden") == 1, (commits, ahead)
