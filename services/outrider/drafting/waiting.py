"""How long a step may wait for a draft. Pure."""

from __future__ import annotations

# A draft that the target does not wait for arrives a little late each time, and its work is lost. Where gain and wait
# are about equal that is worse than waiting, and worse than no draft; so wait longer than the gain alone pays for.
_PATIENCE = 1.5


def worthwhile_wait_us(*, cap_us: int, accepted_per_step: float, step_us: float, turnaround_us: float) -> int:
    """Longest useful wait in µs: one step per token expected to be accepted, times `_PATIENCE`, at most `cap_us`.

    0, no wait, for a draft that takes longer, and while a duration is unknown (0): the wait could be long, and a round
    without it measures both durations.
    """
    if step_us <= 0 or turnaround_us <= 0:
        return 0
    worth_us = min(float(cap_us), _PATIENCE * accepted_per_step * step_us)
    return int(worth_us) if turnaround_us <= worth_us else 0
