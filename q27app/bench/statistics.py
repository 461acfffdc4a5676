"""Figures of many positions that can be merged, and intervals that respect what belongs together.

Positions of one text are not independent, texts are: standard errors and intervals are by text ("document"), and two
networks are compared on the same texts. A mean over positions is then a ratio of two sums over documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

LOWEST, HIGHEST, BINS_A_DECADE = -14, 3, 100
NUM_BINS = (HIGHEST - LOWEST) * BINS_A_DECADE + 2
"""Bin 0: exactly 0. The last: 10^HIGHEST and above. Between them each is 2.3% wide, from 10^LOWEST on."""


def bins_of(values: np.ndarray) -> np.ndarray:
    """The bin of each value, int [n]; values below 10^LOWEST that are not 0 go to bin 1."""
    with np.errstate(divide="ignore"):
        place = np.floor((np.log10(values) - LOWEST) * BINS_A_DECADE) + 1
    return np.where(values <= 0, 0, np.clip(place, 1, NUM_BINS - 1)).astype(int)


def upper_edge(index: int) -> float:
    """The value that nothing in the bin exceeds (but for the last)."""
    return 0.0 if index == 0 else 10.0 ** (LOWEST + index / BINS_A_DECADE)


def histogram(values: np.ndarray) -> dict[str, int]:
    """Counts by bin, as a journal keeps them: {"bin": count}, empty ones left out."""
    found, counts = np.unique(bins_of(values), return_counts=True)
    return {str(index): int(count) for index, count in zip(found, counts, strict=True)}


def merged(some: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The histogram of all values together."""
    total: dict[str, int] = {}
    for one in some:
        for index, count in one.items():
            total[index] = total.get(index, 0) + count
    return total


def histogram_quantile(counts: Mapping[str, int], share: float) -> float:
    """The upper edge of the bin that holds this quantile: at most 2.3% above it; exact for 0. NaN without values."""
    total, seen = sum(counts.values()), 0
    for index, count in sorted((int(index), count) for index, count in counts.items()):
        seen += count
        if seen >= share * total:
            return upper_edge(index)
    return math.nan


def cluster_error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Standard error of sum(sums) / sum(counts) when documents are drawn independently; NaN for fewer than two."""
    values, sizes = np.asarray(sums, float), np.asarray(counts, float)
    if len(values) < 2 or sizes.sum() <= 0:
        return math.nan
    rest = values - values.sum() / sizes.sum() * sizes
    return float(np.sqrt(len(values) / (len(values) - 1) * (rest ** 2).sum()) / sizes.sum())


def bootstrap_interval(sums: Sequence[float], counts: Sequence[int], level: float = 0.95, resamples: int = 4000,
                       seed: int = 0) -> tuple[float, float]:
    """Interval of sum(sums) / sum(counts): documents are drawn again with replacement, all their positions together.

    Percentiles of the resampled ratio, their shares widened for the number of documents (a percentile interval of few
    documents is too narrow by about what normal and t quantiles differ, times sqrt(n / (n - 1))). NaN for fewer than two
    documents. For a difference of two networks give the differences of their sums.
    """
    values, sizes = np.asarray(sums, float), np.asarray(counts, float)
    if len(values) < 2:
        return math.nan, math.nan
    random, number = np.random.default_rng(seed), len(values)
    ratios = np.empty(resamples)
    for start in range(0, resamples, 500):  # bounded memory
        stop = min(resamples, start + 500)
        drawn = random.multinomial(number, np.full(number, 1 / number), size=stop - start)
        total = drawn @ sizes
        ratios[start:stop] = (drawn @ values) / np.where(total > 0, total, np.nan)
    share = normal_cdf(-t_quantile(1 - (1 - level) / 2, number - 1) * math.sqrt(number / (number - 1)))
    low, high = np.nanquantile(ratios, [share, 1 - share])
    return float(low), float(high)


def normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def normal_quantile(share: float) -> float:
    """By bisection of the distribution function."""
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if normal_cdf(middle) < share else (low, middle)
    return (low + high) / 2


def t_quantile(share: float, freedom: int) -> float:
    """Of Student's distribution, by its series about the normal one (Abramowitz and Stegun 26.7.5); within 1% from 4 degrees on."""
    z, v = normal_quantile(share), float(freedom)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
             (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160)
    return z + sum(term / v ** (power + 1) for power, term in enumerate(terms))
