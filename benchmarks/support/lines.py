"""A straight line through measured points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope * x, and the share of y's variance that it explains."""

    intercept: float
    slope: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def least_squares(x: Sequence[float], y: Sequence[float]) -> Line:
    """Ordinary least squares. Raises ValueError for fewer than two different x."""
    count = len(x)
    if len(set(x)) < 2:
        raise ValueError("x: a line needs two different points")
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    total = sum((b - mean_y) ** 2 for b in y)
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    # All y are equal: the flat line explains everything.
    return Line(intercept, slope, 1 - left / total if total else 1.0)
