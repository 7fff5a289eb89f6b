"""Estimates the chance that this target accepts a drafted token, from the draft's own probability of it. Pure.

All sequences of a worker share one table. For each source of proposals and each interval of the draft's probability it
holds the share of tokens that were accepted, counted only where all tokens before them were accepted. For lookups it
goes by the tokens that have matched so far, those of the proposal included. A factor per tenant, and one per sequence,
correct the table for texts that do better or worse.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from outrider.drafting import tuning
from outrider.drafting.tree import DraftTree, chance_after

_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Edges between the intervals of the draft's probability."""
_MIDDLES = tuple((low + high) / 2 for low, high in pairwise((0.0, *_EDGES, 1.0)))
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256)
"""The least of each interval of matched tokens. After hundreds an answer is being repeated, after three perhaps a
phrase."""
# Drafts choose the names of their sources, so without a bound a draft could fill the memory.
_MAX_SOURCES = 16
# Without API keys, clients choose the names of tenants.
_MAX_TENANTS = 4096


class Bin(NamedTuple):
    """Tokens that share one estimate."""

    source: str = ""
    """The part of a drafter that proposed them."""
    drawn: bool = False
    """Whether they have a q, to be verified by the ratio rule."""
    confidence: int = -1
    """Number of the interval that the draft's own probability is in; -1 without one."""
    matched: int = 0
    """Least tokens of the interval that their match is in, for proposals that come from one."""

    @property
    def prior(self) -> float:
        if self.matched:
            return chance_after(self.matched)
        if self.confidence < 0:
            return 0.5
        return _MIDDLES[self.confidence]


def bin_of(source: str, confidence: float | None, matched: int = 0, *, drawn: bool = False) -> Bin:
    """`confidence` may be any float, NaN included: it comes from a draft."""
    if matched:
        return Bin(source, drawn, matched=_LENGTHS[bisect_right(_LENGTHS, matched) - 1])
    if confidence is None or not confidence >= 0:
        return Bin(source, drawn)
    return Bin(source, drawn, bisect_right(_EDGES, min(confidence, 1.0)))


def bin_at(tree: DraftTree, node: int, depth: int) -> Bin:
    """Of a node with `depth` tokens on its path, itself included."""
    return bin_of(tree.origin(node).source, tree.chance(node), tree.matched_at(node, depth), drawn=bool(tree.q))


@dataclass(slots=True)
class _Share:
    accepted: float = 0.0
    verified: float = 0.0
    at_step: int = 0

    def mean(self, prior: float, step: int) -> float:
        kept = tuning.KEEP_STEP ** (step - self.at_step)
        return (kept * self.accepted + tuning.PRIOR * prior) / (kept * self.verified + tuning.PRIOR)

    def bonus(self, step: int) -> float:
        """The exploration bonus: how far the estimate moves from the mean to 1. Without it, tokens that are not
        verified would never be learned about."""
        return tuning.BONUS / math.sqrt(1 + tuning.KEEP_STEP ** (step - self.at_step) * self.verified)

    def add(self, accepted: bool, step: int) -> None:
        kept = tuning.KEEP * tuning.KEEP_STEP ** (step - self.at_step)
        self.accepted = kept * self.accepted + accepted
        self.verified = kept * self.verified + 1
        self.at_step = step


@dataclass(slots=True)
class Fit:
    """How much better or worse than the table the drafts of one text do, or those of all texts of a tenant."""

    usual: Fit | None = None
    """That of its tenant, from which it starts."""
    keep: float = tuning.KEEP_OWN
    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        usual = 1.0 if self.usual is None else self.usual.factor
        return min(tuning.MAX_RATIO, (self.accepted + tuning.PRIOR_OWN * usual) / (self.expected + tuning.PRIOR_OWN))

    def corrected(self, chance: float) -> float:
        """Of a text that does better fewer tokens are rejected: with more accepted instead, all tokens of a long chain
        would soon be sure."""
        factor = self.factor
        return min(tuning.SURE, factor * chance if factor < 1 else 1 - (1 - chance) / factor)

    def committed(self, accepted: float, expected: float) -> None:
        """One commit: tokens accepted, and how many of the verified ones the table expected to be accepted."""
        self.accepted = self.keep * self.accepted + accepted
        self.expected = self.keep * self.expected + expected
        if self.usual is not None:
            self.usual.committed(accepted, expected)


@dataclass(slots=True)
class Calibration:
    """The table of one worker."""

    _shares: dict[Bin, _Share] = field(default_factory=dict)
    _sources: dict[tuple[str, bool], _Share] = field(default_factory=dict)
    """All bins of a source together."""
    _step: int = 0
    _best: tuple[int, float] = (-1, 1.0)
    """(step, chance of the likeliest bin at that step)."""
    _tenants: dict[str, Fit] = field(default_factory=dict)
    _chances: dict[tuple[Bin, bool], float] = field(default_factory=dict)
    """What `own` found since the last verdict: a plan asks for the same few bins again and again."""

    def fit(self, tenant: str) -> Fit:
        """For a new text."""
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return Fit(self._tenants.setdefault(tenant, Fit(keep=tuning.KEEP)))

    def stepped(self) -> None:
        self._step += 1
        self._chances.clear()

    def own(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """The chance that a token is accepted if all before it are. `explore`: whether one that was hardly ever
        verified gets a better one."""
        if (chance := self._chances.get((each, explore))) is None:
            chance = (_optimistic if explore else _mean)(self._shares.get(each), each.prior, self._step)
            self._chances[each, explore] = chance
        return fit.corrected(chance)

    def usual(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """As `own`, on which a decision about the token itself may rest: a drawn token gets the mean of its source,
        because whether it is verified must not depend on which token it is."""
        drawn = each.drawn and not each.matched
        return fit.corrected(self._mean(each)) if drawn else self.own(each, fit, explore=explore)

    def best(self, fit: Fit) -> float:
        """The chance of the likeliest first token that a draft worker could still propose for a text."""
        if self._best[0] != self._step:
            known = (
                _optimistic(share, each.prior, self._step) for each, share in self._shares.items() if not each.matched
            )
            self._best = self._step, max(known, default=1.0)
        return fit.corrected(self._best[1])

    def observe(self, verified: Sequence[tuple[Bin, bool]], fit: Fit) -> None:
        """One commit: the tokens that were verified, and whether each was accepted."""
        expected = 0.0
        self._chances.clear()
        for each, accepted in verified:
            share = self._shares.get(each)
            expected += _mean(share, each.prior, self._step)
            if (source := self._source(each)) is not None:
                source.add(accepted, self._step)
                self._shares.setdefault(each, _Share()).add(accepted, self._step)
        fit.committed(sum(accepted for _, accepted in verified), expected)

    def _mean(self, each: Bin) -> float:
        """The estimate for the token's source, whatever the token's own probability."""
        return _optimistic(self._sources.get((each.source, each.drawn)), 0.5, self._step)

    def _source(self, each: Bin) -> _Share | None:
        """None when there are too many sources."""
        name = each.source, each.drawn
        if name not in self._sources and len(self._sources) >= _MAX_SOURCES:
            return None
        return self._sources.setdefault(name, _Share())


def _mean(share: _Share | None, prior: float, step: int) -> float:
    return prior if share is None else share.mean(prior, step)


def _optimistic(share: _Share | None, prior: float, step: int) -> float:
    mean, bonus = _mean(share, prior, step), tuning.BONUS if share is None else share.bonus(step)
    return mean + bonus * (1 - mean)
