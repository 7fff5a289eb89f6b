"""Whether a tenant's quota has room for a request, as far as one gateway knows. Pure: the clock is an argument.

A bucket may go into debt: a request is let in while anything is left, at the whole of its price, and nothing more until
time has paid that off. So one with more tokens or more answers than the bucket holds is not refused for ever, and the
mean stays at the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_S = 0.15
"""How much a gateway takes from the store at once, in time at the tenant's whole rate."""
_UNUSED_S = 0.5
_FIRST_MEAN_TOKENS = 128.0
_MEMORY = 0.05
_CHARS_PER_TOKEN = 4
# The store writes amounts to a millionth: what it gave for a price may come to a little less.
_ROUNDING = 1e-3


@dataclass(slots=True)
class Bucket:
    """Fills by itself: where the store is away, with this gateway's part of the rate."""

    level: float
    at_s: float

    def refill(self, rate: float, capacity: float, now_s: float) -> None:
        self.level = min(capacity, self.level + rate * max(0.0, now_s - self.at_s))
        self.at_s = now_s


@dataclass(slots=True)
class Balance:
    """What a gateway has taken from the store and not given out yet. Below 0 where answers came to more than was taken
    for them: the next request pays for that.
    """

    level: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self.level += amount
        self.at_s = now_s

    def settle(self, now_s: float) -> float:
        """Gives up a slice that nobody wanted, and says how much: kept for long it would be a burst of its own."""
        if self.level <= 0 or now_s - self.at_s <= _UNUSED_S:
            return 0.0
        unused, self.level = self.level, 0.0
        return unused

    def missing(self, price: float) -> float:
        """What there is too little for that price."""
        short = price - self.level
        return short if short > _ROUNDING else 0.0


@dataclass(slots=True)
class MeanTokens:
    """How long a tenant's answers are."""

    mean: float = _FIRST_MEAN_TOKENS

    def add(self, num_tokens: int) -> None:
        self.mean += _MEMORY * (num_tokens - self.mean)

    def expected(self, max_tokens: int | None) -> float:
        """Of an answer, before anybody knows how long it is."""
        return self.mean if max_tokens is None else min(max_tokens, self.mean)


def prompt_tokens_of(num_chars: int) -> float:
    """A guess, before the text is tokenised; made good at the end."""
    return num_chars / _CHARS_PER_TOKEN


def wait_s(missing: float, rate: float) -> float:
    """When there will be as much."""
    return max(0.001, missing / rate) if rate else 1.0
