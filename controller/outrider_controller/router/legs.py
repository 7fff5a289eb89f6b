"""How long one request's rounds take. Pure.

Only durations are combined: of this router's clock, and as a worker measured them by its own. What a message spent on
its way is a round trip as seen from here less the time that the worker had it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.draft_log import clamp_us
from outrider.protocol.rounds import Round


@dataclass(slots=True)
class Legs:
    """One request on its targets. Times are of the router's monotonic clock."""

    opened_us: int
    """When the sequence was opened on the target it is on."""
    _committed_us: int = 0
    _fresh: bool = True
    """The target has committed nothing since it was opened."""

    def __post_init__(self) -> None:
        self._committed_us = self.opened_us

    def opened(self, now_us: int) -> None:
        """The sequence was opened on another target."""
        self.opened_us, self._fresh = now_us, True

    def commit(self, done: Round, now_us: int) -> None:
        """Adds the times of the round that has ended. What is to be known of the draft, the target has said."""
        done.round_us = clamp_us(now_us - self._committed_us)
        if self._fresh:
            own_us = max(0, now_us - self.opened_us - done.queue_us - done.prefill_us - done.verify_us)
            done.wire_us = clamp_us(done.wire_us + own_us)
        self._committed_us, self._fresh = now_us, False
