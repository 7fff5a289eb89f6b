"""Rollouts of drafts: whether a candidate saves more than the draft in use, by a test that may be looked at at any
time. Pure: no I/O, no clock.

A hash of its id gives each request to one of the two. What is compared is what whole requests cost for each committed
token, in plain rounds. The sample is a report: all requests of one router that have ended in one second. Rounds of one
request are alike, and so are requests that run side by side, for they wait for the same worker.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider_controller.autoscaler.evidence import Evidence
from outrider_controller.autoscaler.tuning import NOTICEABLE

DEFAULT_SHARE, MAX_SHARE = 0.03, 0.5
"""Of the requests that speculate. With the first, chance alone hardly ever takes a candidate above 5 % of them."""
PROMOTE_ABOVE, UNDO_BELOW = 0.0, -0.02
"""The bounds of the interval that end a rollout, in plain rounds for each committed token."""
GIVE_UP_TOKENS = 200_000
"""Tokens of the candidate's requests, after which a rollout ends without proof."""
# The interval misses the true difference at any time with at most this probability.
_ERROR = 0.05
MIN_REPORTS = 20
"""With fewer of either draft, their estimated variance says too little."""


class Stage(enum.Enum):
    RUNNING = 1
    PROMOTED = 2
    UNDONE = 3
    GIVEN_UP = 4


@dataclass(frozen=True, slots=True)
class Rollout:
    """A candidate on its way to the requests of one tenant, or of all."""

    draft: str
    """The version."""
    tenant: str
    """Empty: all."""
    share: float
    stage: Stage

    def covers(self, tenant: str) -> bool:
        return self.tenant in ("", tenant)


Rollouts = Mapping[str, Rollout]
"""By draft version."""


@dataclass(slots=True)
class Arm:
    """Sums over the ended requests of one of the two drafts. The squares and products are over their reports."""

    requests: float = 0.0
    tokens: float = 0.0
    cost: float = 0.0
    """In plain rounds."""
    tokens_squared: float = 0.0
    cost_squared: float = 0.0
    tokens_cost: float = 0.0
    reports: float = 0.0

    def add(self, news: Evidence) -> None:
        if not news.requests:
            return
        tokens, cost = news.request_tokens, news.request_cost
        self.reports += 1
        self.requests += news.requests
        self.tokens += tokens
        self.cost += cost
        self.tokens_squared += tokens * tokens
        self.cost_squared += cost * cost
        self.tokens_cost += tokens * cost

    @property
    def token_cost(self) -> float:
        """Plain rounds for each committed token."""
        return self.cost / self.tokens

    @property
    def variance(self) -> float:
        """Of `token_cost`, by the delta method for a ratio of sums over independent reports."""
        each = self.token_cost
        squares = self.cost_squared - 2 * each * self.tokens_cost + each * each * self.tokens_squared
        return max(0.0, squares) / self.tokens**2 * self.reports / (self.reports - 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the candidate saves more than the other for each committed token, in plain rounds, with its interval."""

    saving: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.saving:+.3f} ({self.lower:+.3f} to {self.upper:+.3f})"


def _always_valid(saving: float, variance: float) -> Comparison:
    """The normal mixture SPRT, inverted: Johari, Pekelis and Walsh 2022, "Always Valid Inference", equation 14."""
    # Never 0, or a few samples of the same cost would prove anything.
    variance = max(variance, 1e-8)
    mixed = variance + NOTICEABLE**2
    width = math.sqrt(2 * variance * mixed / NOTICEABLE**2 * math.log(math.sqrt(mixed / variance) / _ERROR))
    return Comparison(saving, saving - width, saving + width)


@dataclass(slots=True)
class Trial:
    candidate: Arm = field(default_factory=Arm)
    incumbent: Arm = field(default_factory=Arm)
    tokens_tokens: float = 0.0
    """This and the next three: sums over reports of products of the candidate's and the incumbent's."""
    tokens_cost: float = 0.0
    cost_tokens: float = 0.0
    cost_cost: float = 0.0

    def add(self, candidate: Evidence, incumbent: Evidence) -> None:
        """Adds what has ended at one router in the same second."""
        self.candidate.add(candidate)
        self.incumbent.add(incumbent)
        self.tokens_tokens += candidate.request_tokens * incumbent.request_tokens
        self.tokens_cost += candidate.request_tokens * incumbent.request_cost
        self.cost_tokens += candidate.request_cost * incumbent.request_tokens
        self.cost_cost += candidate.request_cost * incumbent.request_cost

    @property
    def variance(self) -> float:
        """Of the difference of the two costs of a token. What delays both in the same second is in both costs."""
        candidate, incumbent = self.candidate, self.incumbent
        mine, others = candidate.token_cost, incumbent.token_cost
        products = self.cost_cost - others * self.cost_tokens - mine * self.tokens_cost
        products += mine * others * self.tokens_tokens
        covariance = products / (candidate.tokens * incumbent.tokens)
        return candidate.variance + incumbent.variance - 2 * covariance

    def compare(self) -> Comparison | None:
        """None while there are too few reports."""
        candidate, incumbent = self.candidate, self.incumbent
        if min(candidate.reports, incumbent.reports) < MIN_REPORTS:
            return None
        return _always_valid(incumbent.token_cost - candidate.token_cost, self.variance)

    def verdict(self) -> tuple[Stage, str] | None:
        """The stage that the rollout enters now, and why; None while it goes on."""
        found = self.compare()
        text = f"after {self.candidate.tokens:,.0f} tokens of the candidate"
        if found is not None:
            text = f"it saves {found} plain rounds a token {text}"
            if found.lower > PROMOTE_ABOVE:
                return Stage.PROMOTED, text
            if found.upper < UNDO_BELOW:
                return Stage.UNDONE, text
        return (Stage.GIVEN_UP, text) if self.candidate.tokens >= GIVE_UP_TOKENS else None
