"""The attend kernels on the CPU (tests/kernels/emulation) by KV format: codes to the byte, results near NumPy, bits of a row."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from q27app.errors import UsageError
from q27app.kernels import cuda_attention
from q27app.kernels.card import MAX_CONTEXT, cut_count
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.kv_formats import kv_format
from q27app.weights.dtypes import Q4_G64, Q8_G128
from tests.kernels import attend_checks, cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, needs_compiler
from tests.kernels.made import begin_alone, make_batch, relative_error

pytestmark = needs_compiler
TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510")
CONFIG = cuda_checks.NANO
WIDE_CARD, ADA_CARD = replace(CARD, capability=(8, 0)), replace(SMALL_CARD, capability=(8, 9))
SMALL_BLACKWELL_CARD = replace(SMALL_CARD, capability=(12, 0))
TWO_KEY_HEADS = replace(CONFIG, num_heads=12, num_kv_heads=2)


@pytest.mark.long
@pytest.mark.parametrize("name, card, config", [
    ("turbo5k", CARD, CONFIG), ("turbo5k", SMALL_CARD, TWO_KEY_HEADS), ("fp16", CARD, CONFIG), ("fp16", SMALL_CARD, CONFIG),
    ("fp8", CARD, CONFIG), ("turbo3", CARD, CONFIG), ("turbo5k", WIDE_CARD, CONFIG), ("fp8", ADA_CARD, CONFIG), ("turbo3", SMALL_CARD, CONFIG)],
    ids=["turbo5k", "turbo5k, two key heads, 99 KiB", "fp16", "fp16, 99 KiB", "fp8", "turbo3", "turbo5k, wide, by warps", "fp8, 99 KiB",
         "turbo3, 99 KiB"])
def test_attention_of_a_format(name, card, config):
    device = EmulatedDevice(card)
    bench = attend_checks.AttendBench(device, config, name, 6, 2, 80)
    assert attend_checks.check_codes(bench, 70, 1) == 140 * config.num_kv_heads
    attend_checks.fill(bench, 192)
    for position, counts, phase in ((0, (5, 1), "decode"), (186, (12, 1, 8, 3), "decode"), (61, (70,), "prefill")):
        assert attend_checks.check_attend(bench, position, counts, phase) < 5e-4
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("card", [CARD, ADA_CARD], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("name", ["fp16", "fp8", "turbo5k", "turbo3"])
def test_prefill_in_chunks(name, card):
    """Tiles of queries that end anywhere, keys that a tile's last rows alone see."""
    device = EmulatedDevice(card)
    bench = attend_checks.AttendBench(device, CONFIG, name, 6, 1, 200)
    attend_checks.fill(bench, 192)
    for position, counts in ((61, (100, 37)), (0, (150,))):
        assert attend_checks.check_attend(bench, position, counts, "prefill") < 5e-4
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["wide", "99 KiB"])
def test_rows_where_cuts_change_their_size(card):
    """8 rows about the first border: the last cut of 128 keys and the first of 512, tiles that no earlier row sees."""
    device, border = EmulatedDevice(card), card.attend_defines()["BORDER_0"]
    bench = attend_checks.AttendBench(device, CONFIG, "turbo5k", border // 64 + 2, 1, 1024)
    attend_checks.fill(bench, border + 64)
    assert attend_checks.check_attend(bench, border - 4, (8, 1, 4)) < 5e-4
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("name, card", [("fp8", CARD), ("turbo3", CARD), ("turbo5k", CARD), ("fp16", CARD), ("turbo3", SMALL_CARD)],
                         ids=["fp8, warpgroups", "turbo3, warpgroups", "turbo5k, warpgroups", "fp16, warps", "turbo3, warps"])
def test_references_of_weights_that_rise_with_every_tile(name, card):
    """Scores that grow with the position, up to some twenty times those of natural keys: each row's columns ask for other references at
    other keys, and get them whoever shares the tile."""
    device, random = EmulatedDevice(card), np.random.default_rng(9)
    bench = attend_checks.AttendBench(device, CONFIG, name, 6, 1, 200)
    k, v = random.standard_normal((2, 200, CONFIG.num_kv_heads * CONFIG.head_dim)).astype(np.float32)
    bench.store(k * (0.05 + np.arange(200, dtype=np.float32)[:, None] / 10), v, 0)
    for position in (120, 184):
        assert attend_checks.check_attend(bench, position, (8, 1, 4, 16)) < 2e-3   # a few keys have all the weight
    device.check_guards()


class LateDevice(EmulatedDevice):
    """Kernels that may start early do, as soon as they may: before they wait, they find the cache as it was at the last copy, or when the
    last kernel began that may not."""

    cache: tuple[int, int] | None = None   # address and bytes of the blocks
    before = np.empty(0, np.uint8)

    def upload(self, address, data) -> None:
        super().upload(address, data)
        if self.cache:
            self.before = self.download(*self.cache)

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        if self.cache:
            if not dependent or not self.card.has_dependent_launch:
                self.before = self.download(*self.cache)
            self.show_late(self.cache[0], self.before)
        super().launch(function, grid, block, shared, args, dependent)


@pytest.mark.long
@pytest.mark.parametrize("name, card", [("fp8", CARD), ("turbo3", CARD), ("fp16", CARD), ("turbo5k", SMALL_BLACKWELL_CARD), ("fp8", SMALL_BLACKWELL_CARD)],
                         ids=["fp8, warpgroups", "turbo3, warpgroups", "fp16, warps", "turbo5k, warps, 99 KiB", "fp8, warps, 99 KiB"])
def test_keys_of_a_pass_are_read_after_those_who_write_them(name, card):
    """Keys are fetched before the kernel in front has ended where they are of earlier passes: not those of rows of this pass that end a cut
    before another group of its rows begins."""
    device, cut = LateDevice(card), card.attend_defines()["CUT_0"]
    bench = attend_checks.AttendBench(device, CONFIG, name, 4, 1, 200)
    attend_checks.fill(bench, 192)
    device.cache = bench.state.blocks, 4 * bench.state.block_bytes
    assert attend_checks.check_attend(bench, cut - 8, (16, 12, 1, 8)) < 5e-4
    device.check_guards()


@pytest.mark.long
@pytest.mark.parametrize("position", [262_143, 655_359])
def test_angles_are_right_at_every_depth(position):
    device = EmulatedDevice()
    bench = attend_checks.AttendBench(device, CONFIG, "fp16", 2, 1, 16)
    bench.backend.begin(bench.batch("decode", position, 1), bench.state)
    found = device.download(bench.backend.scratch.rope, 4 * CONFIG.rotary_dim).view(np.float32).reshape(-1, 2)
    for d, (cosine, sine) in enumerate(found):
        angle = Fraction(position) * Fraction(CONFIG.rope_theta ** (-2 * d / CONFIG.rotary_dim))
        turned = float(angle - int(angle / TWO_PI) * TWO_PI)   # reduced in exact arithmetic
        assert cosine == pytest.approx(math.cos(turned), abs=1e-7) and sine == pytest.approx(math.sin(turned), abs=1e-7)


def test_a_head_of_another_size_is_refused_on_a_card():
    with pytest.raises(UsageError, match="turbo5k needs heads of 256 numbers on the GPU, this model's have 128"):
        attend_checks.AttendBench(EmulatedDevice(), replace(CONFIG, head_dim=128), "turbo5k", 2)


def test_cuts_cover_the_longest_window_in_order():
    for card in (CARD, SMALL_CARD):
        defines = card.attend_defines()
        counts = [cut_count(defines, keys) for keys in range(0, MAX_CONTEXT + 1, 64)]
        assert counts[:2] == [0, 1] and all(0 <= b - a <= 1 for a, b in zip(counts, counts[1:]))
        assert cut_count(defines, MAX_CONTEXT) < 480


@pytest.mark.parametrize("name", ["fp16", "turbo5k", "turbo3"])
def test_eight_rows_share_one_read_on_the_smallest_card(name):
    _, needed = cuda_attention.decode_block(SMALL_CARD, kv_format(name), 256, 6, 8)
    assert needed <= SMALL_CARD.shared_bytes


@pytest.mark.long
def test_an_embedding_in_host_memory_gives_the_same_rows():
    device, rows = EmulatedDevice(), []
    for in_host in (False, True):
        backend = CudaBackend(device)
        table = cuda_checks.made_tensor(np.random.default_rng(3), "token_embd.weight", 200, 256, Q8_G128)
        weight = backend.load([table], in_host)
        assert weight.nbytes == (0 if in_host else weight.packed_bytes)
        x = backend.empty((3, 256), "float32", "x")
        state = backend.allocate_state(replace(CONFIG, hidden_size=256), 1, 1, "fp16", 1, 2, 16)
        backend.begin(make_batch("decode", [[0, 7, 199]], [0], [0], [[0]]), state)
        backend.embed(weight, x)
        rows.append(backend.download(x))
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_allclose(rows[0], table.values()[[0, 7, 199]], atol=1e-6)


@pytest.mark.long
def test_a_row_of_each_of_many_sequences_finds_its_own_keys():
    """More sequences than a warp has lanes, in one pass: the bits of each alone."""
    count, device = 43, EmulatedDevice(CARD)
    bench = attend_checks.AttendBench(device, CONFIG, "fp16", count, 1, count + 2)
    attend_checks.fill(bench, 64 * count)
    rows = np.random.default_rng(3).standard_normal((count + 1, bench.width)).astype(np.float32)
    places = [(7 * seq) % 60 for seq in range(count)]
    lengths = [1 + (seq == 20) for seq in range(count)]

    def attend(seqs: range) -> np.ndarray:
        mine = [sum(lengths[:seq]) + row for seq in seqs for row in range(lengths[seq])]
        bench.put(rows[mine])
        batch = make_batch("decode", [[0] * lengths[seq] for seq in seqs], [places[seq] for seq in seqs], [0] * len(seqs), [[seq] for seq in seqs])
        begin_alone(bench.backend, batch, bench.state)
        bench.backend.attend(bench.y.rows(len(mine)), bench.layer[0], bench.out.rows(len(mine)))
        return bench.backend.download(bench.out.rows(len(mine)))

    together = attend(range(count))
    alone = np.concatenate([attend(range(seq, seq + 1)) for seq in range(count)])
    assert np.array_equal(together, alone)
    device.check_guards()


def attend_all(card, config, passes) -> tuple[list[np.ndarray], np.ndarray, list[str]]:
    """What passes over one cache attended, (rows, position) of each of their sequences; the cache after them; the kernels launched."""
    device, blocks, random, found = LaunchedDevice(card), 100, np.random.default_rng(7), []
    bench = attend_checks.AttendBench(device, config, "fp8", blocks, 1, 64)
    attend_checks.fill(bench, 64 * blocks)
    for sequences in passes:
        rows, first, tables = sum(count for count, _ in sequences), 0, []
        for count, position in sequences:   # none reads what another writes
            tables.append([min(first + block, blocks - 1) for block in range(blocks)])
            first += (position + count + 63) // 64
        assert first <= blocks
        bench.put(random.standard_normal((rows, bench.width)).astype(np.float32))
        begin_alone(bench.backend, make_batch("verify", [[0] * count for count, _ in sequences], [at for _, at in sequences], [0] * len(sequences), tables), bench.state)
        bench.backend.attend(bench.y.rows(rows), bench.layer[0], bench.out.rows(rows))
        found.append(bench.backend.download(bench.out.rows(rows)).copy())
    device.check_guards()
    return found, bench.state.export_blocks(range(blocks)), device.names


class LaunchedDevice(EmulatedDevice):
    """Knows the kernels of attention that were launched."""

    def __init__(self, card) -> None:
        super().__init__(card)
        self.names: list[str] = []

    def launch(self, function, grid, block, shared, args, dependent) -> None:
        self.names.append(function.__name__.removeprefix("run_"))
        super().launch(function, grid, block, shared, args, dependent)


ONE_ROW = [[(1, 0)], [(1, 63)], [(1, 64)], [(1, 127)], [(1, 128), (1, 70)], [(1, 2_500)], [(1, 4_096 + 130), (1, 3), (1, 300), (1, 65)]]
SOME_ROWS = [[(8, 0)], [(2, 63)], [(3, 62)], [(8, 120)], [(16, 125)], [(12, 250)], [(4, 300), (4, 3), (4, 64), (4, 126)], [(2, 7)] * 2 + [(1, 127), (7, 60)],
             [(8, 1_000)], [(4, 2_000)], [(16, 1_990)], [(1, 127), (3, 4_500)], [(7, 4_093), (1, 12), (2, 13)], [(1, 4_000)], [(8, 4_600)]]


@pytest.mark.long
@pytest.mark.parametrize("passes, sms, config, kernels", [   # without attend_rows: whatever the host takes for deep
    (ONE_ROW, 4, CONFIG, {"attend_decode_own"}), (SOME_ROWS, 132, CONFIG, {"attend_decode_own", "attend_decode_make"}),
    (SOME_ROWS, 24, TWO_KEY_HEADS, {"attend_decode_own", "attend_decode_make", "attend_rows", "attend_decode_4", "attend_decode_8"}),
    (SOME_ROWS, 3, TWO_KEY_HEADS, {"attend_decode_own", "attend_decode_make"})],
    ids=["a row of each sequence", "several rows, items of one", "several rows, items of one to four and deep ones, two key heads", "more items than blocks"])
def test_rows_that_attention_makes_itself_are_those_of_attend_rows(passes, sms, config, kernels, monkeypatch):
    """Results and the whole cache to the bit: rows anywhere in a cut and across its end, one and several sequences, one pass after another."""
    card = replace(CARD, num_sms=sms)
    if "attend_rows" not in kernels:
        monkeypatch.setattr(cuda_attention.Attention, "is_deep", lambda self, batch: False)
    *mine, names = attend_all(card, config, passes)
    assert {name for name in names if name.startswith(("attend_rows", "attend_decode"))} == kernels
    monkeypatch.setattr(cuda_attention.Attention, "_maker", lambda self: None)
    *theirs, names = attend_all(card, config, passes)
    assert "attend_rows" in names and not {"attend_decode_own", "attend_decode_make"} & set(names)
    assert all(np.array_equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
    assert np.array_equal(mine[1], theirs[1])


@pytest.mark.long
def test_a_pass_counts_its_items_anew():
    """More items than blocks, after a pass that counted its own: rows made by attend_rows and by attend_decode, by turns."""
    bench, random = attend_checks.AttendBench(EmulatedDevice(CARD), CONFIG, "fp8", 80, 1, 64), np.random.default_rng(3)
    attend_checks.fill(bench, 80 * 64)
    y, others = random.standard_normal((2, 8, bench.width)).astype(np.float32)
    wanted = {rows: bench.run("verify", y[:rows], 4_000).copy() for rows in (1, 8)}
    for rows, before in ((1, 8), (8, 1), (1, 1), (8, 8)):
        bench.run("verify", others[:before], 4_000)
        assert np.array_equal(bench.run("verify", y[:rows], 4_000), wanted[rows]), (rows, before)


@pytest.mark.long
@pytest.mark.parametrize("name, card, lengths", [
    ("fp8", CARD, (1,)), ("fp8", CARD, (7, 7, 7)), ("fp16", CARD, (2, 1)), ("turbo5k", CARD, (8,)), ("turbo3", SMALL_CARD, (7, 12)), ("fp8", ADA_CARD, (16, 1))],
    ids=["fp8", "fp8, 3 sequences of 7", "fp16", "turbo5k", "turbo3 by warps, 99 KiB", "fp8 by warps"])
def test_rows_left_ready_are_the_floats_that_it_gives(name, card, lengths):
    """Each number to half a step of a half, and what the next stage makes of them; a launch of attention may begin inside a record."""
    random, count, found = np.random.default_rng(5), sum(lengths), []
    rows = random.standard_normal((count, CONFIG.attention_width * 2 + 2 * CONFIG.num_kv_heads * CONFIG.head_dim)).astype(np.float32)
    made = cuda_checks.made_tensor(random, "out", 72, CONFIG.attention_width, Q4_G64)
    for is_ready in (False, True):
        device = EmulatedDevice(card)
        bench = attend_checks.AttendBench(device, CONFIG, name, 2 * len(lengths), 1, 80, is_ready)
        backend, out, weight = bench.backend, bench.out.rows(count), bench.backend.load([made])
        attend_checks.fill(bench, 128 * len(lengths))
        bench.put(rows)
        batch = make_batch("decode", [[0] * length for length in lengths], [50 + 3 * seq for seq in range(len(lengths))], [0] * len(lengths),
                           [[2 * seq, 2 * seq + 1] for seq in range(len(lengths))])
        begin_alone(backend, batch, bench.state)
        backend.attend(bench.y.rows(count), bench.layer[0], out)
        ready = backend.ready.of(out)
        assert (ready is not None) == is_ready
        x = backend.upload(np.zeros((count, 72), np.float32))
        if is_ready:
            backend.add_linear(weight, out, x)
        found.append(backend.download(out))
        device.check_guards()
    assert (np.abs(found[1] - found[0]) <= 2.0 ** -11 * np.abs(found[0]) + 2.0 ** -25 / ready.scale * 16).all()
    assert relative_error(backend.download(x), found[0] @ made.values().T) < cuda_checks.TENSOR_CORE_TOLERANCE
