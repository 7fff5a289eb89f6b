"""How long a step of `vllm serve` waits for draft workers that no router measures. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.sequence.speculation import worthwhile_wait_us

_STEP_KEEP, _ACCEPTED_KEEP = 0.8, 0.97
_MAX_UNANSWERED = 2
"""Waits in vain, after which the next one needs an answer first."""


@dataclass(slots=True)
class MeasuredWait:
    """Measures over all requests."""

    cap_us: int
    step_us: float = 0.0
    accepted_per_step: float = 1.0
    """Of drafts that came in time."""
    unanswered: int = 0
    _answers_us: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """From a commit to its answer. The shortest counts: a draft that nobody waited for was still busy."""

    @property
    def limit_us(self) -> int:
        if self.unanswered >= _MAX_UNANSWERED:
            return 0
        return worthwhile_wait_us(
            cap_us=self.cap_us,
            accepted_per_step=self.accepted_per_step,
            step_us=self.step_us,
            turnaround_us=min(self._answers_us, default=0.0),
        )

    def answered(self, seconds: float) -> None:
        self._answers_us.append(seconds * 1e6)
        self.unanswered = 0

    def stepped(self, seconds: float) -> None:
        took_us = seconds * 1e6
        self.step_us = _STEP_KEEP * self.step_us + (1 - _STEP_KEEP) * took_us if self.step_us else took_us

    def verified(self, num_accepted: int) -> None:
        """A draft that came in time."""
        self.accepted_per_step += (1 - _ACCEPTED_KEEP) * (num_accepted - self.accepted_per_step)
