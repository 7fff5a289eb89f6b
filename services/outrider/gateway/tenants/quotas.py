"""Whether a tenant's quota has room for a request, as far as one gateway knows. Pure: the clock is an argument.

A bucket may go into debt. A request is admitted while anything is left, and charged its whole price; the next one has
to wait until the debt is refilled. So a request larger than the bucket is not refused for ever, and the mean stays at
the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider import tuning
from outrider.rpc.v1 import tenants_pb2

# The store rounds amounts to a millionth, so a grant may be slightly less than the price.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Rate:
    """One quantity of a quota: `rate` per second, 0 for no limit, and the most that may be used at once."""

    rate: float
    capacity: float

    @classmethod
    def of_requests(cls, quota: tenants_pb2.Quota) -> Rate:
        """At once: unless the quota says otherwise, what the rate gives in a second."""
        rate = quota.requests_per_second
        return cls(rate, quota.burst_requests or max(1.0, rate))

    @classmethod
    def of_tokens(cls, quota: tenants_pb2.Quota) -> Rate:
        return cls(quota.tokens_per_minute / 60, quota.burst_tokens or quota.tokens_per_minute)

    def part(self, num_gateways: int) -> Rate:
        return Rate(self.rate / num_gateways, self.capacity / num_gateways)


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a client may still use of one quantity, as far as this gateway knows."""

    limit: int
    remaining: int
    reset_s: float
    """Until nothing is used, if the tenant sends nothing more."""

    @classmethod
    def of(cls, rate: Rate, level: float) -> Remaining:
        left = min(rate.capacity, level)
        reset_s = (rate.capacity - left) / rate.rate
        return cls(int(rate.capacity), max(0, int(left)), reset_s)


@dataclass(slots=True)
class TokenBucket:
    """Refills with time: the store's bucket as last seen, or this gateway's part of it while the store is away."""

    level: float
    at_s: float

    def refill(self, rate: Rate, now_s: float) -> None:
        self.level = min(rate.capacity, self.level + rate.rate * max(0.0, now_s - self.at_s))
        self.at_s = now_s


@dataclass(slots=True)
class Balance:
    """Tokens or requests that a gateway has taken from the store and not yet granted. Negative if answers used more
    than was taken for them: the next request pays the difference.
    """

    level: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self.level += amount
        self.at_s = now_s

    def settle(self, now_s: float) -> float:
        """Returns the amount of an unused slice and drops it: kept for long, it would allow an extra burst."""
        if self.level <= 0 or now_s - self.at_s <= tuning.SLICE_S:
            return 0.0
        unused, self.level = self.level, 0.0
        return unused

    def missing(self, price: float) -> float:
        short = price - self.level
        return short if short > _ROUNDING else 0.0


@dataclass(slots=True)
class MeanTokens:
    """Mean length of a tenant's answers in tokens."""

    mean: float = tuning.USUAL_TOKENS

    def add(self, num_tokens: int) -> None:
        self.mean += tuning.NEWEST * (num_tokens - self.mean)

    def expected(self, max_tokens: int | None) -> float:
        return self.mean if max_tokens is None else min(max_tokens, self.mean)


def prompt_tokens_of(num_chars: int) -> float:
    """An estimate before the text is tokenised; the charge is corrected at the end."""
    return num_chars / tuning.CHARS_PER_TOKEN


def wait_s(missing: float, rate: float) -> float:
    return max(0.001, missing / rate) if rate else 1.0
