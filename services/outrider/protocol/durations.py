"""Durations as messages have them: whole microseconds, bounded."""

from __future__ import annotations

from outrider.protocol.limits import MAX_DURATION_US


def to_us(seconds: float) -> int:
    """A duration as messages have it."""
    return clamp_us(round(seconds * 1e6))


def clamp_us(value_us: int) -> int:
    """Clamps a duration to the range that messages allow."""
    return value_us if 0 <= value_us <= MAX_DURATION_US else max(0, min(value_us, MAX_DURATION_US))
