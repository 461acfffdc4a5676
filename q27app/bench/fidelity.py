"""One network against another on the same texts: KL divergence with its tail, agreement, perplexity, paired comparisons.

The reference is a capture. A candidate is a model that runs now, or another capture. For each candidate and document one
row goes into the journal: sums, counts, a histogram, the worst positions. Everything in the report follows from these rows,
so runs can be joined and resumed by document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from q27app.bench.captures import Capture
from q27app.bench.divergence import Rows, best_probability, divergence
from q27app.bench.journal import Journal
from q27app.bench.report import Column, Report
from q27app.bench.statistics import bootstrap_interval, cluster_error, histogram, histogram_quantile, merged

BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
SURE, WORST = 0.9, 5
COLUMNS = (
    Column("candidate", "candidate"), Column("tier", "tier"), Column("kv", "KV"), Column("backend", "backend"), Column("documents", "texts", 0),
    Column("tokens", "tokens", 0), Column("mean_kl", "mean KL", 6), Column("error", "std error", 6), Column("low", "95% from", 6),
    Column("high", "to", 6), Column("p50", "p50", 6), Column("p99", "p99", 5), Column("p99_9", "p99.9", 4), Column("p99_99", "p99.99", 4),
    Column("max", "max", 4), Column("top1_percent", "top-1 %", 3), Column("over_01_percent", "> 0.1 %", 3),
    Column("over_1_percent", "> 1 %", 3), Column("perplexity", "perplexity", 4), Column("catastrophic", "catastrophic", 0),
)


def document_row(pairs: Iterator[tuple[Rows, Rows]], tokens: Sequence[int] | None = None) -> dict[str, Any]:
    """The figures of one document. pairs: (reference, candidate) chunk by chunk, from position 0."""
    parts = [(divergence(reference, candidate), reference, candidate) for reference, candidate in pairs]
    kl = np.concatenate([part[0] for part in parts])
    best, theirs = (np.concatenate([getattr(part[side], "best") for part in parts]) for side in (1, 2))
    sure = np.concatenate([best_probability(part[1]) for part in parts]) > SURE
    following = [np.concatenate([part[side].following for part in parts]).astype(np.float64) for side in (1, 2)]
    known = ~np.isnan(following[0])
    edges = [*BUCKETS, 1 << 40]
    buckets = [kl[low:high] for low, high in zip(edges, edges[1:], strict=False)]
    broken = np.flatnonzero(sure & (best != theirs))
    worst = np.argsort(-kl, kind="stable")[:WORST]
    return {
        "tokens": len(kl), "sum_kl": float(kl.sum()), "max": float(kl.max()), "top1": int((best == theirs).sum()),
        "over_01": int((kl > 0.1).sum()), "over_1": int((kl > 1.0).sum()), "predicted": int(known.sum()),
        "reference_nll": float(-following[0][known].sum()), "candidate_nll": float(-following[1][known].sum()),
        "histogram": histogram(kl), "buckets": [[len(part), float(part.sum())] for part in buckets],
        "catastrophic": [int(place) for place in broken[:100]], "num_catastrophic": len(broken),
        "worst": [[int(place), float(kl[place]), int(best[place]), int(theirs[place])] for place in worst if kl[place] > 0],
    }


def compare(name: str, facts: Mapping[str, Any], reference: Capture, candidate: Callable[[int], Iterator[Rows]], journal: Journal,
            say: Callable[[str], None]) -> None:
    """Rows of every document that the journal lacks. candidate(document): its chunks."""
    if not journal.has(f"{name}|about"):
        journal.add(f"{name}|about", facts=dict(facts))
    for number, (title, length) in enumerate(reference.documents):
        key = f"{name}|{number}"
        if not journal.has(key):
            row = journal.add(key, document=title, **document_row(zip(reference.rows(number), candidate(number), strict=True)))
            say(f"{name}: {number + 1} of {len(reference.documents)}, {length} tokens, mean KL {row['sum_kl'] / length:.3g}")


def candidates(journal: Journal) -> dict[str, list[dict[str, Any]]]:
    """name -> its documents' rows, in the order of the documents."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, row in journal.rows.items():
        name, _, number = key.rpartition("|")
        if number.isdigit():
            found.setdefault(name, []).append({**row, "number": int(number)})
    return {name: sorted(rows, key=lambda row: row["number"]) for name, rows in found.items()}


def summary(rows: Sequence[Mapping[str, Any]], resamples: int) -> dict[str, Any]:
    """One candidate's figures over its documents."""
    tokens, sums, counts = sum(row["tokens"] for row in rows), [row["sum_kl"] for row in rows], [row["tokens"] for row in rows]
    predicted = sum(row["predicted"] for row in rows)
    counted = merged(row["histogram"] for row in rows)
    low, high = bootstrap_interval(sums, counts, resamples=resamples)

    def percent(name: str) -> float:
        return 100 * sum(row[name] for row in rows) / tokens

    def perplexity(name: str) -> float:
        return math.exp(sum(row[name] for row in rows) / predicted) if predicted else math.nan

    largest = max(row["max"] for row in rows)
    quantiles = {name: min(histogram_quantile(counted, share), largest) for name, share in (
        ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999), ("p99_99", 0.9999))}
    buckets = np.sum([row["buckets"] for row in rows], axis=0)
    worst = sorted(({"document": row["document"], "position": place, "kl": kl, "reference_best": best, "candidate_best": theirs}
                    for row in rows for place, kl, best, theirs in row["worst"]), key=lambda item: -item["kl"])
    return {
        "documents": len(rows), "tokens": tokens, "mean_kl": sum(sums) / tokens, "error": cluster_error(sums, counts), "low": low,
        "high": high, **quantiles, "max": largest, "top1_percent": percent("top1"),
        "over_01_percent": percent("over_01"), "over_1_percent": percent("over_1"), "perplexity": perplexity("candidate_nll"),
        "reference_perplexity": perplexity("reference_nll"), "catastrophic": sum(row["num_catastrophic"] for row in rows),
        "histogram": counted, "worst": worst[:WORST],
        "buckets": [{"from": edge, "tokens": int(count), "mean_kl": total / count}
                    for edge, (count, total) in zip(BUCKETS, buckets.tolist(), strict=True) if count],
    }


def paired(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]], resamples: int) -> dict[str, Any]:
    """left minus right in mean KL, on the documents that both have; is_sure: the 95% interval leaves 0 out."""
    theirs = {row["number"]: row for row in right}
    both = [(row, theirs[row["number"]]) for row in left if row["number"] in theirs]
    sums, counts = [one["sum_kl"] - other["sum_kl"] for one, other in both], [one["tokens"] for one, _ in both]
    low, high = bootstrap_interval(sums, counts, resamples=resamples)
    return {"documents": len(both), "difference": sum(sums) / max(1, sum(counts)), "low": low, "high": high,
            "is_sure": bool(low > 0 or high < 0)}


def make_report(journal: Journal, resamples: int) -> Report:
    """Every candidate, the closest to the reference first, each compared with the next."""
    found = {short_name(name): documents for name, documents in candidates(journal).items()}
    rows = []
    for name, documents in found.items():
        facts = journal.rows.get(f"{documents[0]['key'].rpartition('|')[0]}|about", {}).get("facts", {})
        rows.append({"candidate": name, **{key: facts.get(key) for key in ("tier", "kv", "backend", "model")}, **summary(documents, resamples)})
    rows.sort(key=lambda row: row["mean_kl"])
    pairs = [{"left": one["candidate"], "right": other["candidate"], **paired(found[one["candidate"]], found[other["candidate"]], resamples)}
             for one, other in zip(rows, rows[1:], strict=False)]
    notes = [f"KL(reference || candidate) in nats, form {journal.settings['form']}; standard errors and 95% intervals by text (bootstrap, "
             f"{resamples} resamples). Quantiles from a histogram with bins 2.3% wide. Catastrophic: the reference gives its best token over "
             f"{SURE:.0%}, the candidate puts another first."]
    if rows:
        notes.append(f"Perplexity of the reference: {rows[0]['reference_perplexity']:.4f}.")
    notes += [_pair_text(pair) for pair in pairs]
    for row in rows:
        deepest = " ".join(f"{bucket['from']}+: {bucket['mean_kl']:.2e}" for bucket in row["buckets"])
        worst = "; ".join(f"{item['document']} at {item['position']}: {item['kl']:.3g}" for item in row["worst"][:2])
        notes.append(f"{row['candidate']}: by position {deepest}; worst {worst or 'none'}")
    return Report("fidelity", journal.stamp, COLUMNS, rows, {"settings": journal.settings, "pairs": pairs}, notes)


def short_name(name: str) -> str:
    """A candidate without its folder."""
    model, comma, rest = name.partition(",")
    return model.rstrip("/").rpartition("/")[2].removesuffix(".q27") + comma + rest


def _pair_text(pair: Mapping[str, Any]) -> str:
    sign = "<" if pair["is_sure"] else "~"
    return (f"{pair['left']} {sign} {pair['right']}: {pair['difference']:+.3e} [{pair['low']:+.3e}, {pair['high']:+.3e}], "
            f"paired on {pair['documents']} texts{'' if pair['is_sure'] else ', not told apart'}")
