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
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from outrider import tuning
from outrider.tree import DraftTree, chance_after

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


def _varied(tree: DraftTree) -> bool:
    """Whether its tokens differ in more than what their source says of them."""
    if tree.matched or not tree.chances:
        return True
    first = tree.origin(0)
    return bool(first.matched) or tree.origins.count(first) != len(tree.origins)


def bins_of(tree: DraftTree, first: int = 0, last: int | None = None) -> list[Bin]:
    """Of each node, or of those from `first` on, before `last`."""
    if _varied(tree):
        return [bin_at(tree, node, depth) for node, depth in enumerate(tree.depths())][first:last]
    bins = _by_interval(tree.origin(0).source, bool(tree.q))
    return [bins[bisect_right(_EDGES, chance)] for chance in tree.chances[first:last]]


# A step asks for those of each drafted token, and a new one takes longer than looking it up.
@lru_cache(4 * _MAX_SOURCES)
def _by_interval(source: str, drawn: bool) -> Sequence[Bin]:
    return [Bin(source, drawn, number) for number in range(len(_MIDDLES))]


@dataclass(slots=True)
class _Share:
    """Of tokens that were accepted. A new one knows as much as one of which nothing was verified."""

    prior: float = 0.5
    source: _Share | None = None
    """That of all bins of the source together, where the tokens are drawn: nothing else rests on it."""
    accepted: float = 0.0
    verified: float = 0.0
    at_step: int = 0

    def mean(self, step: int) -> float:
        kept = tuning.KEEP_STEP ** (step - self.at_step)
        return (kept * self.accepted + tuning.PRIOR * self.prior) / (kept * self.verified + tuning.PRIOR)

    def optimistic(self, step: int) -> float:
        """The mean with the exploration bonus, which moves it towards 1. Without that, tokens that are not verified
        would never be learned about."""
        bonus = tuning.BONUS / math.sqrt(1 + tuning.KEEP_STEP ** (step - self.at_step) * self.verified)
        mean = self.mean(step)
        return mean + bonus * (1 - mean)

    def add(self, accepted: bool, step: int) -> float:
        """Returns the mean before."""
        was_accepted, was_verified = self.accepted, self.verified
        if step != self.at_step:
            kept = tuning.KEEP_STEP ** (step - self.at_step)
            was_accepted, was_verified, self.at_step = kept * was_accepted, kept * was_verified, step
        self.accepted = tuning.KEEP * was_accepted + accepted
        self.verified = tuning.KEEP * was_verified + 1
        if self.source is not None:
            self.source.add(accepted, step)
        return (was_accepted + tuning.PRIOR * self.prior) / (was_verified + tuning.PRIOR)


@dataclass(slots=True)
class Fit:
    """How much better or worse than the table the drafts of one text do, or those of all texts of a tenant."""

    usual: Fit | None = None
    """That of its tenant, from which it starts."""
    keep: float = 1 - tuning.NEWEST
    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        usual = 1.0 if self.usual is None else self.usual.factor
        return (self.accepted + tuning.PRIOR * usual) / (self.expected + tuning.PRIOR)

    def corrected(self, chances: Sequence[float]) -> list[float]:
        """Of a text that does better fewer tokens are rejected: with more accepted instead, all tokens of a long chain
        would soon be sure."""
        factor, most = self.factor, tuning.KEEP
        # Without calls: a step asks for each drafted token.
        if factor < 1:
            return [least if (least := factor * chance) < most else most for chance in chances]
        return [least if (least := 1 - (1 - chance) / factor) < most else most for chance in chances]

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
    _chances: dict[tuple[Bin, bool], tuple[float, float]] = field(default_factory=dict)
    """`own` and `usual` of an average text, since the last verdict: a plan asks for the same few bins again and
    again."""
    _tables: dict[tuple[str, bool], list[float]] = field(default_factory=dict)

    def fit(self, tenant: str) -> Fit:
        """For a new text."""
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return Fit(self._tenants.setdefault(tenant, Fit(keep=tuning.KEEP)))

    def stepped(self) -> None:
        self._step += 1
        self._forget()

    def _forget(self) -> None:
        self._chances.clear()
        self._tables.clear()

    def own(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """The chance that a token is accepted if all before it are. `explore`: whether one that was hardly ever
        verified gets a better one."""
        return fit.corrected([self._of_average(each, explore)[0]])[0]

    def usual(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """As `own`, on which a decision about the token itself may rest: a drawn token gets the mean of its source,
        because whether it is verified must not depend on which token it is."""
        return fit.corrected([self._of_average(each, explore)[1]])[0]

    def owns(self, chain: DraftTree, fit: Fit) -> list[float]:
        """`own` of each node."""
        if _varied(chain):
            found = [self._of_average(each, explore=True)[0] for each in bins_of(chain)]
        else:
            table = self._table(chain.origin(0).source, bool(chain.q))
            found = [table[bisect_right(_EDGES, chance)] for chance in chain.chances]
        return fit.corrected(found)

    def _table(self, source: str, drawn: bool) -> list[float]:
        """`own` of an average text, by the number of the interval."""
        if (found := self._tables.get((source, drawn))) is None:
            bins = _by_interval(source, drawn)
            found = self._tables[source, drawn] = [self._of_average(each, explore=True)[0] for each in bins]
        return found

    def _of_average(self, each: Bin, explore: bool) -> tuple[float, float]:
        if (found := self._chances.get((each, explore))) is None:
            share = self._shares.get(each) or _Share(each.prior)
            own = share.optimistic(self._step) if explore else share.mean(self._step)
            usual = self._of_source(each) if each.drawn and not each.matched else own
            found = self._chances[each, explore] = own, usual
        return found

    def _of_source(self, each: Bin) -> float:
        """The estimate for the token's source, whatever the token's own probability."""
        return (self._sources.get((each.source, each.drawn)) or _Share()).optimistic(self._step)

    def best(self, fit: Fit) -> float:
        """The chance of the likeliest first token that a draft worker could still propose for a text."""
        if self._best[0] != self._step:
            known = (share.optimistic(self._step) for each, share in self._shares.items() if not each.matched)
            self._best = self._step, max(known, default=1.0)
        return fit.corrected([self._best[1]])[0]

    def observe(self, verified: Sequence[tuple[Bin, bool]], fit: Fit) -> None:
        """One commit: the tokens that were verified, and whether each was accepted."""
        expected, right = 0.0, 0
        self._forget()
        for each, accepted in verified:
            expected += (self._shares.get(each) or self._new(each)).add(accepted, self._step)
            right += accepted
        fit.committed(right, expected)

    def verified(self, chain: DraftTree, first: int, count: int, num_accepted: int, fit: Fit) -> None:
        """One commit, in which so many tokens of a chain were verified from `first` on."""
        expected = 0.0
        self._forget()
        for node, each in enumerate(bins_of(chain, first, first + count)):
            expected += (self._shares.get(each) or self._new(each)).add(node < num_accepted, self._step)
        fit.committed(num_accepted, expected)

    def _new(self, each: Bin) -> _Share:
        """Kept, unless there are too many sources."""
        name = each.source, each.drawn
        if name not in self._sources and len(self._sources) >= _MAX_SOURCES:
            return _Share(each.prior)
        source = self._sources.setdefault(name, _Share())
        return self._shares.setdefault(each, _Share(each.prior, source if each.drawn else None))
