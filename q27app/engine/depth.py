"""How many drafts a pass should carry: chosen each step from measured acceptance and measured prices.

    gain(d)  = 1 + a1 + a1 a2 + ... + a1 .. ad        tokens that a pass of 1 + d rows yields on average
    cost(d)  = pass(s + t d) + d * step               milliseconds, s sequences together of which t draft; step is 0 for drafts
                                                      without a model
    depth    = the d <= cap with the largest (s + t (gain(d) - 1)) / cost(d)

a_k is the share of drafts at depth k that were accepted among those whose predecessors were, over about the last WINDOW of them;
the share of the depth before counts as NEAR more (of the first depth: a prior as PULL), and what is known of a depth that no pass
reaches fades within about FADE passes: a text that changes is followed from the shallow depths on. pass(n) is a
moving average for each number of rows; between and beyond measured ones it is a straight line.
Every EXPLORE steps without drafts one is tried, and with drafts one more every CONFIRM steps, so that a share or price that has
changed is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from q27app.kernels.batch import MAX_DECODE_ROWS

PRIOR = 0.7
WINDOW, PULL, NEAR, FADE = 32, 4.0, 24.0, 64
PRICE_WEIGHT = 1 / 8
EXPLORE, CONFIRM = 32, 128
PRIOR_SLOPE = 0.04
"""Assumed price of one more row, as a share of a plain pass, until two numbers of rows have been measured."""


@dataclass
class PassPrices:
    """Milliseconds of a decode or verify pass by its rows, and of one step of the draft layer. One for an engine."""

    step_ms: float = 0.0
    _passes: dict[int, float] = field(default_factory=dict)

    def with_other_steps(self) -> "PassPrices":
        """Prices of the same passes, and of another kind of step."""
        return PassPrices(_passes=self._passes)

    def record_pass(self, rows: int, ms: float) -> None:
        old = self._passes.get(rows)
        self._passes[rows] = ms if old is None else old + PRICE_WEIGHT * (ms - old)

    def record_step(self, ms: float) -> None:
        self.step_ms = ms if not self.step_ms else self.step_ms + PRICE_WEIGHT * (ms - self.step_ms)

    def record_waited(self, ms: float) -> None:
        """A step of a chain that was waited for, where most are not: with the wait it is dearer than those."""
        if not self.step_ms:
            self.record_step(ms)

    def pass_ms(self, rows: int) -> float:
        """Measured, or on the line through the nearest measured numbers of rows; never cheaper than fewer rows."""
        if not self._passes:
            return 1.0 + PRIOR_SLOPE * (rows - 1)
        if rows in self._passes:
            return self._passes[rows]
        known = sorted(self._passes)
        if len(known) == 1:
            base = self._passes[known[0]]
            return max(base * 0.1, base * (1 + PRIOR_SLOPE * (rows - known[0])))
        low = max((n for n in known if n < rows), default=known[0])
        high = min((n for n in known if n > rows), default=known[-1])
        if low >= high:
            low, high = (known[0], known[1]) if rows < known[0] else (known[-2], known[-1])
        slope = max(0.0, (self._passes[high] - self._passes[low]) / (high - low))
        return max(1e-3, self._passes[low] + slope * (rows - low))

    def to_dict(self) -> dict:
        return {"step_ms": round(self.step_ms, 3), "pass_ms": {str(n): round(v, 3) for n, v in sorted(self._passes.items())}}


class DepthControl:
    """Acceptance of one drafter on one conversation, and the depth that pays best. prior: share assumed at first."""

    def __init__(self, cap: int, prior: float = PRIOR) -> None:
        self.cap, self._prior = cap, prior
        self._tried, self._agreed = [0.0] * cap, [0.0] * cap
        self._num_steps = 0

    @property
    def shares(self) -> list[float]:
        """Estimated share of right drafts by depth."""
        out, before, pull = [], self._prior, PULL
        for tried, agreed in zip(self._tried, self._agreed, strict=True):
            before, pull = (agreed + pull * before) / (tried + pull), NEAR
            out.append(before)
        return out

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A verified run: the first num_accepted of num_drafted drafts agreed."""
        reached = min(num_drafted, num_accepted + 1, self.cap)
        for depth in range(reached):
            self._tried[depth] += 1 - self._tried[depth] / WINDOW
            self._agreed[depth] += (depth < num_accepted) - self._agreed[depth] / WINDOW
        for depth in range(reached, self.cap):
            self._tried[depth] -= self._tried[depth] / FADE
            self._agreed[depth] -= self._agreed[depth] / FADE
        self._num_steps += 1

    def rested(self) -> None:
        """A step without drafts."""
        self._num_steps += 1

    def choose(self, prices: PassPrices, limit: int, needs_steps: bool, sequences: int = 1, takers: int | None = None) -> int:
        """Depth from 0 to min(cap, limit). sequences: that share the pass. takers: of these draft alike, as far as it has rows;
        None = all."""
        takers = sequences if takers is None else takers
        best, best_rate, gain, run, shares = 0, 0.0, 1.0, 1.0, self.shares
        for depth in range(min(self.cap, limit) + 1):
            if depth:
                run *= shares[depth - 1]
                gain += run
            rows = max(sequences, min(sequences + takers * depth, MAX_DECODE_ROWS))
            cost = prices.pass_ms(rows) + (depth * prices.step_ms if needs_steps else 0.0)
            rate = (sequences + takers * (gain - 1)) / cost
            if rate > best_rate:
                best, best_rate = depth, rate
        every = CONFIRM if best else EXPLORE
        if self._num_steps % every == every - 1:
            best += 1
        return min(best, self.cap, limit)

    def to_dict(self) -> dict:
        return {"cap": self.cap, "acceptance": [round(share, 3) for share in self.shares]}
