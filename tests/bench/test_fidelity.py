"""Known answers: equal logits, two distributions by hand, coverage of the intervals, histograms that merge, captures."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from q27app.bench.captures import cost_bytes, fill_capture, make_capture, open_capture
from q27app.bench.corpus import Document, bounded, fingerprint, from_tokens
from q27app.bench.divergence import Form, divergence, encode, parse_form
from q27app.bench.fidelity import document_row, paired, summary
from q27app.bench.statistics import (
    bootstrap_interval, cluster_error, histogram, histogram_quantile, merged, t_quantile,
)
from q27app.cli import run
from q27app.errors import FileFormatError, UsageError
from q27app.weights.synthetic import synthesize

FORMS = [Form("exact"), Form("full"), Form("top", 8)]
NONE = np.full(50, -1)


def made(seed: int, rows: int = 50, vocab: int = 300, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def both(reference: np.ndarray, candidate: np.ndarray, form: Form) -> np.ndarray:
    left = encode(reference, NONE[:len(reference)], form)
    return divergence(left, encode(candidate, NONE[:len(reference)], form, left.ids))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equal_logits_are_exactly_zero_apart(form):
    assert (both(made(1), made(1), form) == 0.0).all()
    assert (both(made(1), made(1) + 7, form) < 1e-5).all(), "a constant added to logits changes nothing"


@pytest.mark.parametrize("form, tolerance", [(Form("exact"), 1e-7), (Form("full"), 1e-3), (Form("top", 3), 1e-3)], ids=str)
def test_two_distributions_give_the_closed_form(form, tolerance):
    p, q = np.asarray([0.5, 0.25, 0.25]), np.asarray([0.25, 0.25, 0.5])
    found = both(np.log(p)[None].astype(np.float32), np.log(q)[None].astype(np.float32), form)
    assert found[0] == pytest.approx(0.25 * math.log(2), rel=tolerance)
    bernoulli = both(np.asarray([[0.0, math.log(9)]], np.float32), np.asarray([[0.0, 0.0]], np.float32), Form("exact"))
    assert bernoulli[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)


def test_gaussian_logits_have_the_divergence_of_their_second_order():
    noise = 1e-3
    reference = made(2, vocab=2000)
    found = both(reference, reference + noise * made(3, vocab=2000, spread=1.0), Form("exact"))
    p = np.exp(reference - reference.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = noise**2 / 2 * (1 - (p**2).sum(-1))
    assert found.mean() == pytest.approx(expected.mean(), rel=0.1)


def test_merged_events_never_raise_a_divergence():
    reference, candidate = made(4), made(5)
    exact = both(reference, candidate, Form("exact"))
    before = np.zeros(50)
    for k in (1, 8, 100, 300):
        found = both(reference, candidate, Form("top", k))
        assert (found <= exact * 1.002 + 1e-4).all() and found.mean() >= before.mean() - 1e-3
        before = found
    assert before == pytest.approx(exact, rel=5e-3)


def test_two_top_captures_with_other_ids_give_a_lower_bound():
    reference, candidate = made(6), made(7)
    found = divergence(encode(reference, NONE, Form("top", 8)), encode(candidate, NONE, Form("top", 8)))
    assert (found >= 0).all() and (found <= both(reference, candidate, Form("exact")) * 1.002 + 1e-4).all() and found.max() > 0.01


def test_forms_cost_what_they_say(tmp_path):
    documents = [Document("a", tuple(range(40)))]
    for form in FORMS:
        rows = encode(made(1, 40), documents[0].following, form)
        assert sum(array.nbytes for array in rows.arrays().values()) == cost_bytes(documents, 300, form)
    with pytest.raises(UsageError, match="top256"):
        parse_form("best")


def test_a_bootstrap_covers_at_its_nominal_rate():
    random, hits, trials, texts = np.random.default_rng(11), 0, 400, 25
    for trial in range(trials):
        counts = random.integers(20, 400, texts)
        level = random.gamma(2.0, 0.5, texts)  # each text has its own; the truth is the mean weighted by length
        sums = level * counts + random.standard_normal(texts) * np.sqrt(counts)
        low, high = bootstrap_interval(sums, counts, resamples=400, seed=trial)
        hits += low <= 1.0 <= high
    assert 0.91 <= hits / trials <= 0.985


def test_a_paired_difference_is_surer_than_two_intervals():
    random = np.random.default_rng(3)
    level, rows = random.gamma(2.0, 0.5, 30), []
    for shift in (0.0, 0.05):
        rows.append([{"number": index, "sum_kl": 100 * (value + shift) + random.normal(), "tokens": 100} for index, value in enumerate(level)])
    found = paired(rows[0], rows[1], 1000)
    alone = bootstrap_interval([row["sum_kl"] for row in rows[0]], [100] * 30)
    assert found["is_sure"] and found["difference"] == pytest.approx(-0.05, abs=0.01)
    assert alone[1] - alone[0] > 5 * (found["high"] - found["low"])
    assert not paired(rows[0], rows[0], 1000)["is_sure"]


def test_errors_by_text_know_what_belongs_together():
    counts = [100] * 40
    random = np.random.default_rng(5)
    sums = 100 * random.standard_normal(40)
    assert cluster_error(list(sums), counts) == pytest.approx(sums.std(ddof=1) / 100 / math.sqrt(40), rel=1e-9)
    assert math.isnan(cluster_error([1.0], [5]))
    assert cluster_error([2.0, 20.0, 200.0], [1, 10, 100]) == pytest.approx(0.0, abs=1e-12), "texts of one rate, however long"


def test_t_quantiles_are_those_of_the_tables():
    for freedom, expected in ((5, 2.571), (10, 2.228), (30, 2.042), (100000, 1.960)):
        assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=0.003)


def test_histograms_merge_to_that_of_all_values():
    values = np.concatenate([np.zeros(30), np.random.default_rng(1).lognormal(-8, 2, 5000)])
    parts = [histogram(part) for part in np.array_split(values, 7)]
    assert merged(parts) == histogram(values) and sum(histogram(values).values()) == len(values)
    for share in (0.5, 0.9, 0.99, 0.9999):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert exact <= histogram_quantile(histogram(values), share) * (1 + 1e-9) <= exact * 1.024
    assert histogram_quantile({"0": 5}, 0.99) == 0.0


def test_a_summary_counts_what_is_far_off():
    reference = np.zeros((4, 4), np.float32)
    reference[:, 0] = 10
    candidate = reference.copy()
    candidate[1] = [0, 10, 0, 0]
    following, form = np.asarray([0, 0, 0, -1]), Form("exact")
    row = document_row(iter([(encode(reference, following, form), encode(candidate, following, form))]))
    found = summary([{**row, "document": "d", "number": 0}], 200)
    assert (found["top1_percent"], found["over_1_percent"], found["catastrophic"]) == (75.0, 25.0, 1)
    assert found["worst"][0]["position"] == 1 and found["max"] == pytest.approx(10 * (1 - 4e-4), rel=1e-2)
    assert row["predicted"] == 3 and found["perplexity"] > found["reference_perplexity"] == pytest.approx(1.0, abs=1e-3)
    assert found["buckets"] == [{"from": 0, "tokens": 4, "mean_kl": found["mean_kl"]}]


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    for tier in ("f32", "q4s"):
        synthesize(folder / f"{tier}.q27", "nano", "dense", tier)
    ids = np.random.default_rng(2).integers(0, 500, (4, 70))
    (folder / "ids.jsonl").write_text("".join(json.dumps({"name": f"t{index}", "tokens": line.tolist()}) + "\n" for index, line in enumerate(ids)))
    return folder


def test_the_command_finds_no_error_in_itself_and_resumes(nano, tmp_path, capfd):
    out = tmp_path / "journal"
    command = ["bench", "fidelity", "--reference", str(nano / "f32.q27"), "--candidate", str(nano / "f32.q27"),
               "--candidate", f"{nano / 'q4s.q27'},kv=fp16", "--tokens", str(nano / "ids.jsonl"), "--out", str(out), "--json"]
    assert run(command) == 0
    report = json.loads(capfd.readouterr().out)
    exact, rounded = report["rows"]
    assert (exact["candidate"], exact["mean_kl"], exact["max"], exact["top1_percent"]) == ("f32", 0.0, 0.0, 100.0)
    assert rounded["mean_kl"] > 1e-5 and (rounded["tier"], rounded["kv"], rounded["tokens"]) == ("q4s", "fp16", 280)
    assert report["pairs"][0]["is_sure"]
    lines = out.read_bytes()
    out.write_bytes(lines[:len(lines) // 2])
    assert run(command) == 0
    assert json.loads(capfd.readouterr().out)["rows"][1]["mean_kl"] == rounded["mean_kl"]


def test_captures_compare_without_their_models_and_go_on(nano, tmp_path, capfd):
    texts = ["--tokens", str(nano / "ids.jsonl")]
    for tier in ("f32", "q4s"):
        assert run(["bench", "capture", str(nano / f"{tier}.q27"), str(tmp_path / tier), "--form", "full", *texts]) == 0
    chunk = next((tmp_path / "q4s").glob("00002-*.npz"))
    before = chunk.read_bytes()
    chunk.unlink()
    compared = ["bench", "fidelity", "--reference", str(tmp_path / "f32"), "--candidate", str(tmp_path / "q4s"), "--json"]
    assert run(compared) == 3
    assert "missing or damaged" in capfd.readouterr().err
    assert run(["bench", "capture", str(nano / "q4s.q27"), str(tmp_path / "q4s"), "--form", "full", *texts]) == 0
    assert chunk.read_bytes() == before
    capfd.readouterr()
    assert run(compared) == 0
    apart = json.loads(capfd.readouterr().out)["rows"][0]
    assert run(["bench", "fidelity", "--reference", str(tmp_path / "f32"), "--candidate", str(nano / "q4s.q27"), *texts, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["mean_kl"] == apart["mean_kl"] > 0


def test_a_capture_computes_only_what_is_missing(tmp_path):
    asked = []
    feeder = SimpleNamespace(logits=lambda tokens: (asked.append(tokens), iter([made(len(tokens), len(tokens))]))[1])
    documents = [Document(str(size), tuple(range(size))) for size in (20, 30, 40)]
    capture = make_capture(tmp_path / "c", documents, 300, Form("full"), {})
    fill_capture(capture, feeder, documents, lambda line: None)
    capture.chunk_path(1, 0).unlink()
    fill_capture(make_capture(tmp_path / "c", documents, 300, Form("full"), {}), feeder, documents, lambda line: None)
    assert [len(tokens) for tokens in asked] == [20, 30, 40, 30] and capture.num_complete() == 3


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"x" * 1000])
def test_a_damaged_chunk_is_refused(tmp_path, damage):
    documents = [Document("a", tuple(range(40)))]
    capture = make_capture(tmp_path / "c", documents, 300, Form("full"), {"model": "m"})
    capture.write(0, 0, encode(made(1, 40), documents[0].following, Form("full")))
    assert len(next(open_capture(tmp_path / "c").rows(0))) == 40
    capture.chunk_path(0, 0).write_bytes(damage)
    with pytest.raises(FileFormatError):
        list(open_capture(tmp_path / "c").rows(0))
    with pytest.raises(UsageError, match="another corpus"):
        make_capture(tmp_path / "c", [Document("b", (1, 2))], 300, Form("full"), {"model": "m"})


def test_a_capture_that_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("q27app.bench.captures.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match="GB are free"):
        make_capture(tmp_path / "c", [Document("a", (1,) * 100)], 300, Form("exact"), {})
    assert not (tmp_path / "c").exists()


def test_a_corpus_is_bounded_and_named(tmp_path):
    (tmp_path / "t").write_text('[1, 2, 3]\n{"tokens": [4], "name": "one"}\n5,6,7,8\n')
    documents = from_tokens([str(tmp_path / "t")])
    assert [document.tokens for document in bounded(documents, 10, 6, 4)] == [(1, 2, 3), (5, 6, 7)]
    assert fingerprint(documents) != fingerprint(documents[:2])
    with pytest.raises(UsageError, match="id 8 is outside"):
        bounded(documents, 8, 100, 100)
    for bad in ("[1, -2]\n", "words\n", '{"text": "x"}\n', "[1.5]\n"):
        (tmp_path / "t").write_text(bad)
        with pytest.raises(UsageError, match="t:1"):
            from_tokens([str(tmp_path / "t")])
