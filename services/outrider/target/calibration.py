"""From what drafts say of their tokens to the share that this target accepts. Pure.

One table for all sequences of a worker: who proposed a token, and what was said of it, against how many such tokens
were accepted where all before them were. A sequence adds how its own text compares with that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Between bins of confidence."""
_MAX_MATCHED = 16
# What was said, or guessed, counts as much as so many verdicts.
_PRIOR = 8.0
# What was never judged may be likelier than is said: by so much of what is missing to 1. It shrinks as verdicts come.
_HOPE = 0.5
# Forgetting per verdict, and per step of the worker: what is no longer judged comes back to what is said of it.
_KEEP, _KEEP_STEP = 0.995, 0.9985
# A draft may call its parts as it likes; a table that grew with it would be its to fill.
_MAX_SOURCES = 16
# A text's own record: verdicts that the table's word counts as, and forgetting per commit, judged or not, so that a
# draft that is not asked any more is asked again.
_PRIOR_OWN, _KEEP_OWN = 6.0, 0.97
_MAX_RATIO = 1.25
_SURE = 0.995


class Bin(NamedTuple):
    """Tokens of which the same was said."""

    source: str = ""
    """The part of a drafter that proposed them."""
    drawn: bool = False
    """Whether they were sampled, to be judged by the ratio rule."""
    confidence: int = -1
    """Number of the interval that the draft's own probability is in; -1 without one."""
    matched: int = 0
    """Tokens of the match that they continue, for proposals that come from one."""

    @property
    def prior(self) -> float:
        if self.matched:
            return self.matched / (self.matched + 1)
        if self.confidence < 0:
            return 0.5
        edges = (0.0, *_EDGES, 1.0)
        return (edges[self.confidence] + edges[self.confidence + 1]) / 2


def bin_of(source: str, confidence: float | None, matched: int = 0, *, drawn: bool = False) -> Bin:
    """`confidence` may be anything: a draft may say that a chance is no number."""
    if matched:
        return Bin(source, drawn, matched=min(matched, _MAX_MATCHED))
    if confidence is None or not confidence >= 0:
        return Bin(source, drawn)
    return Bin(source, drawn, bisect_right(_EDGES, min(confidence, 1.0)))


@dataclass(slots=True)
class _Share:
    accepted: float = 0.0
    verified: float = 0.0
    at_step: int = 0

    def mean(self, prior: float, step: int) -> float:
        kept = _KEEP_STEP ** (step - self.at_step)
        return (kept * self.accepted + _PRIOR * prior) / (kept * self.verified + _PRIOR)

    def hope(self, step: int) -> float:
        """How far the share may be from its mean to 1: tokens that are never judged would never be known."""
        return _HOPE / math.sqrt(1 + _KEEP_STEP ** (step - self.at_step) * self.verified)

    def add(self, accepted: bool, step: int) -> None:
        kept = _KEEP * _KEEP_STEP ** (step - self.at_step)
        self.accepted = kept * self.accepted + accepted
        self.verified = kept * self.verified + 1
        self.at_step = step


@dataclass(slots=True)
class Fit:
    """How much better or worse than the table says the drafts of one text are."""

    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return min(_MAX_RATIO, (self.accepted + _PRIOR_OWN) / (self.expected + _PRIOR_OWN))


@dataclass(slots=True)
class Calibration:
    """The table of one worker."""

    _shares: dict[Bin, _Share] = field(default_factory=dict)
    _sources: dict[tuple[str, bool], _Share] = field(default_factory=dict)
    """All bins of a source together."""
    _step: int = 0
    _best: tuple[int, float] = (-1, 1.0)
    """The likeliest bin, as of a step."""

    def stepped(self) -> None:
        self._step += 1

    def chances(self, bins: list[Bin], fit: Fit) -> list[float]:
        """Of each token, that it and all before it are accepted. Never rises along the way.

        Of a drawn token, by what precedes it: that it is judged must not depend on which it is.
        """
        found, joint, least, factor = [], 1.0, 1.0, fit.factor
        for each in bins:
            own = min(_SURE, factor * _hoped(self._shares.get(each), each.prior, self._step))
            here = joint * (min(_SURE, factor * self._mean(each)) if each.drawn else own)
            least = min(least, here)
            found.append(least)
            joint *= own
        return found

    def best(self, fit: Fit) -> float:
        """Of a first token that drafts could still propose for a text, as likely as any is here."""
        if self._best[0] != self._step:
            known = (_hoped(share, each.prior, self._step) for each, share in self._shares.items())
            self._best = self._step, max(known, default=1.0)
        return min(_SURE, fit.factor * self._best[1])

    def observe(self, bins: list[Bin], num_verified: int, num_accepted: int, fit: Fit) -> None:
        """One commit: of these tokens the first num_verified were looked at, and the first num_accepted accepted."""
        fit.accepted *= _KEEP_OWN
        fit.expected *= _KEEP_OWN
        for number, each in enumerate(bins[:num_verified]):
            accepted = number < num_accepted
            share = self._shares.get(each)
            fit.expected += each.prior if share is None else share.mean(each.prior, self._step)
            fit.accepted += accepted
            if (source := self._source(each)) is not None:
                source.add(accepted, self._step)
                self._shares.setdefault(each, _Share()).add(accepted, self._step)

    def _mean(self, each: Bin) -> float:
        """Of the token's source, whatever is said of the token."""
        return _hoped(self._sources.get((each.source, each.drawn)), 0.5, self._step)

    def _source(self, each: Bin) -> _Share | None:
        """None where there are too many."""
        name = each.source, each.drawn
        if name not in self._sources and len(self._sources) >= _MAX_SOURCES:
            return None
        return self._sources.setdefault(name, _Share())


def _hoped(share: _Share | None, prior: float, step: int) -> float:
    mean, hope = (prior, _HOPE) if share is None else (share.mean(prior, step), share.hope(step))
    return mean + hope * (1 - mean)


def min_chance(price: float, weight: float) -> float:
    """What a draft is told as the least chance worth proposing, in [0, 1]."""
    return min(1.0, price / weight) if price > 0 and weight > 0 else 0.0
