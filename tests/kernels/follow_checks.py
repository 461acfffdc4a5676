"""Stages as layers run them, on any device: a norm and a matrix, an addition that leaves its rows for the next norm (follow.cuh), a gate and an up, an
addition. What is attended is handed in, as records (ready.cuh): so the rows of the stream go wherever a check wants them."""

from __future__ import annotations

import numpy as np

from q27app.kernels import cuda_args
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.cuda_follow import FOLLOW_BYTES, FOLLOW_ROWS
from q27app.kernels.cuda_ready import READY_BYTES, RECORD_ROWS, ready_units
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, DType

from tests.kernels.cuda_checks import made_tensor, stored
from tests.kernels.made import make_batch, relative_error

KINDS: dict[str, tuple[DType, DType, DType, DType]] = {
    "q4": (Q4_G64,) * 4, "q8": (Q8_G128,) * 4, "f16": (F16,) * 4, "f32": (F32,) * 4, "mix": (Q4_G64, F16, Q8_G128, Q4_G64),
}
"""Number types of what is projected, what comes behind attention, gate and up, and down."""
COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 35)
SCALE = 2.0 ** -8
"""Of records that are handed in: numbers up to 10^7."""
LAYERS = 2
PEAK_TOLERANCE = 1e-3
"""Of a row whose sums are one number's: that is rounded by 2^-12 at most, and products of a gate and an up by it twice."""


def records_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(records of the rows as bytes, the numbers they hold)."""
    count, cols = rows.shape
    units, blocks = ready_units(cols), -(-count // RECORD_ROWS)
    padded = np.zeros((blocks * RECORD_ROWS, units * 64), np.float32)
    padded[:count, :cols] = rows
    sixteenth = np.where(np.arange(units * 64) & 4, np.float32(1 / 16), np.float32(1))
    halves = (padded * np.float32(SCALE) * sixteenth).astype(np.float16)
    held = halves.astype(np.float32) / sixteenth / np.float32(SCALE)
    sums = (halves.astype(np.float32) / sixteenth / 16).reshape(len(padded), -1, 16).sum(axis=2)
    high = sums.astype(np.float16)
    pairs = np.stack([high, (sums - high.astype(np.float32)).astype(np.float16)], axis=2)
    # [block, unit, row / 8, half of 16 columns, row % 8, 16 columns of 64, 8] and [block, unit, row / 8, row % 8, 16 columns of 64, 2]
    first = halves.reshape(blocks, 2, 8, units, 4, 2, 8).transpose(0, 3, 1, 5, 2, 4, 6)
    second = pairs.reshape(blocks, 2, 8, units, 4, 2).transpose(0, 3, 1, 2, 4, 5)
    parts = [np.ascontiguousarray(part).view(np.uint8).reshape(blocks, units, -1) for part in (first, second)]
    out = np.concatenate(parts, axis=2)
    assert out.shape[2] == READY_BYTES
    return out.reshape(-1), held[:count, :cols]


def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6) * norm


class Chain:
    """Layers of one set of matrices, which all of them have, and norms of their own. x [rows, cols] goes through them; attended [rows, width] comes in
    each of them from outside."""

    def __init__(self, backend: CudaBackend, cols: int, kinds: tuple[DType, DType, DType, DType], width: int = 128, projected: int = 72, products: int = 128) -> None:
        random = np.random.default_rng(4)
        self.backend, self.cols, self.width, self.products = backend, cols, width, products
        sizes = (("project", projected, cols), ("out", cols, width), ("gate", products, cols), ("down", cols, products))
        made = {name: made_tensor(random, name, rows, columns, kind) for (name, rows, columns), kind in zip(sizes, kinds)}
        up = made_tensor(random, "up", products, cols, kinds[2])
        self.values = {name: tensor.values() for name, tensor in (made | {"up": up}).items()}
        self.project, self.out, self.down = (backend.load([made[name]]) for name in ("project", "out", "down"))
        self.pair = backend.load([made["gate"], up])
        self.norm_values = [(1 + 0.2 * random.standard_normal(cols)).astype(np.float32) for _ in range(2 * LAYERS + 1)]
        self.norms = [backend.load([stored("norm", values, F32)]) for values in self.norm_values]
        self.x, self.o = (backend.empty((64, columns), "float32", name) for name, columns in (("x", cols), ("o", width)))
        self.y, self.h = backend.empty((64, projected), "float32", "y"), backend.empty((64, products), "float32", "h")
        self.records = backend.empty((LAYERS * 4 * ready_units(width) * READY_BYTES,), np.uint8, "records")
        self.launched: list[tuple[str, int, int, int]] = []
        """Kernel, rows, and the addresses of the Follow that it reads or leaves rows by and of the one it leaves scales in."""
        self.looks_at_words = True
        launch = backend.launch

        def note(source: str, name: str, grid, block, shared, args, **more) -> None:
            if source == "linear_rows":
                rows_in = args.rows_in if isinstance(args, cuda_args.LinearRows) else args
                self.launched.append((name, args.rows if rows_in is not args else grid[0], rows_in.follow or 0, rows_in.next or 0))
            launch(source, name, grid, block, shared, args, **more)
            if self.looks_at_words and name.startswith("linear_rows_ready") and self.launched[-1][2]:
                assert not self.words(self.launched[-1][2]).any(), "an addition leaves words behind"
        backend.launch = note

    def begin(self, state, x: np.ndarray, attended: list[np.ndarray]) -> list[np.ndarray]:
        """A decode pass of these rows; returns the numbers that come from outside as they are held."""
        rows, backend = len(x), self.backend
        lengths = [16] * (rows // 16) + ([rows % 16] if rows % 16 else [])
        backend.begin(make_batch("decode", [[0] * n for n in lengths], [0] * len(lengths), [0] * len(lengths), [[0]] * len(lengths)), state)
        backend._linear.followed.forget(self.x)   # as embed does
        backend.device.upload(self.x.address, x)
        held = []
        for layer, rows_of_layer in enumerate(attended):
            records, numbers = records_of(rows_of_layer)
            backend.device.upload(self._records(layer), records)
            held.append(numbers)
        return held

    def _records(self, layer: int) -> int:
        return self.records.address + layer * 4 * ready_units(self.width) * READY_BYTES

    def layer(self, rows: int, layer: int, step=lambda name, buffer: None) -> None:
        """step: after each stage."""
        backend, x, o, h, y = self.backend, *(buffer.rows(rows) for buffer in (self.x, self.o, self.h, self.y))
        backend.project(self.norms[2 * layer], self.project, x, y)
        step("project", y)
        backend.ready._left[o.address] = cuda_args.Ready(self._records(layer), ready_units(self.width), SCALE, 1 / SCALE)
        backend.add_linear(self.out, o, x, self.norms[2 * layer + 1])
        step("out", x)
        backend.gate_up(self.norms[2 * layer + 1], self.pair, x, h)
        step("gate_up", h)
        backend.add_linear(self.down, h, x, self.norms[2 * layer + 2])
        step("down", x)

    def run(self, state, x: np.ndarray, attended: list[np.ndarray]) -> np.ndarray:
        """All layers and what is projected behind them. Returns [rows, any] float32: all that can be looked at without changing the way."""
        rows, seen = len(x), []
        self.begin(state, x, attended)

        def look(name: str, buffer) -> None:
            if name != "gate_up":
                seen.append(self.backend.download(buffer))

        for layer in range(LAYERS):
            self.layer(rows, layer, look)
        self.backend.project(self.norms[-1], self.project, self.x.rows(rows), self.y.rows(rows))
        look("project", self.y.rows(rows))
        return np.concatenate(seen, axis=1)

    def products_of(self, state, x: np.ndarray, attended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x behind the first addition, products of gate and up)."""
        found = {}
        self.begin(state, x, [attended])
        try:
            self.layer(len(x), 0, lambda name, buffer: found.update({name: self.backend.download(buffer)}) if name in ("out", "gate_up") else None)
        finally:
            self.backend._linear.followed.clear()
        return found["out"], found["gate_up"]

    def lost(self, rows: int) -> np.ndarray:
        """[2, rows] of the last two stages that took rows which were left: those which had to be converted anew."""
        ways = [entry for entry in self.launched if entry[0].startswith("linear_rows_followed")]
        parts = -(-rows // FOLLOW_ROWS)
        out = []
        for some in (ways[-2 * parts:-parts], ways[-parts:]):
            out.append(np.concatenate([self.inverses(follow)[:count] < 0 for _, count, follow, _ in some]))
        return np.stack(out)

    def words(self, follow: int) -> np.ndarray:
        return self.backend.device.download(follow, FOLLOW_BYTES)[4 * FOLLOW_ROWS:8 * FOLLOW_ROWS].view(np.uint32)

    def inverses(self, follow: int) -> np.ndarray:
        return (~self.words(follow)).view(np.float32)

    def errors(self, x: np.ndarray, attended: list[np.ndarray], found: np.ndarray) -> dict[str, np.ndarray]:
        """[rows] of each stage's output, by what went into it here; found: of `run`. down: of gate_up and it."""
        values, norms, out = self.values, self.norm_values, {}
        columns = [len(values["project"]), self.cols, self.cols] * LAYERS
        parts = np.split(found.astype(np.float64), np.cumsum(columns), axis=1)
        for layer in range(LAYERS):
            y, first, second = parts[3 * layer:3 * layer + 3]
            held = records_of(attended[layer])[1].astype(np.float64)
            out[f"project {layer}"] = by_row(y, normed(x, norms[2 * layer]) @ values["project"].T)
            plus = held @ values["out"].T
            sizes = [np.sqrt(np.square(part).mean(axis=1)) for part in (x.astype(np.float64), plus, x + plus)]
            out[f"out {layer}"] = by_row(first, x + plus) * sizes[2] / np.maximum(sizes[0] + sizes[1], 1e-30)   # they may cancel
            out[f"down {layer}"] = by_row(second, first + self.gate_up(first, 2 * layer + 1) @ values["down"].T)
            x = second
        out["project"] = by_row(parts[-1], normed(x, norms[-1]) @ values["project"].T)
        return out

    def gate_up(self, x: np.ndarray, norm: int) -> np.ndarray:
        """In float64."""
        n = normed(x, self.norm_values[norm])
        gate, up = n @ self.values["gate"].T, n @ self.values["up"].T
        return gate / (1 + np.exp(-gate)) * up


def by_row(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.array([relative_error(one, other) for one, other in zip(found, expected)])


def usual_rows(chain: Chain, rows: int, seed: int = 7) -> tuple[np.ndarray, list[np.ndarray]]:
    """(x, what is attended in each layer): rows of different size, additions of about theirs."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, chain.cols)) * np.exp(random.standard_normal((rows, 1)))
    return x.astype(np.float32), [random.standard_normal((rows, chain.width)).astype(np.float32) for _ in range(LAYERS)]


def added(chain: Chain, state, attended: np.ndarray) -> np.ndarray:
    """What the first addition adds for these rows, to the bit: added to zeros."""
    return chain.products_of(state, np.zeros((len(attended), chain.cols), np.float32), attended)[0]


ODD = ("larger", "smaller", "tiny", "zero", "from zero", "nan", "one nan", "inf", "peak", "usual")
"""What the first addition makes of a row."""
ORDERS = (ODD, ODD[::-1], ("larger",) * 3, ("zero",) * 2, ("nan",) * 2, ("usual", "usual", "nan"), ("inf", "usual", "usual"))
REMAINS = {"smaller": 1e-4, "tiny": 1e-6, "zero": 0.0}


def odd_rows(chain: Chain, state, kinds: tuple[str, ...], seed: int = 9) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows of these kinds: ODD."""
    x, attended = usual_rows(chain, len(kinds), seed)
    for row, kind in enumerate(kinds):
        if kind == "larger":
            attended[0][row] *= 1e6
        elif kind in REMAINS:
            attended[0][row] *= 1e4 if kind == "tiny" else 1.0   # what remains is not small beside eps
            x[row] = added(chain, state, attended[0][row:row + 1])[0] * np.float32(REMAINS[kind] - 1)
        elif kind == "from zero":
            x[row] = 0
        elif kind == "nan":
            x[row] = np.nan
        elif kind == "one nan":
            x[row, chain.cols // 2] = np.nan
        elif kind == "inf":
            x[row, 3] = -np.inf
        elif kind == "peak":
            x[row, 5] = 1e6
    return x, attended


def check_company(chain: Chain, state, x: np.ndarray, attended: list[np.ndarray], counts: tuple[int, ...]) -> np.ndarray:
    """A row's bits are the same with any number of rows and at any place; returns what comes of all rows in the order they have."""
    total = len(x)
    whole = chain.run(state, x, attended)
    for place, count in enumerate(counts):
        chosen = (np.arange(count) * (1 + place % 3) + 7 * place) % total
        found = chain.run(state, x[chosen], [rows[chosen] for rows in attended])
        if not np.array_equal(found.view(np.uint32), whole[chosen].view(np.uint32)):
            wrong = [int(row) for row, one in zip(chosen, found) if not np.array_equal(one.view(np.uint32), whole[row].view(np.uint32))]
            raise AssertionError(f"with {count} rows {list(map(int, chosen))} other bits of {wrong}")
    return whole


def check_usual(chain: Chain, state, counts: tuple[int, ...] = COUNTS) -> float:
    """Usual rows: the worst error of a stage against NumPy, bits with all counts; none is converted anew."""
    total = max(counts)
    x, attended = usual_rows(chain, total)
    whole = check_company(chain, state, x, attended, counts)
    errors = chain.errors(x, attended, whole)
    first, products = chain.products_of(state, x, attended[0])
    chain.run(state, x, attended)
    assert not chain.lost(total).any(), "usual rows were converted anew"
    assert np.array_equal(first, whole[:, len(chain.values["project"]):][:, :chain.cols])
    errors["gate_up"] = by_row(products, chain.gate_up(first, 1))
    return max(float(np.sqrt(np.square(rows).mean())) for rows in errors.values())


def check_odd(chain: Chain, state, orders: tuple[tuple[str, ...], ...]) -> dict[str, float]:
    """Rows that the scale does not suit, at these places, beside others and alone; usual rows behind them have the bits they had. Returns the worst
    error of each kind's numbers."""
    worst: dict[str, float] = {}
    plain = usual_rows(chain, max(map(len, orders)))
    before = chain.run(state, *plain)
    for order in orders:
        x, attended = odd_rows(chain, state, order)
        with np.errstate(all="ignore"):
            whole = chain.run(state, x, attended)
            assert np.array_equal(chain.run(state, *plain), before), f"usual rows behind {order} have other bits"
            for row in range(len(order)):
                for some in (slice(row, row + 1), slice(row, row + 2), slice(0, row + 1)):
                    found = chain.run(state, x[some], [rows[some] for rows in attended])
                    assert np.array_equal(found.view(np.uint32), whole[some].view(np.uint32)), f"{order[some]} have other bits than among {order}"
            errors = chain.errors(x, attended, whole)
            first, products = chain.products_of(state, x, attended[0])
            errors["gate_up"] = by_row(products, chain.gate_up(first, 1))
        for row, kind in enumerate(order):
            if kind in ("nan", "one nan", "inf"):
                assert np.isnan(whole[row, -len(chain.values["project"]):]).all(), f"{kind} is hidden"
                continue
            assert np.isfinite(whole[row]).all(), f"{kind}: not finite"
            worst[kind] = max(worst.get(kind, 0.0), *(float(rows[row]) for rows in errors.values()))
    return worst


def check_repeats(chain: Chain, state, x: np.ndarray, attended: list[np.ndarray], times: int) -> None:
    """The same passes with nothing between their stages: the same bits."""
    rows, first = len(x), None
    chain.looks_at_words = False
    for _ in range(times):
        chain.begin(state, x, attended)
        for layer in range(LAYERS):
            chain.layer(rows, layer)
        chain.backend.project(chain.norms[-1], chain.project, chain.x.rows(rows), chain.y.rows(rows))
        bits = [chain.backend.download(buffer.rows(rows)).view(np.uint32) for buffer in (chain.x, chain.y)]
        first = first or bits
        assert all(map(np.array_equal, first, bits)), f"the same pass of {rows} rows gave other bits"
    chain.looks_at_words = True
