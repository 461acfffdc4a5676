"""States that lack rows, on any device: whatever happens to a slot, its rows and what it holds have the bits of states that are written with every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from q27app.kernels.batch import Batch, Keep
from tests.kernels.delta_checks import DeltaBench
from tests.kernels.made import begin_alone, make_batch

LAYERS, SLOTS = 2, 6


def check_lacking(bench: DeltaBench, num_seqs: int, passes: int, least: int) -> set[int]:
    """Passes of one row each of some of the sequences, `least` and all of them by turns, all of them counting from their own first row: the bits of a
    sequence alone. Returns how many rows sequences of the passes lacked, so that it is seen that they differ."""
    random = np.random.default_rng(num_seqs)
    y, state = bench.rows(passes), bench.backend.allocate_state(bench.config, 1, 1, "fp16", num_seqs, 8, 16)
    state.lacking.steady, ends, met = 0, [0] * num_seqs, set()
    found: list[list[np.ndarray]] = [[] for _ in range(num_seqs)]
    for number in range(passes):
        some = random.permutation(num_seqs)[:least if number % 2 else random.integers(least, num_seqs + 1)].tolist()
        met |= set(state.lacking.rows[some].tolist())
        rows = np.stack([y[ends[seq]] for seq in some])
        out = run(bench, state, make_batch("decode", [[0]] * len(some), [ends[seq] for seq in some], some, [list(range(8))] * len(some)), rows)
        for seq, row in zip(some, out, strict=True):
            found[seq].append(row)
            ends[seq] += 1
    alone = {count: bench.beside(y[:count], (1,))[0] for count in set(ends) if count}
    for seq, count in enumerate(ends):
        if count and not np.array_equal(np.stack(found[seq]), alone[count][0]):
            raise AssertionError(f"sequence {seq} of {num_seqs} has other bits than alone")
        if count and not np.array_equal(state.export_slot(seq), alone[count][1]):
            raise AssertionError(f"sequence {seq} of {num_seqs} left another state than alone")
    return met


def run(bench: DeltaBench, state, batch: Batch, y: np.ndarray, layer: int = 0) -> np.ndarray:
    """A layer of a pass."""
    backend, out = bench.backend, bench.out.rows(len(y))
    if layer == 0:
        begin_alone(backend, batch, state)
    backend.device.upload(bench.y.address, y)
    bench.layer.delta_index = layer
    backend.delta(bench.y.rows(len(y)), bench.layer, out)
    bench.layer.delta_index = 0
    return bench.taken(out)


class Life:
    """What may happen to the slots of a state of two layers, each event drawn by a seed. seen: rows and slots, as they come.
    writes: states are written with every row."""

    def __init__(self, bench: DeltaBench, seed: int, writes: bool) -> None:
        self.bench, self.random = bench, np.random.default_rng(seed)
        self.state = bench.backend.allocate_state(bench.config, LAYERS, 1, "fp16", SLOTS, 8, 16)
        self.state.lacking.steady = 1 << 30 if writes else 0
        self.state.reserve_exports()
        self.ends, self.seen = [0] * SLOTS, []

    def events(self) -> dict[str, Callable[[], None]]:
        return {"company": self.company, "more company": self.company, "one row": lambda: self.decode(1), "several rows": lambda: self.decode(3),
                "verify": self.verify, "broken off": self.break_off, "prefill": self.prefill, "copy": self.copy, "export": self.export, "import": self.move, "clear": self.clear}

    def company(self) -> None:
        for _ in range(2):
            self.go_on([1] * int(self.random.integers(2, SLOTS + 1)))

    def break_off(self) -> None:
        """A pass begins, and nothing comes of it: its sequences are over, their slots others'."""
        source, *slots = self.some(4)
        begin_alone(self.bench.backend, self.batch([1] * 3, "decode", slots), self.state)
        self.state.clear_slot(slots[0])
        self.state.import_slot(slots[1], self.state.export_slot(source))
        self.state.copy_slot(source, slots[2])
        self.ends[slots[0]], self.ends[slots[1]], self.ends[slots[2]] = 0, self.ends[source], self.ends[source]

    def decode(self, rows: int) -> None:
        self.go_on([rows])

    def verify(self) -> None:
        counts = [1] * 3 if self.random.integers(2) else [2, 1, 3]
        slots = self.go_on(counts, "verify")
        accepted = self.random.integers(1, np.array(counts) + 1)
        self.bench.backend.commit(accepted.astype(np.int32))
        for slot, count in zip(slots, accepted.tolist(), strict=True):
            self.ends[slot] += count

    def prefill(self) -> None:
        """From a slot's end over the next border of 64, where the state is kept in another slot."""
        slot, other = self.some(2)
        border = self.ends[slot] // 64 * 64 + 64
        border += 64 * (border - self.ends[slot] < 16)
        self.go_on([border + 2 - self.ends[slot]], "prefill", [slot], (Keep(0, border - self.ends[slot], other),))
        self.ends[other] = border

    def copy(self) -> None:
        source, target = self.some(2)
        self.state.copy_slot(source, target)
        self.ends[target] = self.ends[source]

    def export(self) -> None:
        """Both ways."""
        first, second = self.some(2)
        self.seen.append(self.state.export_slot(first))
        self.seen.append(self.state.begin_export(second).data())

    def move(self) -> None:
        source, target = self.some(2)
        self.state.import_slot(target, self.state.export_slot(source))
        self.ends[target] = self.ends[source]

    def clear(self) -> None:
        slot, = self.some(1)
        self.state.clear_slot(slot)
        self.ends[slot] = 0

    def some(self, count: int) -> list[int]:
        return self.random.permutation(SLOTS)[:count].tolist()

    def go_on(self, counts: list[int], phase: str = "decode", slots: list[int] | None = None, keeps: tuple[Keep, ...] = ()) -> list[int]:
        slots = self.some(len(counts)) if slots is None else slots
        batch = self.batch(counts, phase, slots)
        for layer in range(LAYERS):
            self.seen.append(run(self.bench, self.state, replace(batch, keeps=keeps), self.bench.rows(sum(counts), int(self.random.integers(1 << 30))), layer))
        for slot, count in zip(slots, counts, strict=True):
            self.ends[slot] += count * (phase != "verify")
        return slots

    def batch(self, counts: list[int], phase: str, slots: list[int]) -> Batch:
        starts, tables = [self.ends[slot] for slot in slots], [list(range(8))] * len(slots)
        return make_batch(phase, [[0] * count for count in counts], starts, slots, tables, None, phase == "verify")


def check_life(bench: DeltaBench, seed: int, length: int, broken: Callable[[Life], None] = lambda life: None) -> set[str]:
    """The same life twice, with states that lack rows and with states that are written with each. broken: what to break in the first.
    Returns the events that met slots which lacked rows."""
    lives, names = [Life(bench, seed, writes) for writes in (False, True)], np.random.default_rng(seed)
    broken(lives[0])
    found = set()
    for _ in range(length):
        name = str(names.choice(list(lives[0].events())))
        before = lives[0].state.lacking.rows.copy()
        for life in lives:
            life.events()[name]()
        if name not in ("company", "more company") and (lives[0].state.lacking.rows < before).any():
            found.add(name)
        for ours, written in zip(lives[0].seen, lives[1].seen, strict=True):
            if not np.array_equal(ours, written):
                raise AssertionError(f"seed {seed}: other bits after {name}")
        for life in lives:
            life.seen.clear()
    for slot in range(SLOTS):
        if not np.array_equal(*(life.state.export_slot(slot) for life in lives)):
            raise AssertionError(f"seed {seed}: slot {slot} ends with other bits")
    for life in lives:
        life.state.release()
    return found
