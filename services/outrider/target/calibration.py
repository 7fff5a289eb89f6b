"""From what drafts say of their tokens to the share that this target accepts. Pure.

One table for all sequences of a worker: who proposed a token, and what was said of it, against how many such tokens
were accepted where all before them were. A tenant adds how its texts compare with that, and a sequence its own.
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
# A text's own record: verdicts that the word of its tenant counts as, or for a tenant that of the table; and forgetting
# per commit, judged or not, so that a draft that is not asked any more is asked again. A tenant forgets more slowly:
# each of its new texts would else ask anew.
_PRIOR_OWN, _KEEP_OWN, _KEEP_TENANT = 6.0, 0.97, 0.995
_MAX_RATIO = 1.25
# Clients name tenants where there are no keys.
_MAX_TENANTS = 4096
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
    """How much better or worse than the table says the drafts of one text are, or of all texts of a tenant."""

    usual: Fit | None = None
    """Its tenant's, from which it starts."""
    keep: float = _KEEP_OWN
    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        usual = 1.0 if self.usual is None else self.usual.factor
        return min(_MAX_RATIO, (self.accepted + _PRIOR_OWN * usual) / (self.expected + _PRIOR_OWN))

    def committed(self, accepted: float, expected: float) -> None:
        """One commit: tokens accepted, and what the table expected of those that were looked at."""
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
    """The likeliest bin, as of a step."""
    _tenants: dict[str, Fit] = field(default_factory=dict)

    def fit(self, tenant: str) -> Fit:
        """Of a new text."""
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return Fit(self._tenants.setdefault(tenant, Fit(keep=_KEEP_TENANT)))

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
        judged, expected = bins[:num_verified], 0.0
        for number, each in enumerate(judged):
            accepted = number < num_accepted
            share = self._shares.get(each)
            expected += each.prior if share is None else share.mean(each.prior, self._step)
            if (source := self._source(each)) is not None:
                source.add(accepted, self._step)
                self._shares.setdefault(each, _Share()).add(accepted, self._step)
        fit.committed(min(num_accepted, len(judged)), expected)

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
