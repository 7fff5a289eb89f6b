"""What one more row of a step takes, and what a step brings meanwhile: by that a drafted token is worth its row.

On hardware that waits for memory a row is all but free; where a step is bound by arithmetic, as on a CPU or in a full
batch, it is not. Which of them it is can be seen from steps of different sizes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Forgetting per step: the last 100 count. The slope is forgotten as steps of other sizes come, and else slowly: where
# no drafted row pays all steps are alike, and what a row costs must not be forgotten for that, but be looked at again.
_KEEP, _KEEP_ALIKE = 0.99, 0.9995
# Before anything was seen: what is not the rows' of a step takes as long as so many rows. That counts as much as so
# many steps whose rows vary by two.
_PRIOR_BASE_ROWS, _PRIOR_STEPS, _PRIOR_VARIANCE = 19.0, 10.0, 4.0


@dataclass(slots=True)
class StepCost:
    """Of steps that only decode and verify: means over the last ones."""

    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _tokens: float = 0.0
    _variance: float = 0.0
    """Of the rows, summed over steps."""
    _covariance: float = 0.0
    """Of rows and seconds, likewise."""

    def took(self, *, rows: int, seconds: float, tokens: int) -> None:
        """One step: of so many rows, which brought so many tokens."""
        if seconds <= 0:
            return
        self._weight = _KEEP * self._weight + 1
        share = 1 / self._weight
        aside = rows - self._rows
        self._rows += share * aside
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)
        # Welford: one factor by the mean before, one by the mean after.
        varies = aside * (rows - self._rows)
        informs = varies * self._weight / (self._variance + _PRIOR_STEPS * _PRIOR_VARIANCE)
        kept = min(_KEEP_ALIKE, _KEEP ** min(1.0, informs))
        self._variance = kept * self._variance + varies
        self._covariance = kept * self._covariance + aside * (seconds - self._seconds)

    @property
    def row_share(self) -> float:
        """What a row more takes, in steps: the slope of a line through the steps, drawn towards what is usual."""
        rows = max(self._rows, 1.0)
        usual = 1 / (_PRIOR_BASE_ROWS + rows)
        if not self._seconds:
            return usual
        prior = _PRIOR_STEPS * _PRIOR_VARIANCE
        share = (self._covariance / self._seconds + prior * usual) / (self._variance + prior)
        # All rows together take no longer than the step.
        return min(max(share, 0.0), 1 / rows)

    @property
    def price(self) -> float:
        """Of a row: the chance of a token to come, from which on it brings more than the step does in its time."""
        return self.row_share * max(self._tokens, 1.0)
