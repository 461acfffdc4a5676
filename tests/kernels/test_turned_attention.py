"""Formats that turn rows, through the whole NumPy backend: near the exact attention, the same bits in every chunking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from q27app.errors import UsageError
from q27app.kernels import reference
from q27app.kernels.kv_formats import KV_FORMATS, kv_format
from q27app.kernels.numpy_attention import attend_pass
from tests.kernels import made
from tests.kernels.test_numpy_blocks import normal, one_sequence

SMALL = replace(made.TINY, head_dim=128, num_heads=4, num_kv_heads=2, hidden_size=64)
TURNED = [form.name for form in KV_FORMATS.values() if form.is_turned]
TOKENS = np.random.default_rng(8).integers(0, 101, 230)


@pytest.fixture(scope="module")
def small():
    return made.dense_model(SMALL)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name, low, high", [("turbo5k", 0.15, 0.22), ("turbo3v", 0.15, 0.22), ("turbo3", 0.18, 0.35)])
def test_attention_is_that_of_the_decoded_rows_and_near_the_exact_one(name, phase, low, high):
    """Values of 3 bits alone give an error of 0.184 where weights are even, as here."""
    form, config, rows = kv_format(name), made.DEMO, 100 if phase == "prefill" else 16
    state, work = one_sequence(config, phase, 0, rows, [5, 2], name)
    k, v = (normal(rows, config.num_kv_heads, config.head_dim, seed=seed) for seed in (1, 2))
    state.write_rows(0, work.physical, k, v)
    q = normal(rows, config.num_heads, config.head_dim, seed=3)
    out = np.empty_like(q)
    attend_pass(work, q, 0, 0, out)
    decoded = [codec.turn_back(codec.decode(codec.encode(x))) for codec, x in ((form.key, k), (form.value, v))]
    assert made.relative_error(out, reference.attend(q, *decoded, np.arange(rows))) < 2e-6
    assert low < made.relative_error(out, reference.attend(q, k, v, np.arange(rows))) < high


@pytest.mark.parametrize("name", TURNED)
def test_bits_depend_neither_on_chunks_nor_on_stale_blocks_nor_on_company(small, name):
    """Prefill in one and in two pieces, over blocks that hold anything; then 5 rows at once and one by one."""
    one, two = (made.Lines(small, kv_format=name) for _ in range(2))
    for array in (*two.state.keys, *two.state.values):
        array.view(np.uint8)[...] = 0xFF   # a NaN norm
    two.reserve(0, 260, scattered=True)
    expected = one.feed(0, TOKENS[:200])
    found = np.concatenate([two.feed(0, TOKENS[:128]), two.feed(0, TOKENS[128:200])])
    np.testing.assert_array_equal(found, expected)
    steps = np.concatenate([one.feed(0, [token], "decode") for token in TOKENS[200:205]])
    two.feed(1, TOKENS[50:60])
    together = two.feed_many({0: TOKENS[200:205], 1: TOKENS[60:63]}, "decode")
    np.testing.assert_array_equal(together[:5], steps)


@pytest.mark.parametrize("name", TURNED)
def test_blocks_go_out_and_in_again(small, name):
    lines = made.Lines(small, kv_format=name)
    expected = lines.feed(0, TOKENS[:130])
    step = lines.feed(0, [7], "decode")
    other = made.Lines(small, kv_format=name)
    other.reserve(0, 131, scattered=True)
    other.state.import_blocks(other.tables[0], lines.state.export_blocks(lines.tables[0]))
    other.feed(1, TOKENS[:130], logit_rows=[])
    other.state.copy_slot(1, 0)
    other.lengths[0] = 130
    np.testing.assert_array_equal(other.feed(0, [7], "decode"), step)
    assert np.isfinite(expected).all()


def test_a_model_with_other_heads_is_refused():
    with pytest.raises(UsageError, match="turbo3 codes heads of a multiple of 128 numbers, this model's have 16"):
        made.Lines(made.dense_model(made.TINY), kv_format="turbo3")
