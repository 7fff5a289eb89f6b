"""How long a step may wait for a draft. Pure."""

from __future__ import annotations

from outrider.drafting.tuning import PATIENCE


def worthwhile_wait_us(*, cap_us: int, accepted_per_step: float, step_us: float, turnaround_us: float) -> int:
    """Longest useful wait in µs: one step per token expected to be accepted, times PATIENCE, at most `cap_us`.

    0, no wait, for a draft that takes longer, and while a duration is unknown (0): the wait could be long, and a round
    without it measures both durations.
    """
    if step_us <= 0 or turnaround_us <= 0:
        return 0
    worth_us = min(float(cap_us), PATIENCE * accepted_per_step * step_us)
    return int(worth_us) if turnaround_us <= worth_us else 0
