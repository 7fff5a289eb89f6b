"""The number of users over time. Pure: the clock and recent outcomes are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loadtest.outcomes import Outcome, Slo, goodput


class Shape(Protocol):
    def users(self, elapsed_s: float, recent: Sequence[Outcome], slo: Slo) -> int | None:
        """Users wanted now; None ends the test. `recent`: outcomes since the number last changed."""


@dataclass(slots=True)
class Steady:
    """A constant number for a fixed time."""

    num_users: int
    seconds: float
    kind: Literal["steady"] = "steady"

    def __post_init__(self) -> None:
        _positive(num_users=self.num_users, seconds=self.seconds)

    def users(self, elapsed_s: float, recent: Sequence[Outcome], slo: Slo) -> int | None:
        return self.num_users if elapsed_s < self.seconds else None


@dataclass(slots=True)
class Ramp:
    """A linear rise from few to many."""

    from_users: int
    to_users: int
    seconds: float
    kind: Literal["ramp"] = "ramp"

    def __post_init__(self) -> None:
        _positive(from_users=self.from_users, to_users=self.to_users, seconds=self.seconds)

    def users(self, elapsed_s: float, recent: Sequence[Outcome], slo: Slo) -> int | None:
        if elapsed_s >= self.seconds:
            return None
        return round(self.from_users + (self.to_users - self.from_users) * elapsed_s / self.seconds)


@dataclass(slots=True)
class Burst:
    """Few users, with periodic bursts of many."""

    num_users: int
    burst_users: int
    every_s: float
    burst_s: float
    seconds: float
    kind: Literal["burst"] = "burst"

    def __post_init__(self) -> None:
        _positive(num_users=self.num_users, burst_users=self.burst_users, seconds=self.seconds)
        if not 0 < self.burst_s < self.every_s:
            raise ValueError("burst_s: must be above 0 and below every_s")

    def users(self, elapsed_s: float, recent: Sequence[Outcome], slo: Slo) -> int | None:
        if elapsed_s >= self.seconds:
            return None
        # The burst is at the end of each period, so that the test begins with few users.
        return self.burst_users if elapsed_s % self.every_s >= self.every_s - self.burst_s else self.num_users


@dataclass(slots=True)
class Threshold:
    """A stepwise rise until too few requests meet the SLO. `held`: the largest number that met it."""

    from_users: int
    step_users: int
    step_s: float
    max_users: int
    min_goodput: float = 0.9
    kind: Literal["threshold"] = "threshold"
    held: int = field(default=0, init=False)
    _level: int = field(default=0, init=False)
    _since_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _positive(from_users=self.from_users, step_users=self.step_users, step_s=self.step_s)
        if self.max_users < self.from_users:
            raise ValueError("max_users: must be at least from_users")
        if not 0 < self.min_goodput <= 1:
            raise ValueError("min_goodput: must be above 0 and at most 1")

    def users(self, elapsed_s: float, recent: Sequence[Outcome], slo: Slo) -> int | None:
        self._level = self._level or self.from_users
        if elapsed_s - self._since_s < self.step_s:
            return self._level
        # A step in which no request ended counts as failed.
        if not recent or goodput(recent, slo) < self.min_goodput:
            return None
        self.held, self._since_s = self._level, elapsed_s
        self._level += self.step_users
        return self._level if self._level <= self.max_users else None


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: must be above 0")
