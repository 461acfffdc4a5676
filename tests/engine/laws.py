"""Whether what was drawn has the law that it shall have: chi-square tests, and the exact law of short texts."""

from __future__ import annotations

import itertools
import math

import numpy as np

from q27app.engine.request import Request, SamplingParams
from q27app.kernels.reference_sample import defined, distribution

SAMPLERS = {
    "plain": SamplingParams(temperature=1.0), "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.2, top_k=3), "top_p": SamplingParams(temperature=0.9, top_p=0.8),
    "min_p": SamplingParams(temperature=1.5, min_p=0.15),
}
REJECTED = 0.001


def law_of(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab] of a draw."""
    ids, scaled = distribution(defined(logits), np.arange(len(logits)), params.temperature, params.top_k, params.top_p, params.min_p)
    mass = np.exp(scaled.astype(np.float64) - float(scaled.max()))
    out = np.zeros(len(logits))
    out[ids] = mass / mass.sum()
    return out


def chi_square(counts: np.ndarray, law: np.ndarray, least: float = 8.0) -> float:
    """p of counts at least this far from the law. Outcomes expected less often than `least` times are one; one that
    cannot happen and did gives 0. The tail of chi-square is Wilson and Hilferty's approximation, good to a percent here."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    rare = expected < least
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 1.0
    freedom, value = len(wanted) - 1, float(((observed - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def joint_law(step, size: int, length: int = 3) -> np.ndarray:
    """Law [size ** length] of texts; step(prefix) gives the law [size] of what follows."""
    out = np.zeros((size,) * length)
    steps = {prefix: step(prefix) for count in range(length) for prefix in itertools.product(range(size), repeat=count)}
    for text in itertools.product(range(size), repeat=length):
        out[text] = np.prod([steps[text[:place]][token] for place, token in enumerate(text)])
    return out.reshape(-1)


class Only:
    """A guide that allows a few ids and keeps everything."""

    def __init__(self, allowed: tuple[int, ...], vocab_size: int, decide) -> None:
        self._words, self._decide = np.zeros(-(-vocab_size // 32), np.uint32), decide
        for token in allowed:
            self._words[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, tokens):
        return self._decide(len(tokens))

    def mask(self, prefix):
        return self._words


def texts(ask, run, prompt, params: SamplingParams, guide, count: int, length: int = 3, first: int = 0, more: int = 3) -> np.ndarray:
    """int [count, length]: continuations by seed, from the seed `first` on. ask(request) -> an answer with `tokens`; run(): until all
    have ended. more: tokens that are drawn behind them and thrown away, so that drafts reach over their end."""
    out = []
    for begin in range(first, first + count, 256):
        seeds = range(begin, min(begin + 256, first + count))
        answers = [ask(Request(f"{params.temperature}-{params.top_k}-{params.top_p}-{params.min_p}-{seed}", tuple(prompt), SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed,
            max_tokens=length + more, ignore_eos=True), guide, cache=False)) for seed in seeds]
        run()
        out += [answer.tokens[:length] for answer in answers]
    return np.array(out)
