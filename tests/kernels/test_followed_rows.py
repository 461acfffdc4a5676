"""Which rows a backend knows to be left for the norm behind an addition, and which kernels a pass then has (cuda_follow.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_follow import FOLLOW_BYTES, FollowedRows, Measured
from q27app.kernels.graph import Rerun
from q27app.kernels.memory import CudaBuffer
from q27app.weights.dtypes import F16, F32, Q4_G64
from tests.kernels import cuda_checks
from tests.kernels.counting_device import CARDS
from tests.kernels.made import Lines, make_batch
from tests.kernels.test_dependent_launches import NotingDevice

NORM, OTHER = SimpleNamespace(address=64), SimpleNamespace(address=128)
LAYERS = 4
CONFIG = replace(cuda_checks.NANO, hidden_size=256, delta_head_dim=128, delta_key_heads=2, delta_value_heads=4)


def rows(count: int = 3, address: int = 4096, cols: int = 256) -> CudaBuffer:
    return CudaBuffer(address, (count, cols), np.dtype(np.float32), "x")


def followed() -> FollowedRows:
    return FollowedRows(SimpleNamespace(is_prefill=False, scratch=SimpleNamespace(follow=1 << 20, max_rows=64)))


def test_additions_take_turns_with_the_two_places_of_scales():
    found = followed()
    assert found.measure(NORM, rows()) == Measured(None, 0)
    for of in (0, 1, 0, 1):
        assert found.leave(NORM, rows()) == of
        assert found.measure(NORM, rows()) == Measured(of, 1 - of)


def test_rows_that_nobody_measured_are_not_left():
    found = followed()
    assert found.leave(NORM, rows()) is None
    found.measure(NORM, rows())
    assert found.leave(None, rows()) is None, "nobody says which norm comes next"
    assert found.leave(NORM, rows()) is None, "the scales were those of the row before it"


def test_what_was_left_is_taken_once_and_for_its_norm_alone():
    found = followed()
    found.measure(NORM, rows())
    found.leave(NORM, rows())
    assert found.measure(OTHER, rows()) == Measured(None, 0)
    found.leave(NORM, rows())
    assert found.measure(NORM, rows()).of == 0
    assert found.measure(NORM, rows()).of is None


def test_an_addition_to_rows_that_were_left_leaves_nothing():
    found = followed()
    found.measure(NORM, rows())
    assert found.leave(NORM, rows()) == 0
    assert found.leave(NORM, rows()) is None
    assert found.measure(NORM, rows()).of is None


@pytest.mark.parametrize("between", ["forget", "clear", "no norm", "prefill"])
def test_what_becomes_something_else_is_not_taken_as_left(between):
    for left in (False, True):
        found = followed()
        found.measure(NORM, rows())
        if left:
            found.leave(NORM, rows())
        if between == "forget":
            found.forget(rows())
        elif between == "clear":
            found.clear()
        elif between == "no norm":
            found.measure(None, rows())
        else:
            found._backend.is_prefill = True
            assert found.measure(NORM, rows()) is None
            found._backend.is_prefill = False
        assert found.leave(NORM, rows()) is None
        assert found.measure(NORM, rows()) == Measured(None, 0)


def test_there_is_one_x_at_a_time():
    """Scales and rows of all have one place."""
    found, other = followed(), rows(address=8192)
    found.measure(NORM, rows())
    found.forget(other)
    assert found.leave(NORM, rows()) == 0
    assert found.leave(NORM, other) is None
    assert found.measure(NORM, other) == Measured(None, 0)
    assert found.measure(NORM, rows()) == Measured(None, 0), "its rows are the other's"
    found.measure(NORM, other)
    assert found.leave(NORM, rows()) is None, "its scales are the other's"


@pytest.mark.parametrize("before, after", [(3, 5), (5, 3), (1, 16)])
def test_another_number_of_rows_is_another_x(before, after):
    found = followed()
    found.measure(NORM, rows(before))
    assert found.leave(NORM, rows(after)) is None
    found.measure(NORM, rows(before))
    found.leave(NORM, rows(before))
    assert found.measure(NORM, rows(after)).of is None


@pytest.mark.parametrize("count, cols, fits", [(64, 6144, True), (65, 256, False), (1, 6148, False), (3, 254, False)])
def test_limits(count, cols, fits):
    found, x = followed(), rows(count, cols=cols)
    assert (found.measure(NORM, x) is not None) == fits
    assert (found.leave(NORM, x) is not None) == fits


def test_each_sixteen_rows_have_a_place_of_their_own():
    found = followed()
    places = [found.address(index, start) for index in (0, 1) for start in (0, 16, 32, 48)]
    assert places == [(1 << 20) + n * FOLLOW_BYTES for n in range(8)]
    assert found.address(None, 16) == 0


class RecordingDevice(NotingDevice):
    """Records a part without running it, as a card does. stages: arguments of what the row family was launched with."""

    def __init__(self, card) -> None:
        super().__init__(card)
        self.stages: list[tuple[str, bytes]] = []

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        super().launch(function, grid, block, shared, args, dependent)
        if function.startswith(("linear_rows", "stage_")):
            self.stages.append((function, bytes(args)))

    def record(self, run):
        before, self.is_recording = len(self.stages), True
        run()
        part, self.is_recording = self.stages[before:], False
        del self.stages[before:]
        return Rerun(lambda: self.stages.extend(part))


def open_lines(card: str = "wide", max_rows: int = 128, device: NotingDevice | None = None, config=CONFIG) -> tuple[NotingDevice, Lines]:
    device = device or NotingDevice(CARDS[card])
    model = cuda_checks.bound_model(CudaBackend(device), config, cuda_checks.model_tensors(config, Q4_G64), max_rows)
    lines = Lines(model, 4, 16, "fp16", 64)
    backend = model.backend
    backend.ready._pair_sizes = backend.ready._row_sizes = lambda *rest: np.ones(4096, np.float32)   # this device computes nothing
    return device, lines


def launched(device: NotingDevice, run) -> list[str]:
    before = len(device.launches)
    run()
    return [name for name, _ in device.launches[before:]]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("count, way, once", [(1, "few", "norm_store"), (2, "few", "norm_store"), (3, "", "stage_norm"), (8, "", "stage_norm"), (9, "wide", "stage_norm"),
                                              (16, "wide", "stage_norm")])
def test_a_pass_converts_rows_behind_a_norm_once(card, count, way, once):
    """Also with a prefill before it."""
    device, lines = open_lines(card)
    kernel = "_".join(filter(None, ("linear_rows_followed", way)))
    for _ in range(3):
        lines.feed(1, [1, 2, 3])
        found = launched(device, lambda: lines.feed(0, [5] * count, "decode"))
        main = found[:found.index("final_norm")]
        assert sum(name.endswith(once) for name in main) == 1
        assert main.count(f"{kernel}_store") == LAYERS - 1 and main.count(f"{kernel}_gate_up") == LAYERS
        assert sum(name in ("linear_rows_halves_gate_up", "linear_rows_wide_gate_up", "linear_rows_norm_gate_up") for name in main) == 0


def test_a_recorded_pass_in_parts_is_the_plain_one():
    """A layer at the end of a part leaves its rows to the next part's first one."""
    device, num_layers = RecordingDevice(CARDS["wide"]), 32
    config = replace(CONFIG, num_layers=num_layers, layer_kinds=("delta", "delta", "delta", "attention") * 8)
    _, lines = open_lines(device=device, config=config)
    found = []
    for _ in range(4):   # plain, recorded, replayed
        before = len(device.stages)
        lines.feed(0, [5] * 3, "decode")
        found.append(device.stages[before:])
        lines.feed(1, [5] * 3)   # many rows in between
    assert found[0] == found[1] == found[2] == found[3]
    names = [name for name, _ in found[0]]
    assert names.count("linear_rows_followed_store") == num_layers - 1 and names.count("linear_rows_followed_gate_up") == num_layers


class Parts:
    """A project, an addition to its rows and what is next, with nothing but launches."""

    def __init__(self) -> None:
        self.device = NotingDevice(CARDS["wide"])
        self.backend, random = CudaBackend(self.device), np.random.default_rng(0)

        def matrix(rows: int, cols: int):
            return self.backend.load([cuda_checks.made_tensor(random, "made", rows, cols, F16)])

        self.out, self.matrix, self.wide, self.square, self.embed = (matrix(*shape) for shape in ((128, 64), (40, 128), (128, 256), (128, 128), (96, 128)))
        self.norm, self.other = (self.backend.load([cuda_checks.stored("norm", np.ones(128, np.float32), F32)]) for _ in range(2))
        self.x, self.y, self.h, self.hidden = (self.backend.empty((3, cols), "float32", name) for name, cols in (("x", 128), ("y", 40), ("h", 64), ("hidden", 128)))
        self.backend.reserve_for(self.wide)
        self.backend.begin(make_batch("decode", [[0] * 3], [0], [0], [[0]]), cuda_checks.open_state(self.backend, 128))

    def add(self) -> None:
        self.backend.ready._leave(self.h, 1.0, 4096)
        self.backend.add_linear(self.out, self.h, self.x, self.norm)

    def is_followed(self, norm=None) -> bool:
        names = launched(self.device, lambda: self.backend.project(norm or self.norm, self.matrix, self.x, self.y))
        return names == ["linear_rows_followed_store"]


BETWEEN = {
    "nothing": (lambda p: None, True), "download": (lambda p: p.backend.download(p.x), True),
    "another read": (lambda p: p.backend.project(p.other, p.matrix, p.x, p.y), False),
    "embed": (lambda p: p.backend.embed(p.embed, p.x), False),
    "what comes into the draft layer": (lambda p: p.backend.mtp_input(p.norm, p.norm, p.wide, p.embed, p.hidden, p.x), False),
    "project": (lambda p: p.backend.project(None, p.square, p.hidden, p.x), False),
    "a plain addition": (lambda p: (p.backend.ready.forget(), p.backend.add_linear(p.out, p.h, p.x, p.norm)), False),
    "another state": (lambda p: cuda_checks.open_state(p.backend, 128), False),
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("behind", ["project", "addition"])
def test_between_two_stages(what, behind):
    parts, (between, stays) = Parts(), BETWEEN[what]
    assert not parts.is_followed()
    if behind == "addition":
        parts.add()
    between(parts)
    if behind == "project":
        parts.add()
    stays = stays or behind == "project" and what == "another read"   # which has measured them as well
    assert parts.is_followed() == stays


def test_another_norm_takes_the_rows_as_they_are():
    parts = Parts()
    parts.is_followed()
    parts.add()
    assert not parts.is_followed(parts.other)
    parts.add()
    assert parts.is_followed(parts.norm)


def test_a_draft_step_takes_what_it_left_itself():
    device, lines = open_lines()
    lines.feed(0, [1, 2, 3])
    for step in (0, 1, 2):
        found = launched(device, lambda: cuda_checks.draft(lines, step, 7, first=step == 0))
        assert found.count("linear_rows_norm_store") == 1 and found.count("linear_rows_followed_few_gate_up") == 1
        assert not any(name.startswith("linear_rows_followed") and name.endswith("store") for name in found)


def test_a_prefill_takes_nothing_as_left():
    device, lines = open_lines()
    lines.feed(0, [1, 2, 3], "decode")
    found = launched(device, lambda: lines.feed(0, [1, 2, 3]))
    assert not any(name.startswith("linear_rows") and "followed" in name for name in found)


def test_an_addition_of_several_matrices_leaves_nothing():
    """Columns of a second one may begin anywhere."""
    device = NotingDevice(CARDS["wide"])
    backend, random = CudaBackend(device), np.random.default_rng(0)
    out = backend.load([cuda_checks.made_tensor(random, name, count, 64, F16) for name, count in (("a", 40), ("b", 88))])
    project = backend.load([cuda_checks.made_tensor(random, "c", 40, 128, F16)])
    norm = backend.load([cuda_checks.stored("norm", np.ones(128, np.float32), F32)])
    x, y, h = (backend.empty((3, cols), "float32", name) for name, cols in (("x", 128), ("y", 40), ("h", 64)))
    backend.begin(make_batch("decode", [[0] * 3], [0], [0], [[0]]), cuda_checks.open_state(backend, 128))
    for _ in range(2):
        backend.project(norm, project, x, y)
        backend.ready._leave(h, 1.0, 4096)
        found = launched(device, lambda: backend.add_linear(out, h, x, norm))
        assert found == ["linear_rows_ready_halves_add"]
    assert launched(device, lambda: backend.project(norm, project, x, y)) == ["stage_norm", "linear_rows_halves_store"]
