"""Rows that an addition leaves ready for the norm behind it (follow.cuh), on the CPU: against NumPy, a row's bits in any company, rows that the scale
which was foreseen does not suit, and the kernels broken on purpose."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from q27app.kernels.compiler import SOURCES
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_weights import BORDER_BYTES
from tests.kernels import cuda_checks, follow_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.follow_checks import KINDS, ODD, Chain

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]
CARDS = {"wide": CARD, "99 KiB": SMALL_CARD}


def open_chain(device: EmulatedDevice, cols: int, kinds: str, **sizes):
    backend = CudaBackend(device)
    chain = Chain(backend, cols, KINDS[kinds], **sizes)
    return chain, cuda_checks.open_state(backend, cols)


def names(chain: Chain) -> set[str]:
    return {name for name, *_ in chain.launched}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("cols", [128, 640])
@pytest.mark.parametrize("kinds", KINDS)
def test_stages_equal_numpy_and_keep_a_rows_bits(card, cols, kinds):
    device = EmulatedDevice(CARDS[card])
    chain, state = open_chain(device, cols, kinds)
    assert follow_checks.check_usual(chain, state) < cuda_checks.TENSOR_CORE_TOLERANCE
    ways = {f"linear_rows_followed_{way}{stage}" for way in ("few_", "", "wide_") for stage in ("store", "gate_up")}
    assert ways <= names(chain)
    device.check_guards()


@pytest.mark.parametrize("cols, is_followed", [(6144, True), (6272, False), (48, True)])
def test_widths_at_the_limits(cols, is_followed):
    device = EmulatedDevice()
    chain, state = open_chain(device, cols, "q4" if cols % 64 == 0 else "f16")
    x, attended = follow_checks.usual_rows(chain, 3)
    whole = follow_checks.check_company(chain, state, x, attended, (1, 2))
    errors = chain.errors(x, attended, whole)
    assert max(rows.max() for rows in errors.values()) < cuda_checks.TWO_STAGES_TOLERANCE
    assert any("followed" in name for name in names(chain)) == is_followed
    device.check_guards()


class Watched(EmulatedDevice):
    """Columns with something in them, by the kernels that multiplied it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.columns: dict[str, set[int]] = {}

    def launch(self, function, *args, **options) -> None:
        before = self.filled_columns()
        super().launch(function, *args, **options)
        self.columns.setdefault(function.__name__, set()).update(np.flatnonzero(self.filled_columns() - before).tolist())


def few_columns(device: Watched, kinds: str, count: int) -> set[int]:
    chain, state = open_chain(device, 640, kinds)
    chain.run(state, *follow_checks.odd_rows(chain, state, ("larger", "usual")[:count]))
    return set().union(*(columns for name, columns in device.columns.items() if "followed_few" in name or "ready_few" in name))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kinds", ["q4", "q8", "mix"])
def test_columns_without_a_row_are_zeros(card, kinds):
    """What is multiplied for nothing costs power: on a card at its limit, speed. Memory of a block is full of ones at first here."""
    assert few_columns(Watched(CARDS[card]), kinds, 1) == {0}
    assert few_columns(Watched(CARDS[card]), kinds, 2) == {0, 2}


def test_columns_that_nobody_clears_are_found(tmp_path):
    sources = tmp_path / "cu"
    shutil.copytree(SOURCES, sources)
    text = (sources / "linear_rows.cu").read_text()
    assert text.count(".clear(lane);") == 1
    (sources / "linear_rows.cu").write_text(text.replace(".clear(lane);", ".places(0, lane, 0);"))
    assert few_columns(Watched(CARD, sources=sources, watched=frozenset({"linear_rows"})), "q4", 1) == set(range(8))


@pytest.mark.parametrize("num_sms", [1, 3, 7])
def test_any_number_of_multiprocessors(num_sms):
    """Groups of columns that lie in two blocks are left by the second; nothing stays in their border."""
    device = EmulatedDevice(replace(CARD, num_sms=num_sms))
    chain, state = open_chain(device, 640, "mix")
    assert follow_checks.check_usual(chain, state, (1, 3, 9)) < cuda_checks.TENSOR_CORE_TOLERANCE
    assert not device.download(chain.backend.scratch.border, (num_sms + 1) * BORDER_BYTES).any()
    device.check_guards()


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("cols, kinds", [(128, "q4"), (640, "mix"), (48, "f16")])
def test_rows_that_the_scale_does_not_suit(card, cols, kinds):
    """A number that a row consists of is rounded by 2^-12; no NaN gets into another row, nor stays for a later one."""
    device = EmulatedDevice(CARDS[card])
    chain, state = open_chain(device, cols, kinds)
    errors = follow_checks.check_odd(chain, state, follow_checks.ORDERS)
    assert set(errors) == set(ODD) - {"nan", "one nan", "inf"}
    assert max(errors.values()) < follow_checks.PEAK_TOLERANCE, errors
    device.check_guards()


@pytest.mark.parametrize("card", CARDS)
def test_a_pass_has_the_same_bits_each_time(card):
    """With nothing between its stages; rows of each kind in turn."""
    chain, state = open_chain(EmulatedDevice(CARDS[card]), 128, "q4")
    for count in (2, len(ODD)):
        follow_checks.check_repeats(chain, state, *follow_checks.odd_rows(chain, state, ODD[:count]), 3)


def test_which_rows_are_converted_anew():
    chain, state = open_chain(EmulatedDevice(), 640, "q4")
    x, attended = follow_checks.odd_rows(chain, state, ODD)
    chain.begin(state, x, attended[:1])
    chain.layer(len(x), 0)
    (_, count, follow, _), = [entry for entry in chain.launched if entry[0].endswith("gate_up")][-1:]
    inverses = chain.inverses(follow)[:count]
    assert {kind for kind, inverse in zip(ODD, inverses) if inverse < 0} == {"larger", "smaller", "tiny", "zero", "from zero", "nan", "inf"}


BROKEN = {
    "nothing is multiplied again": ("linear_rows.cu", "round == 0 && *m.lost == 1", "round == 0 && *m.lost == 3"),
    "words stay": ("linear_rows.cu", "p.rows_in.follow->words[threadIdx.x] = 0;", ";"),
    "scales of the other Follow": ("linear_rows.cu", "scale = follow.scales[row];", "scale = p.next->scales[row];"),
    "no scales for the next addition": ("linear_rows.cu", "    p.next->scales[row] = following_scale(top);\n", ""),
    "numbers that are none stay behind the columns": ("linear_rows.cu", "anew.scale = 1.0f;", "anew.scale = rms / rms;"),
    "squares of half the columns": ("linear_rows.cu", "squares = __fadd_rn(square, __shfl_xor_sync(ALL_LANES, square, 16));", "squares = __fadd_rn(square, square);"),
    "every scale suits": ("follow.cuh", "return top >= 0.5f && top <= 65504.0f;", "return true;"),
    "small rows suit": ("follow.cuh", "top >= 0.5f && ", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(tmp_path, what):
    name, text, change = BROKEN[what]
    sources = tmp_path / "cu"
    shutil.copytree(SOURCES, sources)
    whole = (sources / name).read_text()
    assert whole.count(text) == 1, "the kernel has changed: say anew how to break it"
    (sources / name).write_text(whole.replace(text, change))
    chain, state = open_chain(EmulatedDevice(CARD, None, frozenset({"linear_rows"}), sources), 640, "q4")
    with pytest.raises(AssertionError):
        assert follow_checks.check_usual(chain, state, (1, 3)) < cuda_checks.TENSOR_CORE_TOLERANCE
        errors = follow_checks.check_odd(chain, state, (("usual", "larger", "tiny", "nan"),))
        assert max(errors.values()) < follow_checks.PEAK_TOLERANCE
