"""The network against golden values of an independent implementation, from a Hugging Face folder and from GGUF."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from q27app.weights.convert import convert
from tests.model.runs import Run

TOLERANCE = 1e-4
"""float32 implementations differ by up to 4e-5 on logits of spread 2 whatever the order of summation."""

TIED = ["--lin-k-heads", "2", "--lin-v-heads", "2", "--heads", "8", "--kv-heads", "2", "--tied"]


@pytest.fixture(scope="module", params=["default", "equal-heads-tied", "small-r3", "small-equal"])
def case(request, shared, tmp_path_factory):
    """(golden values, .q27 path) of each stored case; F32 weights."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    if name.startswith("small"):
        source = shared / "oracle" / "golden" / f"{name}.gguf"
    else:
        source = folder / "hf"
        script = shared / "oracle" / "make_tiny_hf.py"
        subprocess.run([sys.executable, str(script), str(source), *(TIED if "tied" in name else [])], check=True)
    convert(source, folder / "model.q27", tier="f32")
    return np.load(shared / "oracle" / "golden" / f"{name}.npz"), folder / "model.q27"


def to_tiled(heads: np.ndarray, num_key_heads: int) -> np.ndarray:
    """Heads grouped by key head (first axis) -> tiled order."""
    ratio = len(heads) // num_key_heads
    return heads[np.arange(len(heads)).reshape(num_key_heads, ratio).T.ravel()]


def test_prompt_logits_and_final_rows_equal_golden(case):
    golden, path = case
    run = Run(path)
    logits = run.feed(golden["tokens"])
    assert np.abs(logits - golden["logits"]).max() < TOLERANCE
    assert np.abs(run.final() - golden["final"]).max() < TOLERANCE
    assert (logits.argmax(-1) == golden["logits"].argmax(-1)).all()


def test_greedy_continuation_equals_golden(case):
    golden, path = case
    run = Run(path)
    token = int(run.feed(golden["tokens"])[-1].argmax())
    for expected, logits in zip(golden["greedy"], golden["greedy_logits"], strict=True):
        assert token == expected
        row = run.feed([token], phase="decode")[0]
        assert np.abs(row - logits).max() < TOLERANCE
        token = int(row.argmax())


def test_state_after_the_prompt_equals_golden(case):
    golden, path = case
    run = Run(path)
    run.feed(golden["tokens"])
    config = run.model.config
    conv, delta = run.state.conv[0], run.state.delta[0]
    width = config.delta_head_dim
    keys = 2 * config.delta_key_heads
    for index in range(config.num_delta_layers):
        expected = to_tiled(golden["delta_state"][index], config.delta_key_heads)
        assert np.abs(delta[index] - expected).max() < TOLERANCE
        heads = golden["conv_state"][index].reshape(-1, width, config.conv_width - 1)
        window = np.concatenate([heads[:keys], to_tiled(heads[keys:], config.delta_key_heads)])
        found = conv[index].T.reshape(window.shape)
        assert np.abs(found - window).max() < TOLERANCE


def test_drafts_equal_golden(case):
    golden, path = case
    if "draft" not in golden or not len(golden["draft"]):
        pytest.skip("this golden file has no drafts")
    run = Run(path)
    run.feed(golden["tokens"])
    token = int(golden["greedy"][0])
    for depth, (expected, logits) in enumerate(zip(golden["draft"], golden["draft_logits"], strict=True)):
        row = run.draft(token, depth == 0, run.length + depth)
        assert np.abs(row - logits).max() < TOLERANCE
        assert row.argmax() == expected
        token = int(expected)


def test_chunked_prefill_and_steps_agree(case):
    golden, path = case
    tokens = golden["tokens"]
    whole = Run(path).feed(tokens)
    run = Run(path)
    steps = np.concatenate([run.feed([token], phase="decode") for token in tokens[:40]])
    error = np.sqrt(((steps - whole[:40]) ** 2).mean() / (whole[:40] ** 2).mean())
    assert error < 1e-5


def test_bytes_on_the_backend_count_shared_weights_once(case):
    _, path = case
    weights = Run(path).model.weights
    parts = [weights.embed, weights.final_norm, weights.head, weights.draft_head]
    shared_once = {id(part): part.nbytes for part in parts}
    assert weights.nbytes > sum(shared_once.values())
    assert weights.nbytes < 4 * sum(tensor.values().size for tensor in Run(path).container.tensors.values()) * 1.01
