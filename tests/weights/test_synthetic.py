"""Constructed checkpoints: their text and drafts are known, in every tier, before they run."""

from __future__ import annotations

import json
import time
from collections import Counter

import numpy as np
import pytest

from q27app.errors import FileFormatError, UsageError
from q27app.weights.container import open_container
from q27app.weights.dtypes import Q4_G64, Q8_G128
from q27app.weights.synthetic import DECOY, describe, right_tokens, synthesize
from q27app.weights.synthetic_pool import PERIOD, Pool
from q27app.weights.synthetic_sizes import parse_size
from q27app.weights.tiers import TIER_NAMES
from tests.pace import slowness

NANO_VOCAB = 2560


def open_nano(tmp_path, **options):
    return open_container(synthesize(tmp_path / "nano.q27", "nano", **options))


def greedy_run(model, prompt, count):
    """(greedy tokens after the prompt, the draft after each of them, smallest margin of the greedy logits)."""
    tokens, drafts, margin = list(prompt), [], np.inf
    for position in range(len(prompt) + count):
        logits, hidden = model.step(tokens[position], position)
        best, second = np.sort(logits)[[-1, -2]]
        if position + 1 == len(tokens):
            tokens.append(int(logits.argmax()))
        margin = min(margin, best - second)
        drafts.append(int(model.draft(tokens[position + 1], hidden, position + 1)[0].argmax()))
    return tokens[len(prompt) :], drafts[len(prompt) - 1 :], margin


@pytest.mark.parametrize("tier", TIER_NAMES)
def test_chain_counts_upwards_and_drafts_as_told_in_every_tier(tmp_path, plain_model, tier):
    with open_nano(tmp_path, tier=tier, accept=0.6, seed=5) as file:
        model = plain_model(file.metadata, file.tensors)
    right = right_tokens(NANO_VOCAB, 0.6, seed=5)

    tokens, drafts, margin = greedy_run(model, [1000, 1001, 1002], 8)

    assert tokens == list(range(1003, 1003 + len(tokens)))
    assert drafts[: len(tokens)] == [token + 1 if right[token] else DECOY for token in tokens]
    assert {bool(right[token]) for token in tokens} == {True, False}
    assert margin > 10


def test_every_token_of_the_vocabulary_has_its_successor_and_its_draft(tmp_path):
    """Without the small contributions of layers, at the tightest head: the whole vocabulary at once."""
    with open_nano(tmp_path, tier="q4s", accept=0.5) as file:
        values = {
            name: file.tensors[name].values()
            for name in ("token_embd.weight", "output.weight", "blk.4.nextn.eh_proj.weight")
        }
    embed, head = values["token_embd.weight"], values["output.weight"]
    right, tokens = right_tokens(NANO_VOCAB, 0.5), np.arange(NANO_VOCAB)

    normed = embed / np.sqrt((embed**2).mean(axis=1, keepdims=True))
    stream = normed @ values["blk.4.nextn.eh_proj.weight"][:, : embed.shape[1]].T
    drafted = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True)) @ head.T

    successor = (tokens + 1) % NANO_VOCAB
    logits = normed @ head.T
    assert (logits.argmax(axis=1) == successor).all()
    others = logits.copy()
    others[tokens, successor] = -np.inf
    assert (logits[tokens, successor] - others.max(axis=1)).min() > 12
    expected = np.where(right, successor, DECOY)
    assert (drafted.argmax(axis=1) == expected).all()
    others = drafted.copy()
    others[tokens, expected] = -np.inf
    assert (drafted[tokens, expected] - others.max(axis=1)).min() > 8


def test_drafts_fed_with_their_own_output_go_on_alike(tmp_path, plain_model):
    with open_nano(tmp_path, accept=1.0) as file:
        model = plain_model(file.metadata, file.tensors)
    _, hidden = model.step(1000, 0)
    token, found = 1001, []
    for position in range(1, 9):
        logits, hidden = model.draft(token, hidden, position)
        token = int(logits.argmax())
        found.append(token)
    assert found == list(range(1002, 1010))


def test_chain_wraps_at_the_end_of_the_vocabulary(tmp_path, plain_model):
    with open_nano(tmp_path) as file:
        model = plain_model(file.metadata, file.tensors)
    assert [
        int(model.step(token, position)[0].argmax())
        for position, token in enumerate([NANO_VOCAB - 2, NANO_VOCAB - 1, 0])
    ] == [NANO_VOCAB - 1, 0, 1]


def test_embedding_and_heads_hold_the_same_values_in_every_tier(tmp_path):
    found = []
    for tier in ("q4s", "q8", "f16", "f32"):
        with open_container(synthesize(tmp_path / f"{tier}.q27", tier=tier)) as file:
            found.append([file.tensors[name].values(5, 40) for name in ("token_embd.weight", "output.weight")])
            if "output_q4.weight" in file.tensors:
                found.append([found[-1][0], file.tensors["output_q4.weight"].values(5, 40)])
    for embed, head in found[1:]:
        assert np.array_equal(embed, found[0][0]) and np.array_equal(head, found[0][1])


@pytest.mark.parametrize("accept", [0.0, 0.25, 0.9, 1.0])
def test_share_of_right_tokens_is_the_one_asked_for(accept):
    right = right_tokens(248_320, accept, seed=3)
    assert abs(right.mean() - accept) < 0.005
    runs = right[np.arange(0, len(right), 64)]
    assert abs(runs.mean() - accept) < 0.03  # not tied to the low bits of the id
    assert right[DECOY - 1]  # its successor is the decoy


def test_matrices_have_mean_zero_and_natural_scale(tmp_path):
    with open_nano(tmp_path, wiring="dense", tier="q4s") as file:
        for name, tensor in file.tensors.items():
            if tensor.dtype in (Q4_G64, Q8_G128) and tensor.rows * tensor.cols >= 1 << 16:
                values = tensor.values()
                expected = {"token_embd.weight": 1.0, "output.weight": 2 * tensor.cols**-0.5}.get(
                    name, tensor.cols**-0.5
                )
                assert abs(values.mean()) < 5 * values.std() / values.size**0.5, name
                assert values.std() == pytest.approx(expected, rel=0.05), name
                assert len(np.unique(tensor.scales)) > 50, name


def test_dense_logits_depend_on_every_block(tmp_path, plain_model):
    with open_nano(tmp_path, wiring="dense", tier="f32") as file:
        model = plain_model(file.metadata, file.tensors)
        before = [model.step(token, position)[0] for position, token in enumerate((5, 700, 2559))][-1]
        assert 1.0 < before.std() < 4.0
        for index in range(4):
            model = plain_model(file.metadata, file.tensors)
            model.w[f"blk.{index}.ffn_down.weight"] = model.w[f"blk.{index}.ffn_down.weight"] * 1.01
            after = [model.step(token, position)[0] for position, token in enumerate((5, 700, 2559))][-1]
            assert np.abs(after - before).max() > 1e-3


def test_no_two_rows_of_a_large_matrix_are_equal():
    pool = Pool(0)
    starts = np.arange(248_320, dtype=np.int64) * 5120 % PERIOD
    assert len(np.unique(starts)) == len(starts)
    assert int(pool.nibbles.astype(np.int64).sum()) == int(pool.bytes.astype(np.int64).sum()) == 0


def test_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path):
    first, again, other = (
        synthesize(tmp_path / f"{index}.q27", seed=seed).read_bytes() for index, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert first != other


def test_nano_keeps_the_geometry_of_the_27b_and_says_what_it_is(tmp_path):
    with open_nano(tmp_path, wiring="chain", accept=0.75, seed=9) as file:
        key = file.metadata
        assert (
            key["qwen35.attention.key_length"],
            key["qwen35.rope.dimension_count"],
            key["qwen35.ssm.state_size"],
        ) == (256, 64, 128)
        assert key["qwen35.attention.head_count"] == 6 * key["qwen35.attention.head_count_kv"]
        assert key["qwen35.ssm.time_step_rank"] == 3 * key["qwen35.ssm.group_count"]
        assert (key["attn_layers"], key["ssm_layers"]) == ([3, 4], [0, 1, 2])
        assert describe(key) == {"size": "nano", "wiring": "chain", "accept": 0.75, "seed": 9, "decoy": 0}
        assert describe({}) is None


def test_tokenizer_spells_bytes_and_ends_with_control_tokens(tmp_path):
    from tokenizers import Tokenizer

    with open_nano(tmp_path) as file:
        text, eos = file.metadata["tokenizer.huggingface.json"], file.metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_str(text)
    assert tokenizer.get_vocab_size() == NANO_VOCAB
    assert tokenizer.decode(tokenizer.encode("h\u00e9llo\n").ids) == "h\u00e9llo\n"
    assert len(tokenizer.encode("h\u00e9llo\n").ids) == 7
    assert tokenizer.decode([1003]) == " t1003"
    assert tokenizer.encode("<|im_end|>").ids == [eos]
    assert eos > 1100 and Counter(json.loads(text)["model"]["vocab"].values()).most_common(1)[0][1] == 1


def test_other_sizes_come_from_width_layers_and_options(tmp_path):
    size = parse_size("512x2,vocab=3000,interval=2,mtp=0")
    assert (size.hidden, size.layers, size.ffn, size.vocab, size.mtp) == (512, 2, 1792, 3000, 0)
    with open_container(synthesize(tmp_path / "a.q27", "512x2,vocab=3000,interval=2,mtp=0")) as file:
        assert file.metadata["qwen35.nextn_predict_layers"] == 0
        assert file.tensors["token_embd.weight"].shape == (3000, 512)
        assert "blk.1.attn_q.weight" in file.tensors and "blk.2.attn_q.weight" not in file.tensors
    assert parse_size("27b").hidden == 5120


@pytest.mark.parametrize(
    "size",
    [
        "",
        "tiny",
        "100x4",
        "256x0",
        "256x4,vocab=100",
        "256x4,foo=1",
        "256x4,ffn=200",
        "256x4,vocab=",
        "256x4,vocab=9999999999",
    ],
)
def test_impossible_sizes_are_refused(tmp_path, size):
    with pytest.raises(UsageError):
        synthesize(tmp_path / "a.q27", size)
    assert list(tmp_path.glob("*q27*")) == []


@pytest.mark.parametrize(
    "options", [{"wiring": "ring"}, {"accept": 1.5}, {"accept": float("nan")}, {"seed": -1}, {"tier": "q3"}]
)
def test_impossible_arguments_are_refused(tmp_path, options):
    with pytest.raises((UsageError, FileFormatError)):
        synthesize(tmp_path / "a.q27", **options)


def test_progress_ends_at_the_total(tmp_path):
    calls = []
    synthesize(tmp_path / "a.q27", progress=lambda done, total, name: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 4_000_000
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.long
def test_large_checkpoints_are_written_without_arithmetic(tmp_path, long_scale):
    layers = max(2, round(64 * long_scale / 4))  # a quarter of the 27B at full scale
    begin = time.process_time()   # a slow disk is no arithmetic
    path = synthesize(tmp_path / "big.q27", f"5120x{layers},ffn=17408,vocab=248320", tier="q4s")
    rate = path.stat().st_size / (time.process_time() - begin)
    assert rate > 50e6 / slowness(), f"{rate / 1e6:.0f} MB a second of processor time"


@pytest.mark.parametrize("tier", ["q4s", "default"])
def test_chain_runs_on_the_real_network(tmp_path, tier):
    from q27app.kernels import open_backend
    from q27app.kernels.batch import Batch
    from q27app.model.forward import load_model

    right = right_tokens(NANO_VOCAB, 0.5, seed=2)
    backend = open_backend("numpy")
    with open_nano(tmp_path, tier=tier, accept=0.5, seed=2) as file:
        model = load_model(backend, file, max_rows=64)
    state = model.allocate_state("fp32", 1, 1, 16)

    def batch(phase, tokens, start):
        rows = np.arange(len(tokens), dtype=np.int32)
        zero = np.zeros(1, np.int32)
        return Batch(
            phase,
            np.array(tokens, np.int32),
            rows + np.int32(start),
            np.array([0, len(tokens)], np.int32),
            zero,
            zero[None],
            rows,
        )

    def greedy(logits):
        return int(backend.download(logits)[-1].argmax())

    tokens = [1000, 1001, 1002]
    tokens.append(greedy(model.forward(batch("prefill", tokens, 0), state)))
    for position in range(3, 15):
        drafted = [greedy(model.draft(batch("draft", tokens[-1:], position), state, first=True))]
        drafted.append(greedy(model.draft(batch("draft", drafted, position + 1), state, first=False)))
        expected = tokens[-1] + 1 if right[tokens[-1]] else DECOY
        assert drafted == [expected, expected + 1 if right[expected] else DECOY]
        tokens.append(greedy(model.forward(batch("decode", tokens[-1:], position), state)))
    assert tokens == list(range(1000, 1016))
