"""When a request goes on with another router after one broke, and when it gives up. Pure: the clock is an argument."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import Code, OutriderError
from outrider.gateway.config import Failover

# What a call ends with when its peer or the way to it is gone. A router that is there gives a reason.
_TRANSPORT = frozenset({Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN})

# What a router says that is going, or has only just come: the gateway asks for models it has seen being served.
_NOT_HERE = frozenset(("DRAINING", "NO_MODEL", "UNKNOWN_MODEL"))


@dataclass(slots=True)
class RouterRetry:
    """One request's patience: bounded in the time that no router takes it, and in the number of routers lost."""

    limits: Failover
    jitter: Callable[[], float] = field(default=random.random)
    """From [0, 1): spreads the return of many requests that broke together."""
    num_breaks: int = 0
    _may_be_accepted: bool = False
    """A router may have taken the request up before the way to it was lost."""
    _num_moves: int = 0
    _broken_since_s: float | None = None
    _next_pause_s: float = 0.0
    _has_got_on: bool = False

    def goes_on(self, error: OutriderError, *, has_tokens: bool) -> bool:
        """Whether a call that ended so is followed by one to another router. `has_tokens`: the client has some."""
        if error.reason is None:
            self._may_be_accepted = True
            return error.code in _TRANSPORT
        if error.code is Code.RESOURCE_EXHAUSTED:
            # A new request is refused for good. One that was accepted is never dropped for load, and its own former
            # self may hold the place it asks for until the target sees that nobody listens.
            return has_tokens or self._may_be_accepted
        return error.reason in _NOT_HERE

    def got_on(self) -> None:
        """A router has accepted the request, or sent a token: patience starts anew with the next break."""
        self._has_got_on = True
        self._broken_since_s = None
        self._next_pause_s = 0.0

    def pause_s(self, now_s: float) -> float | None:
        """After a break: seconds to wait before the next router is asked; None to give up."""
        self.num_breaks += 1
        # Routers that cannot be reached do not count as lost under the request; their time is bounded instead.
        self._num_moves += self._has_got_on
        self._has_got_on = False
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if self._num_moves > self.limits.max_moves or now_s - self._broken_since_s >= self.limits.window_s:
            return None
        pause = self._next_pause_s
        self._next_pause_s = min(max(2 * pause, self.limits.first_pause_s), self.limits.longest_pause_s)
        return pause * (0.5 + self.jitter() / 2)
