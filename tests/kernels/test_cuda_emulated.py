"""The CUDA kernels on the CPU, thread by thread (tests/kernels/emulation): every family against NumPy at a small size."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from q27app.kernels import cuda_tiles, reference
from q27app.kernels.batch import SamplingRows, in_flight
from q27app.kernels.cuda_backend import CudaBackend
from q27app.kernels.reference_sample import sample_rows
from q27app.weights.dtypes import F16, F32, Q4_G64
from tests.kernels import cuda_checks
from tests.kernels.emulation.emulated_device import CARD, SMALL_CARD, EmulatedDevice, has_compiler
from tests.kernels.made import make_batch

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="needs g++ on x86-64"),
    pytest.mark.long,
]


@pytest.fixture
def device():
    device = EmulatedDevice()
    yield device
    device.check_guards()


def open_state(backend: CudaBackend, cols: int):
    config = cuda_checks.NANO
    geometry = SimpleNamespace(**{name: getattr(config, name) for name in config.__dataclass_fields__} | {"hidden_size": cols})
    return backend.allocate_state(geometry, 1, 1, "fp16", 2, 4, 16)


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["wide", "99 KiB"])
@pytest.mark.parametrize("mix", cuda_checks.MIXES)
def test_matrix_stages_equal_numpy_and_keep_a_rows_bits(card, mix):
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES[mix], 256, 1)
    backend.empty((96, 256), "float32", "x")
    state = open_state(backend, 256)
    for phase, counts in (("decode", (1, 3, 9)), ("prefill", (1, 70))):
        assert cuda_checks.check_linear(backend, state, stage, phase, counts) < cuda_checks.TENSOR_CORE_TOLERANCE
    device.check_guards()


@pytest.mark.parametrize("card", [CARD, SMALL_CARD], ids=["wide", "99 KiB"])
def test_a_prompt_meets_f16_matrices_without_its_rounding(card):
    device = EmulatedDevice(card)
    backend = CudaBackend(device)
    stage = cuda_checks.Stage(backend, cuda_checks.MIXES["f16"], 256, 1)
    x = cuda_checks.rows_with_peaks(np.random.default_rng(2), 70, 256, np.ones(256, np.float32))
    backend.empty((70, 256), "float32", "x")
    backend.begin(cuda_checks.make_batch("prefill", [[0] * 70], [0], [0], [[0, 1]]), open_state(backend, 256))
    y = backend.upload(np.full((70, 50), np.nan, np.float32))
    backend.project(stage.norm, stage.weight, backend.upload(x), y)
    assert cuda_checks.relative_error(backend.download(y), reference.project(stage.norm_values, stage.values, x, 1e-6)) < 2e-6
    device.check_guards()


@pytest.mark.parametrize("kv_format", ["fp16", "fp8", "turbo5k"])
def test_a_model_equals_numpy_through_its_life(device, kv_format):
    """A number near a threshold may get another code than NumPy's: that is the error of the small formats here."""
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, kv_format)
    errors = cuda_checks.check_model(expected, found)
    assert max(errors.values()) < (2e-3 if kv_format == "fp16" else 2e-2), errors


def test_states_kept_within_a_prefill_are_those_of_its_parts(device):
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, F16)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 256)
    cuda_checks.check_keeps(cuda_checks.Lines(model, 4, 16, "fp16", 64))


def test_a_quantised_model_equals_numpy_through_its_life(device):
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, Q4_G64, "fp16")
    errors = cuda_checks.check_model(expected, found, prompt=20)
    assert max(errors.values()) < 2e-3, errors


def sampling_rows(n: int, **changes) -> SamplingRows:
    values = {
        "temperature": np.full(n, 0.8, np.float32), "top_k": np.zeros(n, np.int32), "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32), "presence": np.zeros(n, np.float32), "frequency": np.zeros(n, np.float32),
        "seeds": np.arange(n, dtype=np.uint64) * np.uint64(1 << 33) + np.uint64(5), "positions": np.arange(n, dtype=np.int64) + (1 << 33),
        "penalty_starts": np.zeros(n + 1, np.int32), "penalty_ids": np.zeros(0, np.int32), "penalty_counts": np.zeros(0, np.int32),
        "num_logprobs": np.full(n, -1, np.int32), "masks": None,
    }
    return SamplingRows(**(values | changes))


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(6, np.float32)}, {}, {"top_k": np.full(6, 7, np.int32)}, {"top_p": np.full(6, 0.7, np.float32)},
    {"min_p": np.full(6, 0.1, np.float32)},
    {"top_k": np.full(6, 40, np.int32), "top_p": np.full(6, 0.9, np.float32), "num_logprobs": np.full(6, 3, np.int32)},
    {"presence": np.full(6, 2, np.float32), "frequency": np.full(6, 0.5, np.float32), "penalty_starts": np.arange(7, dtype=np.int32) * 2,
     "penalty_ids": np.arange(12, dtype=np.int32), "penalty_counts": np.ones(12, np.int32)},
], ids=["greedy", "plain", "top_k", "top_p", "min_p", "both, logprobs", "penalties"])
def test_sampling_equals_numpy(device, changes, vocab=200):
    backend = CudaBackend(device)
    random = np.random.default_rng(11)
    logits = (4 * random.standard_normal((6, vocab))).astype(np.float32)
    logits[0, 10] = logits[0, 20] = logits[0].max() + 1
    backend.batch = SimpleNamespace(num_seqs=1)
    open_state(backend, 256)
    backend.batch = SimpleNamespace(num_seqs=6)
    rows = sampling_rows(6, **changes)
    backend.sample(backend.upload(logits), rows)
    found = backend.result()
    tokens, margins, logprobs = sample_rows(logits, rows)
    assert found.tokens.tolist() == tokens.tolist()
    np.testing.assert_allclose(found.margins, margins, rtol=1e-6)
    for mine, theirs in zip(found.logprobs, logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_allclose([mine[0], *mine[2]], [theirs[0], *theirs[2]], rtol=1e-5, atol=1e-5)
            assert mine[1].tolist() == theirs[1].tolist()


@pytest.mark.parametrize("changes", [
    {"temperature": np.full(6, 30, np.float32), "top_p": np.full(6, 0.99, np.float32)},
    {"top_k": np.array([0, 5, 0, 64, 65, 1], np.int32), "top_p": np.array([1, 1, 0.5, 0.9, 0.9, 0.9], np.float32),
     "temperature": np.array([0, 1, 1, 1, 1, 1], np.float32), "min_p": np.array([0, 0, 0, 0.01, 0, 0], np.float32)},
], ids=["more than the list", "mixed"])
def test_cuts_of_a_larger_vocabulary_equal_numpy(monkeypatch, device, changes):
    """More ids than a list holds; what a bound leaves out is never kept."""
    monkeypatch.setattr(cuda_checks, "NANO", cuda_checks.replace(cuda_checks.NANO, vocab_size=6000))
    test_sampling_equals_numpy(device, changes, 6000)


def test_checksums_are_those_of_the_memory_and_see_a_changed_bit(device):
    backend = CudaBackend(device)
    random = np.random.default_rng(4)
    tensors = [cuda_checks.made_tensor(random, name, 37, 64, dtype) for name, dtype in (("a", Q4_G64), ("b", F16))]
    weights = [backend.load([tensor]) for tensor in tensors]
    before = backend.checksums()
    assert before == [(tensor.name, reference.checksum(device.download(weight.address, weight.nbytes).view(np.uint32)))
                      for tensor, weight in zip(tensors, weights)]
    word = device.download(weights[1].address + 40, 4)
    word[2] ^= 16
    device.upload(weights[1].address + 40, word)
    after = backend.checksums()
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(3, np.float32)}, {},
    {"presence": np.full(3, 2, np.float32), "frequency": np.full(3, 0.5, np.float32), "penalty_starts": np.array([0, 2, 2, 5], np.int32),
     "penalty_ids": np.arange(5, dtype=np.int32), "penalty_counts": np.ones(5, np.int32)},
], ids=["greedy", "plain", "penalties"])
def test_a_chain_of_drafts_equals_numpy(device, changes):
    """Steps queued on the device against the same steps in NumPy: tokens, and places that do not pass a limit."""
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")
    limits, rows, results = np.array([4, 1, 3], np.int32), sampling_rows(3, **changes), []
    for lines in (expected, found):
        for slot in range(3):
            lines.feed(slot, list(range(5 + slot, 60)))
            lines.reserve(slot, 128)
        batch = make_batch("draft", [[3]] * 3, lines.lengths[:3], [0, 1, 2], lines.tables[:3])
        results.append(lines.model.draft_chain(batch, lines.state, True, 4, rows, limits))
    for row, limit in enumerate(limits.tolist()):
        assert results[0].tokens[:limit, row].tolist() == results[1].tokens[:limit, row].tolist()
        np.testing.assert_allclose(results[1].margins[:limit, row], results[0].margins[:limit, row], rtol=0.02, atol=0.02)
    words = found.model.backend.device.download(found.model.backend.area.at("positions"), 12).view(np.int32)
    assert (words - found.lengths[:3]).tolist() == [3, 0, 2]


@pytest.mark.parametrize("changes", [
    {"temperature": np.zeros(2, np.float32)}, {}, {"temperature": np.full(2, 30, np.float32), "top_p": np.full(2, 0.99, np.float32)},
    {"top_k": np.full(2, 3, np.int32)},
    {"masks": np.concatenate([np.zeros((2, 8), np.uint32), np.full((2, 42), 0xFFFFFFFF, np.uint32)], 1)},
], ids=["greedy", "plain", "more than the list", "top_k", "rare ones allowed alone but for the last"])
def test_narrow_drafts_equal_numpy_and_are_never_rare(device, changes):
    config = cuda_checks.replace(cuda_checks.NANO, vocab_size=9600 if "top_p" in changes else 1600)
    common = 7040 if "top_p" in changes else 256
    expected, found = cuda_checks.pair_of_lines(device, config, F16, "fp16", common_ids=common)
    rare, rows, results = (common, config.vocab_size - 512), sampling_rows(2, **changes), []
    for lines in (expected, found):
        assert lines.model.rare_ids == rare
        for slot in range(2):
            lines.feed(slot, list(range(5 + slot, 60)))
            lines.reserve(slot, 128)
        batch = make_batch("draft", [[3]] * 2, lines.lengths[:2], [0, 1], lines.tables[:2])
        for is_narrow in (False, True):   # what the whole head left in the logits is not looked at
            results.append(lines.model.draft_chain(batch, lines.state, True, 4, rows, np.full(2, 4, np.int32), is_narrow))
    for whole, narrow in zip(results[:2], results[2:]):
        assert whole.tokens.tolist() == narrow.tokens.tolist()
        np.testing.assert_allclose(narrow.margins, whole.margins, rtol=0.02, atol=0.02)
    assert ((results[3].tokens < rare[0]) | (results[3].tokens >= rare[1])).all()
    if "temperature" not in changes and "masks" not in changes:
        assert ((results[2].tokens >= rare[0]) & (results[2].tokens < rare[1])).any()


def greedy_text(lines, slot: int, token: int, count: int) -> list[int]:
    """What greedy decoding says from a pending token on, that token first."""
    out = [token]
    for _ in range(count):
        out.append(int(lines.feed(slot, out[-1:], "decode")[0].argmax()))
    return out


def test_a_decode_pass_behind_another_takes_what_that_one_drew(device):
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, F16)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 64)
    cuda_checks.check_pass_behind(cuda_checks.Lines(model, 2, 4, "fp16", 16), sampling_rows(2, temperature=np.array([0, 0.8], np.float32)))


@pytest.mark.parametrize("dtype", [F16, Q4_G64])
def test_rows_decoded_together_leave_what_rows_decoded_singly_leave(device, dtype):
    """How an answer is computed again: slot, keys and values, logits after the last row."""
    tensors = cuda_checks.model_tensors(cuda_checks.NANO, dtype)
    model = cuda_checks.bound_model(CudaBackend(device), cuda_checks.NANO, tensors, 64)
    tokens, found = [int(token) for token in np.random.default_rng(2).integers(0, 100, 40)], []
    for size in (1, 5, 16):
        lines = cuda_checks.Lines(model, 1, 4, "fp16", 16)
        lines.feed(0, tokens[:9])
        for start in range(9, 40, size):
            logits = lines.feed(0, tokens[start:start + size], "decode")
        entries = lines.state.export_blocks(list(lines.tables[0])[:1])
        found.append((lines.state.export_slot(0).tobytes(), entries.tobytes(), logits[-1].tobytes()))
        lines.state.release()
    assert found[0] == found[1] == found[2]


def run_ahead(lines, texts: list[list[int]], steps: int, is_late: bool) -> tuple[list, list]:
    """A verify pass with one right draft for sequence 0 and none for 1, chains begun ahead, and the pass that takes them,
    sequence 1 first and sequence 0 with fewer. Accepted counts and drawn tokens of both passes. is_late: the first pass is
    committed when its result is known and the chains have run."""
    model, backend = lines.model, lines.model.backend
    told, rows = [], sampling_rows(2, temperature=np.zeros(2, np.float32))

    def verify(parts: list[list[int]], slots: list[int]):
        batch = make_batch("verify", parts, [lines.lengths[slot] for slot in slots], slots, [lines.tables[slot] for slot in slots], None, True)
        count = batch.num_rows
        backend.sample(model.forward(batch, lines.state), sampling_rows(count, temperature=np.zeros(count, np.float32)))
        backend.accept()

    for slot in range(2):
        lines.feed(slot, PROMPTS[slot])
        lines.reserve(slot, 128)
    wrong = (texts[0][2] + 1) % model.config.vocab_size
    verify([[*texts[0][:2], wrong], [texts[1][0], (texts[1][1] + 1) % model.config.vocab_size]], [0, 1])
    if not is_late:
        backend.commit()
    model.draft_ahead(lines.state, steps, rows)
    told.append(backend.result())
    if is_late:
        backend.commit(told[0].accepted)
    lines.lengths[0], lines.lengths[1] = lines.lengths[0] + 2, lines.lengths[1] + 1
    verify([[texts[1][1]] + [in_flight(1)] * steps, [texts[0][2]] + [in_flight(0)] * (steps - 1)], [1, 0])
    told.append(backend.result())
    return [one.accepted.tolist() for one in told], [one.tokens.tolist() for one in told]


PROMPTS = [list(range(5, 60)), list(range(9, 71))]


@pytest.mark.parametrize("is_late", [False, True])
def test_chains_that_are_begun_ahead_equal_numpy_and_those_that_wait(device, is_late):
    expected, found = cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")
    waiting, plain = (cuda_checks.pair_of_lines(device, cuda_checks.NANO, F16, "fp16")[0] for _ in range(2))
    texts = []
    for slot in range(2):
        plain.feed(slot, PROMPTS[slot])
        texts.append(greedy_text(plain, slot, 3 + slot, 3))
    for lines in (expected, found):
        accepted, tokens = run_ahead(lines, texts, 3, is_late)
        assert accepted[0] == [2, 1]
        assert tokens[0][:2] == texts[0][1:3] and tokens[0][3] == texts[1][1]
        assert tokens[1][0] == texts[1][2] and tokens[1][4] == texts[0][3]
        drafts = lines.model.backend.drafted().tokens
        for slot, text, known in ((0, texts[0], 2), (1, texts[1], 1)):
            if lines is expected:
                waiting.feed(slot, PROMPTS[slot])
                for token in text[:known]:
                    waiting.feed(slot, [token], "decode")
                waiting.reserve(slot, 128)
                batch = make_batch("draft", [[text[known]]], [waiting.lengths[slot]], [slot], [waiting.tables[slot]])
                chain = waiting.model.draft_chain(batch, waiting.state, True, 3, sampling_rows(1, temperature=np.zeros(1, np.float32)),
                                                  np.array([3], np.int32))
                assert drafts[:, slot].tolist() == chain.tokens[:, 0].tolist()
        kept = drafts if lines is expected else kept
        assert drafts.tolist() == kept.tolist()


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
    state = open_state(backend, 448)
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
    assert cuda_checks.relative_error(found["wide"][0] - start, x @ values.T) < cuda_checks.TENSOR_CORE_TOLERANCE
    for cut, (sums, gated) in found.items():
        assert np.array_equal(sums, found["wide"][0]) and np.array_equal(gated, found["wide"][1]), cut
    device.check_guards()
