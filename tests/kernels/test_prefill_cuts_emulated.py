"""However a prompt's products are cut into blocks, launches and splits, on the CPU (tests/kernels/emulation)."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.kernels import cuda_tiles
from q27app.kernels.cuda_backend import CudaBackend
from q27app.weights.dtypes import F16, F32, Q4_G64
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.made import make_batch, relative_error

pytestmark = [
    needs_compiler,
    pytest.mark.long,
]


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("rows", [3, 150])
def test_every_cut_of_prefill_gives_the_same_bits(card, rows, monkeypatch):
    """A row's bits may depend on neither the rows beside it nor on how blocks are cut for them."""
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    random = np.random.default_rng(2)
    tensors = [cuda_checks.made_tensor(random, f"w{i}", rows_of, 448, dtype) for i, (rows_of, dtype) in enumerate(((50, Q4_G64), (300, Q4_G64), (20, F16)))]
    weight, values = backend.load(tensors), np.concatenate([tensor.values() for tensor in tensors])
    pair = backend.load([cuda_checks.made_tensor(random, name, 72, 448, Q4_G64) for name in ("gate", "up")])
    norm = backend.load([cuda_checks.stored("norm", np.ones(448, np.float32), F32)])
    backend.empty((256, 448), "float32", "x")
    state = cuda_checks.open_state(backend, 448)
    monkeypatch.setattr(cuda_tiles, "tile_splits", lambda card, segments, units: 3 if card.has_warpgroups else 1)
    x, start = random.standard_normal((rows, 448)).astype(np.float32), random.standard_normal((rows, 370)).astype(np.float32)
    names = [shape.name for shape in cuda_tiles.tile_shapes(card)]
    found = {}
    for cut in (*names, "tokens", "tiles", "in turn"):
        def plan(card, segments, rows, splits=1, cut=cut):
            shapes = cuda_tiles.fitting_shapes(card, segments[0].kind)
            shape = shapes[min(names.index(cut) if cut in names else 1, len(shapes) - 1)]
            head, tail = cuda_tiles.cut_segments(segments, 8)
            if cut == "tokens" and rows > 64:
                return cuda_tiles.TilePart(shapes[0], segments, 0, 64, splits), cuda_tiles.TilePart(shape, segments, 64, rows - 64, splits)
            if cut == "tiles" and tail:
                return cuda_tiles.TilePart(shape, head, 0, rows, splits), cuda_tiles.TilePart(shapes[0], tail, 0, rows, splits)
            return (cuda_tiles.TilePart(shape, segments, 0, rows, splits),)

        monkeypatch.setattr(cuda_tiles, "SIDE_BY_SIDE_ROWS", 512 if cut not in ("in turn", "few") else 0)
        monkeypatch.setattr(cuda_tiles, "tile_plan", plan)
        backend.begin(make_batch("prefill", [[0] * rows], [0], [0], [[0]]), state)
        out, gated = backend.upload(start), backend.upload(np.full((rows, 72), np.nan, np.float32))
        backend.add_linear(weight, backend.upload(x), out)
        backend.gate_up(norm, pair, backend.upload(x), gated)
        found[cut] = backend.download(out), backend.download(gated)
    assert relative_error(found["wide"][0] - start, x @ values.T) < cuda_checks.TENSOR_CORE_TOLERANCE
    for cut, (sums, gated) in found.items():
        assert np.array_equal(sums, found["wide"][0]) and np.array_equal(gated, found["wide"][1]), cut
    device.check_guards()
