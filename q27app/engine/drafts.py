"""The drafter that the engine runs: the suffix drafter where the text repeats, else the draft layer, each as deep as pays.

    1. the text's end occurred before, at least MIN_MATCH tokens long    its continuation
    2. else, if there is a draft layer                                   a chain of it, then the continuation of an earlier
                                                                         occurrence of the chain's own end, from 4 tokens on
    3. else                                                              nothing

Where a device computes while the host looks on, the chain of the next pass is queued right behind the pass whose result it begins
with, and the pass behind it takes its drafts without anybody having seen them: the device never waits for the host. Such chains
are as long as their depth whatever their margins, and stop at nothing; they are dropped if the text turns out to repeat, to end or to
go on otherwise than it was drawn, as a guide may decide.

Depths come from `depth`: acceptance is measured for each sequence and source, prices for the engine. Nothing here changes a
text; see `cut` for what does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from q27app.engine.common_ids import CommonIds
from q27app.engine.depth import DepthControl, PassPrices
from q27app.engine.draft_mtp import MtpDrafter
from q27app.engine.draft_suffix import GRAM, MIN_MATCH, bring_up, index_of, may_match
from q27app.engine.drafter import shares_of
from q27app.engine.request import is_open
from q27app.engine.sequence import Sequence
from q27app.kernels.batch import MAX_DECODE_ROWS, in_flight

MAX_DRAFTS = MAX_DECODE_ROWS - 1
SUFFIX_PRIOR = 0.9
MAX_BETWEEN_MS = 5.0
"""Longer between two passes, and something else ran there."""
SOURCES = ("mtp", "suffix")


@dataclass
class DraftState:
    """What a sequence's drafting has learned. sources: one a draft of the pass that is under way."""

    mtp: DepthControl
    suffix: DepthControl
    ids: CommonIds
    sources: list[str] = field(default_factory=list)


@dataclass
class SourceCount:
    """Drafts of one source by depth (0 = the first of a pass)."""

    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def count(self, first: int, num_drafted: int, num_accepted: int) -> None:
        """Drafts at the depths from `first` on, of which the first ones were accepted."""
        for values, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            values[first:first + count] = [value + 1 for value in values[first:first + count]]


@dataclass
class Flight:
    """Chains that were begun ahead, a row a sequence, how deep each is, behind which of the sequence's passes, and the price
    of a step."""

    sequences: list[Sequence]
    depths: list[int]
    passes: list[int]
    step_ms: float

    def row(self, sequence: Sequence) -> int | None:
        """None if it has no chain, or had another pass since."""
        return next((row for row, (other, number) in enumerate(zip(self.sequences, self.passes))
                     if other is sequence and sequence.num_steps == number), None)


def _is_plain(sequence: Sequence) -> bool:
    """Its draws hang on nothing but the tokens before them: no penalties, and no guide that constrains them now."""
    return sequence.counts is None and is_open(sequence.request.guide)


class Drafts:
    """mtp: None without a draft layer. uses_suffix: whether repeats are looked for. cap: most drafts of a sequence a pass.

    fixed: always draft as deep as the cap and the limit allow (tests, measurements). runs_ahead: begin the chains of the next
    pass before the result of this one is known, where a device would stand still meanwhile."""

    def __init__(self, mtp: MtpDrafter | None, uses_suffix: bool, cap: int, prices: PassPrices, fixed: bool = False,
                 runs_ahead: bool = False) -> None:
        self._mtp, self._uses_suffix, self._prices, self._fixed = mtp, uses_suffix, prices, fixed
        self._rare = mtp.rare_ids if mtp is not None else (0, 0)
        self._whole_prices = prices.with_other_steps() if self._rare[1] else prices
        self._cap = min(cap, MAX_DRAFTS)
        self.min_match = MIN_MATCH
        """Shortest repeat that is continued without the draft layer."""
        self.runs_ahead = runs_ahead
        self._flight: Flight | None = None
        self.num_begun = self.num_landed = 0
        """Chains begun ahead, one for all sequences of a pass, and those whose drafts a pass took."""
        self._landed_ms, self._passed_at = 0.0, 0.0
        """Price of the draft steps that ran ahead of the pass under way; when the pass before it ended."""
        self.counts = {source: SourceCount() for source in SOURCES}

    @property
    def cap(self) -> int:
        return self._cap

    @property
    def prices(self) -> PassPrices:
        return self._prices

    @property
    def needs_mtp(self) -> bool:
        return self._mtp is not None

    def step_took(self, ms: float, is_narrow: bool) -> None:
        """A step of a chain that was waited for."""
        prices = self._prices_of(is_narrow or not self._rare[1])
        (prices.record_waited if self.runs_ahead else prices.record_step)(ms)

    def propose(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[list[int]]:
        limits = [min(limit, self._cap) for limit in limits]
        together = len(sequences)
        drafts = [self._from_suffix(sequence, limit, together) for sequence, limit in zip(sequences, limits, strict=True)]
        for sequence, found in zip(sequences, drafts, strict=True):
            self._state(sequence).sources = ["suffix"] * len(found)
        if self._mtp is not None and not self._land(sequences, limits, drafts):
            self._chains(sequences, limits, drafts)
        return drafts

    def prompts_end(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences if self._uses_suffix else ():
            index_of(sequence)

    def go_ahead(self, sequences: Seq[Sequence], drafted: Seq[int]) -> None:
        """The device is at work: begin the next chains, then do what nobody should wait for between two passes."""
        self._begin_chains(sequences, drafted)
        for sequence in sequences if self._uses_suffix else ():
            bring_up(sequence)

    def _begin_chains(self, sequences: Seq[Sequence], drafted: Seq[int]) -> None:
        """Begin the next chains before anybody knows where they begin, unless the text repeats: then drafts are free, or a
        chain is worth more with what the repeat adds to it, and both must be known first."""
        self._flight = None
        if self._mtp is None or not self.runs_ahead or len(sequences) >= MAX_DECODE_ROWS:
            return
        is_narrow = self._is_narrow(sequences)
        prices = self._prices_of(is_narrow)
        if not prices.step_ms and not self._fixed:
            return  # a chain that is waited for tells its price
        limits = self._limits_after(sequences)
        takers = sum(limit > 0 for limit in limits)
        depths = [None if sequence.room - count - 2 <= 0 else
                  self._depth_ahead(sequence, min(limit, sequence.room - count - 2), len(sequences), prices, takers)
                  for sequence, count, limit in zip(sequences, drafted, limits, strict=True)]
        known = [depth for depth in depths if depth is not None]
        steps = max(known, default=0)
        if steps and len(known) == len(depths) and all(
                sequence.room - count - 2 >= steps for sequence, count in zip(sequences, drafted, strict=True)):
            self._mtp.start_ahead(sequences, steps, is_narrow)
            self._flight = Flight(list(sequences), known, [sequence.num_steps + 1 for sequence in sequences], prices.step_ms)
            self.num_begun += 1

    def _limits_after(self, sequences: Seq[Sequence]) -> list[int]:
        """Rows for drafts that each will have in the pass behind the one under way."""
        shares = shares_of(MAX_DECODE_ROWS - len(sequences), len(sequences), sequences[0].num_steps + 1)
        return [min(self._cap, share) for share in shares]

    def rests(self, sequences: Seq[Sequence]) -> bool:
        if len(sequences) >= MAX_DECODE_ROWS:
            return True
        if self._flight is not None or self._fixed:
            return False
        if self._uses_suffix and any(index_of(sequence).match_length for sequence in sequences):
            return False
        if self._mtp is None:
            return True
        limits, prices = self._limits_after(sequences), self._prices_of(self._is_narrow(sequences))
        takers = sum(limit > 0 for limit in limits)
        depths = [self._depth(self._state(sequence).mtp, min(limit, sequence.room - 2), True, len(sequences), prices, takers)
                  for sequence, limit in zip(sequences, limits, strict=True)]
        if any(depth > 0 for depth in depths):
            return False
        for sequence in sequences:
            self._state(sequence).mtp.rested()
        return True

    def _depth_ahead(self, sequence: Sequence, limit: int, together: int, prices: PassPrices, takers: int) -> int | None:
        """Drafts of a chain that is begun ahead; None: it must not be, for others will be better."""
        if not _is_plain(sequence):
            return None
        length = index_of(sequence).match_length if self._uses_suffix else 0
        if length:
            return 0 if length >= self.min_match and together > 1 else None
        return self._depth(self._state(sequence).mtp, limit, True, together, prices, takers)

    def _land(self, sequences: Seq[Sequence], limits: Seq[int], drafts: list[list[int]]) -> bool:
        """Fill in the drafts of the chains in flight, where the text went on as they took for granted; False if there are none."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        found = False
        for place, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            row = flight.row(sequence)
            if row is None or drafts[place] or sequence.is_diverted or not _is_plain(sequence):
                continue
            depth = min(flight.depths[row], limit)
            drafts[place], self._state(sequence).sources = [in_flight(row)] * depth, ["mtp"] * depth
            found = found or depth > 0
        if found:
            self._landed_ms = max(flight.depths) * flight.step_ms
            self.num_landed += 1
        return found

    def _state(self, sequence: Sequence) -> DraftState:
        if sequence.draft_state is None:
            sequence.draft_state = DraftState(DepthControl(self._cap), DepthControl(self._cap, SUFFIX_PRIOR), CommonIds(self._rare))
        return sequence.draft_state

    def _is_narrow(self, sequences: Seq[Sequence]) -> bool:
        return bool(self._rare[1]) and all([self._state(sequence).ids.suffice(sequence) for sequence in sequences])

    def _prices_of(self, is_narrow: bool) -> PassPrices:
        return self._prices if is_narrow else self._whole_prices

    def _depth(self, control: DepthControl, limit: int, needs_steps: bool, together: int, prices: PassPrices,
               takers: int | None = None) -> int:
        return limit if self._fixed else control.choose(prices, limit, needs_steps, together, takers)

    def _from_suffix(self, sequence: Sequence, limit: int, together: int) -> list[int]:
        if not self._uses_suffix or limit <= 0 or not may_match(sequence, self.min_match):
            return []
        index = index_of(sequence)
        if index.match_length < self.min_match:
            return []
        depth = self._depth(self._state(sequence).suffix, limit, False, together, self._prices)
        return index.propose(depth, self.min_match) if depth else []

    def _chains(self, sequences: Seq[Sequence], limits: Seq[int], drafts: list[list[int]]) -> None:
        """Fill in chains of the draft layer for the sequences that have no drafts yet."""
        assert self._mtp is not None
        without = [place for place, found in enumerate(drafts) if not found and limits[place] > 0]
        is_narrow = self._is_narrow([sequences[place] for place in without])
        prices = self._prices_of(is_narrow)
        depths = [self._depth(self._state(sequences[place]).mtp, limits[place], True, len(sequences), prices, len(without))
                  for place in without]
        chains = self._mtp.propose([sequences[place] for place in without], depths, is_narrow)
        for place, chain in zip(without, chains, strict=True):
            sequence = sequences[place]
            more: list[int] = []
            if self._uses_suffix and chain and len(chain) < limits[place]:
                more = index_of(sequence).propose(limits[place] - len(chain), GRAM + len(chain), after=chain)
            drafts[place] = chain + more
            self._state(sequence).sources = ["mtp"] * len(chain) + ["suffix"] * len(more)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """A pass with drafts was verified: the first num_accepted of num_drafted agreed."""
        state = self._state(sequence)
        sources = state.sources[:num_drafted]
        own, first = sources.count("mtp"), 0
        for source, count in (("mtp", own), ("suffix", len(sources) - own)):  # a repeat continues a chain, never the other way round
            if count:
                right = max(0, min(num_accepted - first, count))
                self.counts[source].count(first, count, right)
                sequence.count_drafts(source, first, count, right)
            first += count
        if own:
            state.mtp.observe(own, min(num_accepted, own))
        elif sources:
            state.suffix.observe(num_drafted, num_accepted)
        state.sources = []

    def passed(self, rows: int, ms: float) -> None:
        """A decode or verify pass of so many rows took so long. Chains that had been begun ahead ran in that time and in the
        time since the pass before it."""
        now, before, drafted_ms = time.monotonic(), self._passed_at, self._landed_ms
        self._passed_at, self._landed_ms = now, 0.0
        if drafted_ms:
            between = (now - before) * 1e3 - ms
            if between > MAX_BETWEEN_MS:
                return
            ms = max(ms / 4, ms + between - drafted_ms)
        self._prices.record_pass(rows, ms)

    def to_dict(self) -> dict[str, Any]:
        """For /status."""
        by_source = {
            source: {"drafted": _trimmed(count.drafted), "accepted": _trimmed(count.accepted)}
            for source, count in self.counts.items()
        }
        prices = self._prices.to_dict()
        if self._rare[1]:
            prices["whole_step_ms"] = round(self._whole_prices.step_ms, 3)
        return {"cap": self._cap, "sources": by_source, "prices": prices,
                "ahead": {"begun": self.num_begun, "taken": self.num_landed}}


def _trimmed(values: list[int]) -> list[int]:
    """Without the zeros at the end."""
    size = next((index + 1 for index in range(len(values) - 1, -1, -1) if values[index]), 0)
    return values[:size]
