"""The host waits for what was drawn and accepted, and not for what is done with it on the card."""

from __future__ import annotations

import pytest

from q27app.kernels.cuda_backend import CudaBackend
from tests.kernels import cuda_checks
from tests.kernels.counting_device import CARDS, CountingDevice
from tests.kernels.made import make_batch
from tests.kernels.test_dependent_launches import Names


class MarkingDevice(CountingDevice):
    """Its events are the launches before them."""

    def __init__(self) -> None:
        super().__init__(CARDS["wide"])
        self.launches: list[str] = []
        self.open: list[int] = []
        self.waited: list[list[str]] = []
        self.num_downloads = 0

    def module(self, job):
        return Names()

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        super().launch(function, grid, block, shared, args, dependent)
        self.launches.append(function)

    def download(self, address, nbytes, out=None):
        self.num_downloads += 1
        return super().download(address, nbytes, out)

    def mark(self) -> int:
        self.open.append(len(self.launches))
        return self.open[-1]

    def wait(self, event: int) -> None:
        self.forget(event)
        self.waited.append(self.launches[:event])

    def forget(self, event: int) -> None:
        self.open.remove(event)


@pytest.fixture
def opened():
    """(device, backend, one step of a verify pass): goes_ahead begins a chain behind it."""
    device = MarkingDevice()
    backend = CudaBackend(device)
    state = cuda_checks.open_state(backend, 256)
    backend._final = backend.empty((16, 256), "float32", "final")
    logits = backend.empty((16, cuda_checks.NANO.vocab_size), "float32", "logits")

    def step(goes_ahead: bool, commits: bool = True) -> None:
        backend.begin(make_batch("verify", [[5, 6, 7]], [3], [0], [[0]], deferred=True), state)
        backend.sample(logits, cuda_checks.sampling_rows(3))
        backend.accept()
        if commits:
            backend.commit()
        if goes_ahead:
            backend.begin_ahead(cuda_checks.sampling_rows(1))

    return device, backend, step


def test_a_result_is_there_before_its_rows_are_folded_into_the_states(opened):
    device, backend, step = opened
    for _ in range(3):
        device.launches.clear()
        step(goes_ahead=False)
        assert "delta_fold" in device.launches
        backend.result()
        assert device.waited[-1][-2:] == ["accept", "copy_words"] and not device.open and not device.num_downloads


def test_events_that_nobody_waits_for_are_given_back(opened):
    device, backend, step = opened
    for goes_ahead in (True, False, True, True, False):
        step(goes_ahead, commits=goes_ahead)   # drawn anew: what was on its way before is not asked for
        assert len(device.open) == 1
    backend.result()
    assert not device.open
    step(goes_ahead=True)
    backend.result()
    assert not device.open and "follow" not in device.waited[-1] and device.waited[-1].count("delta_fold") == 4
