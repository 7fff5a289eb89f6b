"""Places that tenants divide: of a gateway for its requests, of a router for its calls. The clock is an argument.

While less than a share `BUSY` of them is taken, any tenant gets one. Above that only tenants below their weighted
share do, among those that have any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.errors import Overloaded
from outrider.tuning import BUSY

_NUM_LEFT = 64
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


@dataclass(slots=True)
class _Held:
    """The places of one tenant that has at least one."""

    weight: float
    places: int = 0


class TenantPlaces:
    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        first_retry_s: float = 1.0,
        holder: str = "server",
    ) -> None:
        """`first_retry_s`: what a client is told before the first place became free. `holder`: what has the places."""
        self.most = most
        self.taken = 0
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._holder = holder
        self._held: dict[str, _Held] = {}
        self._left_s: deque[float] = deque(maxlen=_NUM_LEFT)
        """Times at which the last places became free."""
        self._num_refused = 0
        """Places refused since one was given last: those clients retry too."""

    @contextmanager
    def hold(self, tenant: str, weight: float, count: int = 1, *, begun: bool = False) -> Iterator[None]:
        """Holds `count` places until the block is left. Raises Overloaded when there are too few, or the tenant has its
        share of nearly all. `begun`: the request has had a place elsewhere, and may exceed the share."""
        self._check(tenant, weight, count, begun)
        self._num_refused = 0
        held = self._held.setdefault(tenant, _Held(weight))
        held.weight = weight
        held.places += count
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
            held.places -= count
            if not held.places:
                del self._held[tenant]
            self._left_s.extend([self._clock()] * count)

    def _check(self, tenant: str, weight: float, count: int, begun: bool) -> None:
        if self.taken + count > self.most:
            problem = f"{self.taken} requests are under way; this {self._holder} takes {self.most}"
            ending = self.taken
        elif not begun and self.taken >= BUSY * self.most and self._has_share(tenant, weight):
            ending = self._held[tenant].places
            problem = f"{ending} requests are under way, this tenant's share of a busy {self._holder}"
        else:
            return
        retry_after_s = self._retry_after_s(ending, count)
        self._num_refused += count
        raise Overloaded(problem, retry_after_s=retry_after_s)

    def _has_share(self, tenant: str, weight: float) -> bool:
        if tenant not in self._held:
            return False
        others = sum(held.weight for name, held in self._held.items() if name != tenant)
        return self._held[tenant].places >= self.most * weight / (weight + others)

    def _retry_after_s(self, ending: int, count: int) -> float:
        """Seconds until enough places are free for all that were refused, at the rate of the last ends. `ending`: of
        the taken ones those whose end makes room."""
        if not self._left_s:
            return self._first_retry_s
        each_s = (self._clock() - self._left_s[0]) / len(self._left_s) * self.taken / max(1, ending)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, each_s * (self._num_refused + count)))
