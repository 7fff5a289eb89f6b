"""Where one sequence's time goes between two of its commits, and its share of the worker's time. In seconds.

Points in time are monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Times:
    """Queue, prefill and the deciding step follow one another; together they are all the time between two commits."""

    queue_s: float = 0.0
    """Time in which it was ready for a step."""
    wait_s: float = 0.0
    """The part of that in which it was held back for a draft."""
    prefill_s: float = 0.0
    """Steps that ran a chunk of its prompt and committed nothing."""
    share_s: float = 0.0
    """Its share of the time of its steps."""
    drafted_s: float = 0.0
    """The part of that spent on drafted tokens."""
    wasted_s: float = 0.0
    """The part of that spent on those that were not accepted."""


@dataclass(slots=True)
class Timer:
    """Measures the times of one sequence, from what happens to it."""

    ready_since_s: float
    """Since when it has been ready for a step."""
    held_until_s: float | None = None
    """Set when a plan has held it back for a draft since the last step: the latest time until which it waits."""
    answered_s: float | None = None
    """When a draft first answered since the last step; None before that."""
    times: Times = field(default_factory=Times)
    """Since the last commit."""

    def draft_answered(self, received_s: float) -> None:
        if self.answered_s is None:
            self.answered_s = received_s

    def step_began(self, now_s: float) -> None:
        """Records how long it was ready before the step that begins now."""
        self.times.queue_s += max(0.0, now_s - self.ready_since_s)
        if self.held_until_s is not None:
            # The wait may have ended before now: then a step of other sequences delayed it.
            ended_s = min(now_s, self.held_until_s, now_s if self.answered_s is None else self.answered_s)
            self.times.wait_s += max(0.0, ended_s - self.ready_since_s)
        self.held_until_s = self.answered_s = None

    def step_ended(self, began_s: float, now_s: float, *, decides: bool) -> None:
        self.ready_since_s = now_s
        if not decides:
            self.times.prefill_s += now_s - began_s

    def take(self) -> Times:
        """The times up to a commit; they start anew."""
        times, self.times = self.times, Times()
        return times
