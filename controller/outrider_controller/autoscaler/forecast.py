"""Forecast of the speed-up from speculation, before it is tried: from acceptance, K, and the draft's cost. Pure.

Leviathan et al. 2023, section 3.3: if each drafted token is accepted with probability a, K of them give
(1 - a^(K+1)) / (1 - a) tokens per round, including the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_GB = 1e9


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of one round. `acceptance`, in [0, 1], is that of a drafted token after only accepted ones."""
    if acceptance == 1:
        return num_draft_tokens + 1.0
    return float((1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance))


@dataclass(frozen=True, slots=True)
class ForecastRound:
    """One round, in plain steps of the target."""

    num_draft_tokens: int
    tokens: float
    """Committed."""
    cost_ratio: float
    """Time of a target step over that of a draft's forward."""
    row_share: float = 0.0
    """Time that one more row adds to a step, in steps of one row."""

    @property
    def steps(self) -> float:
        """Duration, in plain steps: K forwards of the draft, then one step of K + 1 rows."""
        return 1 + self.num_draft_tokens * (self.row_share + 1 / self.cost_ratio)

    @property
    def speedup(self) -> float:
        return self.tokens / self.steps

    def answer(self, num_tokens: int) -> tuple[float, float]:
        """Rounds that an answer takes, and their duration in plain steps."""
        rounds = num_tokens / self.tokens
        return rounds, rounds * self.steps


def best_round(acceptance: float, cost_ratio: float, row_share: float, most: int) -> ForecastRound:
    """The K of at most `most` with the greatest speed-up; 0 where none is faster than plain decoding."""
    rounds = [ForecastRound(k, tokens_per_round(acceptance, k), cost_ratio, row_share) for k in range(most + 1)]
    return max(rounds, key=lambda one: one.speedup)


def weight_gb(billions: float, bytes_per_parameter: float) -> float:
    """Size of the weights in GB. `billions`: of parameters."""
    return billions * 1e9 * bytes_per_parameter / BYTES_PER_GB
