"""Estimates the chance that this target accepts a drafted token, from the draft's own probability of it. Pure.

All sequences of a worker share one table. For each source of proposals and each interval of the draft's probability it
holds the share of tokens that were accepted, counted only where all tokens before them were accepted. For lookups it
goes by the tokens that have matched so far, those of the proposal included. A factor per tenant, and one per sequence,
correct the table for texts that do better or worse.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def bins_of(tree: DraftTree) -> Sequence[Bin]:
    """Of each node."""
    if tree.bins is None:
        varied = tree.matched or not tree.chances or any(o.matched or o.source != tree.source for o in tree.origins)
        if varied:
            tree.bins = [bin_at(tree, node, depth) for node, depth in enumerate(tree.depths())]
        else:
            bins = _by_interval(tree.source, bool(tree.q))
            tree.bins = [bins[bisect_right(_EDGES, chance)] for chance in tree.chances]
    return tree.bins


# A new one takes longer than looking it up.
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

    def add(self, accepted: int, verified: int, step: int) -> None:
        """So many tokens of one step, as if those accepted were spread evenly."""
        kept, counted = _decay(verified)
        kept *= tuning.KEEP_STEP ** (step - self.at_step)
        self.accepted = kept * self.accepted + counted * accepted / verified
        self.verified = kept * self.verified + counted
        self.at_step = step
        if self.source is not None:
            self.source.add(accepted, verified, step)


def _decay(verified: int) -> tuple[float, float]:
    """What is left of a count after so many verdicts, and what they count for together."""
    kept = tuning.KEEP**verified
    return kept, (1 - kept) / (1 - tuning.KEEP)


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


class _Estimates(dict[Bin, float]):
    """Of an average text, since the last verdicts: a step asks for the same few bins for each drafted token."""

    def __init__(self, made: Callable[[Bin], float]) -> None:
        super().__init__()
        self._made = made

    def __missing__(self, each: Bin) -> float:
        found = self[each] = self._made(each)
        return found


class Calibration:
    """The table of one worker."""

    def __init__(self) -> None:
        self._shares: dict[Bin, _Share] = {}
        self._sources: dict[tuple[str, bool], _Share] = {}
        """All bins of a source together."""
        self._step = 0
        self._best = -1, 1.0
        """(step, chance of the likeliest bin at that step)."""
        self._tenants: dict[str, Fit] = {}
        self._chances = _Estimates(lambda each: self._share(each).optimistic(self._step))
        self._means = _Estimates(lambda each: self._share(each).mean(self._step))
        self._verified: list[Bin] = []
        """Of the verdicts that are not in the table yet: a step's come into it together."""
        self._accepted: list[Bin] = []
        """Those of them that were right."""

    def fit(self, tenant: str) -> Fit:
        """For a new text."""
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return Fit(self._tenants.setdefault(tenant, Fit(keep=tuning.KEEP)))

    def stepped(self) -> None:
        self._settle()
        self._step += 1
        self._forget()

    def _forget(self) -> None:
        self._chances.clear()
        self._means.clear()

    def _share(self, each: Bin) -> _Share:
        return self._shares.get(each) or _Share(each.prior)

    def own(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """The chance that a token is accepted if all before it are. `explore`: whether one that was hardly ever
        verified gets a better one."""
        self._settle()
        return fit.corrected([(self._chances if explore else self._means)[each]])[0]

    def usual(self, each: Bin, fit: Fit, *, explore: bool = True) -> float:
        """As `own`, on which a decision about the token itself may rest: a drawn token gets the mean of its source,
        because whether it is verified must not depend on which token it is."""
        if not each.drawn or each.matched:
            return self.own(each, fit, explore=explore)
        self._settle()
        return fit.corrected([self._of_source(each)])[0]

    def _of_source(self, each: Bin) -> float:
        """The estimate for the token's source, whatever the token's own probability."""
        return (self._sources.get((each.source, each.drawn)) or _Share()).optimistic(self._step)

    def owns(self, chain: DraftTree, fit: Fit, first: int = 0, last: int | None = None) -> list[float]:
        """`own` of each node, or of those from `first` on, before `last`."""
        self._settle()
        return fit.corrected([*map(self._chances.__getitem__, bins_of(chain)[first:last])])

    def best(self, fit: Fit) -> float:
        """The chance of the likeliest first token that a draft worker could still propose for a text."""
        if self._best[0] != self._step:
            self._settle()
            known = (share.optimistic(self._step) for each, share in self._shares.items() if not each.matched)
            self._best = self._step, max(known, default=1.0)
        return fit.corrected([self._best[1]])[0]

    def verified(self, bins: Sequence[Bin], num_accepted: int, fit: Fit) -> None:
        """One commit: the tokens that were verified, first those that were accepted."""
        self._verified += bins
        self._accepted += bins[:num_accepted]
        fit.committed(num_accepted, sum(map(self._means.__getitem__, bins)))

    def _settle(self) -> None:
        if not self._verified:
            return
        verified, accepted = Counter(self._verified), Counter(self._accepted)
        for each, count in verified.items():
            (self._shares.get(each) or self._new(each)).add(accepted[each], count, self._step)
        self._verified.clear()
        self._accepted.clear()
        self._forget()

    def _new(self, each: Bin) -> _Share:
        """Kept, unless there are too many sources."""
        name = each.source, each.drawn
        if name not in self._sources and len(self._sources) >= _MAX_SOURCES:
            return _Share(each.prior)
        source = self._sources.setdefault(name, _Share())
        return self._shares.setdefault(each, _Share(each.prior, source if each.drawn else None))
