"""What one more row of a step takes, and what a step brings meanwhile: by that a guess beside others is worth its row.

On hardware that waits for memory a row is all but free; where a step is bound by arithmetic, as on a CPU or in a full
batch, it is not. Which of them it is can be seen from steps of different sizes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Forgetting per step: the last 100 count.
_KEEP = 0.99
# Before anything was seen: a twentieth of a step a row. As much as so many steps whose rows vary by two say.
_PRIOR_SHARE, _PRIOR_STEPS, _PRIOR_VARIANCE = 0.05, 10.0, 4.0


@dataclass(slots=True)
class StepCost:
    """Of steps that only decode and verify: means over the last ones."""

    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_squared: float = 0.0
    _rows_seconds: float = 0.0
    _tokens: float = 0.0

    def took(self, *, rows: int, seconds: float, tokens: int) -> None:
        """One step: of so many rows, which brought so many tokens."""
        self._weight = _KEEP * self._weight + 1
        share = 1 / self._weight
        self._rows += share * (rows - self._rows)
        self._seconds += share * (seconds - self._seconds)
        self._rows_squared += share * (rows * rows - self._rows_squared)
        self._rows_seconds += share * (rows * seconds - self._rows_seconds)
        self._tokens += share * (tokens - self._tokens)

    @property
    def row_share(self) -> float:
        """What a row more takes, in steps: the slope of a line through the steps, drawn towards what is usual."""
        if not self._seconds:
            return _PRIOR_SHARE
        variance = self._weight * max(0.0, self._rows_squared - self._rows * self._rows)
        covariance = self._weight * (self._rows_seconds - self._rows * self._seconds) / self._seconds
        prior = _PRIOR_STEPS * _PRIOR_VARIANCE
        return max(0.0, (covariance + prior * _PRIOR_SHARE) / (variance + prior))

    @property
    def least_chance(self) -> float:
        """Of a token to come, from which on its row brings more than the step does in the time that it takes."""
        return self.row_share * max(self._tokens, 1.0)
