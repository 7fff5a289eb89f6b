"""What tenants divide by weight: a gateway's places for requests, and the room at a router's targets.

The clock is an argument.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from outrider.errors import Overloaded
from outrider.tuning import BUSY

_NUM_LEFT = 64
_KEPT = 16
"""One of so many places is never held by a tenant that is alone."""
_FIRST_RETRY_S, _MIN_RETRY_S, _MAX_RETRY_S = 1.0, 0.1, 30.0


class TenantShares:
    """The weights of the tenants that have part in something."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._sum = 0.0

    def add(self, tenant: str, weight: float) -> None:
        """From now on it has this weight."""
        self._sum += weight - self._weights.get(tenant, 0.0)
        self._weights[tenant] = weight

    def remove(self, tenant: str) -> None:
        self._sum -= self._weights.pop(tenant)
        if not self._weights:
            # The floating-point sum drifts.
            self._sum = 0.0

    def allow(self, tenant: str, held: float, taken: float, most: float, divided: float) -> bool:
        """Whether a tenant that holds so much may have more. `taken`, `most`: of the whole; `divided`: the part of
        `most` that these tenants divide."""
        return taken < BUSY * most or held < divided * self._weights[tenant] / self._sum


class TenantPlaces:
    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, unit: str = "requests are under way"
    ) -> None:
        """`unit`: what holds a place, for refusals."""
        self.most = most
        self._unit = unit
        self.taken = 0
        self._clock = clock
        self._shares = TenantShares()
        self._held: Counter[str] = Counter()
        self._left_s: deque[float] = deque(maxlen=_NUM_LEFT)
        """Times at which the last places became free."""
        self._num_refused = 0
        """Places refused since one was given last: those clients retry too."""

    @contextmanager
    def hold(self, tenant: str, weight: float, count: int = 1) -> Iterator[None]:
        """Holds `count` places until the block is left. Raises Overloaded when there are too few, or the tenant has its
        share of nearly all."""
        self._check(tenant, weight, count)
        self._num_refused = 0
        self._take(tenant, count)
        try:
            yield
        finally:
            self._take(tenant, -count)
            if not self._held[tenant]:
                del self._held[tenant]
                self._shares.remove(tenant)
            self._left_s.extend([self._clock()] * count)

    def _take(self, tenant: str, count: int) -> None:
        self.taken += count
        self._held[tenant] += count

    def _check(self, tenant: str, weight: float, count: int) -> None:
        held = self._held[tenant]
        # Who holds all that is taken leaves some to whoever comes next.
        most = self.most if self.taken > held or not held else self.most - self.most // _KEPT
        if self.taken + count > most:
            self._refuse(f"{self.taken} {self._unit}; this gateway takes {most}", self.taken, count)
        self._shares.add(tenant, weight)
        # Who holds none is below any share.
        if held and not self._shares.allow(tenant, held + count - 1, self.taken + count - 1, self.most, self.most):
            self._refuse(f"{held} {self._unit}, this tenant's share of a busy gateway", held, count)

    def _refuse(self, problem: str, ending: int, count: int) -> NoReturn:
        retry_after_s = self._retry_after_s(ending, count)
        self._num_refused += count
        raise Overloaded(problem, retry_after_s=retry_after_s)

    def _retry_after_s(self, ending: int, count: int) -> float:
        """Seconds until enough places are free for all that were refused, at the rate of the last ends. `ending`: of
        the taken ones those whose end makes room."""
        if not self._left_s:
            return _FIRST_RETRY_S
        each_s = (self._clock() - self._left_s[0]) / len(self._left_s) * self.taken / max(1, ending)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, each_s * (self._num_refused + count)))
