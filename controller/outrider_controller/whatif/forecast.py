"""What a fleet would do with drafts and without: tokens per second, times per token, cost, and the saving. Pure.

Targets and drafts are a mean field: each target has its share of the streams, and each draft worker its share of the
targets, so one target is simulated and stands for all.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider_controller.whatif.stack import RunResult, Setup, Times, VirtualStack
from outrider_controller.whatif.texts import NUMBER_TOKENS, Text, Texts

# Student's t for a 90 % interval, by degrees of freedom.
_T_90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


@dataclass(frozen=True, slots=True)
class Prices:
    """Of an hour, in any currency."""

    target: float = 1.0
    draft: float = 0.0

    def per_million(self, targets: int, drafts: int, tokens_per_s: float) -> float:
        return 1e6 / tokens_per_s * (targets * self.target + drafts * self.draft) / 3600


@dataclass(frozen=True, slots=True)
class Fleet:
    """`streams`: of all targets together."""

    streams: int
    targets: int = 1
    drafts: int = 1

    def __post_init__(self) -> None:
        if min(self.streams, self.targets) < 1 or self.drafts < 0:
            raise ValueError("a fleet has at least one stream and one target")

    @property
    def streams_of_one(self) -> int:
        """Of the target that stands for all: a whole number."""
        return max(1, round(self.streams / self.targets))

    def setup(self, setup: Setup) -> Setup:
        """One of its targets."""
        drafts = -(-self.drafts // self.targets)
        crowd = drafts * self.targets / self.drafts if self.drafts else 1.0
        times, draft = setup.times, setup.times.draft
        shared = replace(times, draft=lambda n, rows, tokens: draft(round(crowd * n), rows, tokens))
        return replace(setup, times=shared, streams=self.streams_of_one, drafts=drafts)

    def tokens_per_s(self, ran: RunResult) -> float:
        """`ran`: of one of its targets. Each stream is as fast there."""
        return ran.tokens_per_s * self.streams / self.streams_of_one


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one way to serve; the mean of some runs."""

    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    per_million: float
    tokens_per_round: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Forecast:
    plain: Figures
    drafted: Figures
    saving: float
    """Of the cost of a token."""
    low: float
    high: float
    """90 % interval of `saving`, over runs with other draws of the recorded requests."""


@dataclass(frozen=True, slots=True)
class Question:
    """`texts` and `setup` of one target as recorded, with what is changed."""

    texts: Sequence[Text]
    vocab_size: int
    setup: Setup
    prices: Prices = Prices()
    seconds: float = 30.0
    repeats: int = 5

    def answer(self, fleet: Fleet) -> Forecast:
        plain = [self._run(Fleet(fleet.streams, fleet.targets, 0), "off", seed) for seed in range(self.repeats)]
        drafted = [self._run(fleet, self.setup.mode, seed) for seed in range(self.repeats)]
        savings = [
            1 - self._cost(fleet, fleet.drafts, with_) / self._cost(fleet, 0, without)
            for without, with_ in zip(plain, drafted, strict=True)
        ]
        mean, half = statistics.fmean(savings), half_width(savings)
        return Forecast(
            self._figures(fleet, 0, plain),
            self._figures(fleet, fleet.drafts, drafted),
            mean,
            mean - half,
            mean + half,
        )

    def _run(self, fleet: Fleet, mode: str, seed: int) -> RunResult:
        most = self.vocab_size**NUMBER_TOKENS
        drawn = random.Random(seed).choices(self.texts, k=min(len(self.texts), most))
        setup = replace(fleet.setup(self.setup), mode=mode)
        return VirtualStack(Texts(drawn, self.vocab_size), setup, seed).run(self.seconds, self.seconds / 3)

    def _cost(self, fleet: Fleet, drafts: int, ran: RunResult) -> float:
        return self.prices.per_million(fleet.targets, drafts, fleet.tokens_per_s(ran))

    def _figures(self, fleet: Fleet, drafts: int, runs: Sequence[RunResult]) -> Figures:
        def mean(values: Sequence[float]) -> float:
            return round(statistics.fmean(values), 4)

        return Figures(
            mean([fleet.tokens_per_s(ran) for ran in runs]),
            mean([1e3 * ran.per_token_s(0.5) for ran in runs]),
            mean([1e3 * ran.per_token_s(0.99) for ran in runs]),
            mean([self._cost(fleet, drafts, ran) for ran in runs]),
            mean([ran.tokens / max(1, ran.rounds) for ran in runs]),
            mean([ran.accepted / max(1, ran.verified) for ran in runs]),
        )


def half_width(values: Sequence[float]) -> float:
    """Half of a 90 % interval of their mean."""
    if len(values) < 2:
        return 0.0
    degrees = len(values) - 1
    # Beyond the table by the first term that follows the normal distribution's.
    t = _T_90.get(degrees, 1.645 + 1.524 / degrees)
    return t * statistics.stdev(values) / float(len(values) ** 0.5)


def slower(times: Times, added_s: float) -> Times:
    """With a longer round trip between target and draft."""
    return replace(times, one_way_s=times.one_way_s + added_s / 2)
