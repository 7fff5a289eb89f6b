"""Whether a request continues with another router after one was lost, or gives up. Pure: the clock is an argument."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import Code, OutriderError
from outrider.gateway.config import Failover

# Codes of a call whose peer or connection was lost, if there is no reason: a live router sends a reason.
_TRANSPORT = frozenset({Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN})

# Reasons of a router that is draining, has just started (the gateway requests only models that it has seen served), or
# is cut off from targets that live.
_NOT_HERE = frozenset(("DRAINING", "NO_METADATA", "NO_MODEL", "NO_TARGET_REACHED", "UNKNOWN_MODEL"))


@dataclass(slots=True)
class RouterRetry:
    """The retries of one request: limited by the time without a router that accepts it, and by the routers lost."""

    limits: Failover
    jitter: Callable[[], float] = field(default=random.random)
    """In [0, 1): spreads the retries of many requests that lost one router together."""
    num_breaks: int = 0
    _may_be_accepted: bool = False
    """A router may have accepted the request before its connection was lost."""
    _num_moves: int = 0
    _broken_since_s: float | None = None
    _next_pause_s: float = 0.0
    _has_got_on: bool = False

    def goes_on(self, error: OutriderError, *, has_tokens: bool) -> bool:
        """Whether to retry a call that ended with `error` on another router. `has_tokens`: it or an earlier one."""
        if error.reason is None:
            self._may_be_accepted = True
            return error.code in _TRANSPORT
        if error.code is Code.RESOURCE_EXHAUSTED:
            # A new request is refused finally. An accepted one is never dropped because of load: its own lost call may
            # hold the place that it needs until the target notices the loss.
            return has_tokens or self._may_be_accepted
        return error.reason in _NOT_HERE

    def got_on(self) -> None:
        """A router has accepted the request or sent a token: the next break starts with fresh limits of time."""
        self._has_got_on = True
        self._broken_since_s = None
        self._next_pause_s = 0.0

    def pause_s(self, now_s: float) -> float | None:
        """After a break: seconds to wait before the next router is asked; None to give up."""
        self.num_breaks += 1
        # Routers that cannot be reached do not count as lost by the request; the window limits their time instead.
        self._num_moves += self._has_got_on
        self._has_got_on = False
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if self._num_moves > self.limits.max_moves or now_s - self._broken_since_s >= self.limits.window_s:
            return None
        pause = self._next_pause_s
        self._next_pause_s = min(max(2 * pause, self.limits.first_pause_s), self.limits.longest_pause_s)
        return pause * (0.5 + self.jitter() / 2)
