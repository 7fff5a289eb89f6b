"""Admission: limits running requests, in all and per tenant, and admits no new ones once the drain begins."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.errors import Overloaded, Unavailable
from outrider.gateway import tuning

_FIRST_RETRY_S, _MIN_RETRY_S, _MAX_RETRY_S = 1.0, 0.1, 30.0


@dataclass(slots=True)
class _Held:
    """The places of one tenant that has at least one."""

    weight: float
    places: int = 0


@dataclass(slots=True)
class Admission:
    max_running: int
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    leaving: bool = False
    """The gateway reports that it is not ready. Requests that arrive anyway are admitted until `draining`."""
    draining: bool = False
    _held: dict[str, _Held] = field(default_factory=dict)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _left_s: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.NUM_LEFT))
    """Times at which the last places became free."""
    _num_refused: int = 0
    """Places refused since the last admission: those clients retry too."""

    @contextmanager
    def enter(self, tenant: str = "", weight: float = 1.0, num_places: int = 1) -> Iterator[None]:
        """Holds `num_places` until the block is left. Raises Unavailable while draining. Raises Overloaded when the
        gateway is full, or nearly full while the tenant has its share.
        """
        if self.draining:
            raise Unavailable("this gateway is shutting down", reason="DRAINING", retry_after_s=1.0)
        self._check_room(tenant, weight, num_places)
        self._num_refused = 0
        held = self._held.setdefault(tenant, _Held(weight))
        held.weight = weight
        held.places += num_places
        self.running += num_places
        try:
            yield
        finally:
            self.running -= num_places
            held.places -= num_places
            if not held.places:
                del self._held[tenant]
            self._left_s.extend([self.clock()] * num_places)
            self._left.set()

    def _check_room(self, tenant: str, weight: float, num_places: int) -> None:
        problem = ""
        if self.running + num_places > self.max_running:
            problem = f"{self.running} requests are under way; this gateway takes {self.max_running}"
        elif self.running >= tuning.BUSY * self.max_running and self._has_share(tenant, weight):
            problem = f"{self._held[tenant].places} requests are under way, this tenant's share of a busy gateway"
        if problem:
            retry_after_s = self._retry_after_s(num_places)
            self._num_refused += num_places
            raise Overloaded(problem, retry_after_s=retry_after_s)

    def _has_share(self, tenant: str, weight: float) -> bool:
        """Whether the tenant has its share among all tenants with running requests."""
        if tenant not in self._held:
            return False
        others = sum(held.weight for name, held in self._held.items() if name != tenant)
        return self._held[tenant].places >= self.max_running * weight / (weight + others)

    def _retry_after_s(self, num_places: int) -> float:
        """Seconds until enough places are free for all refused requests, at the rate of the last ends."""
        if not self._left_s:
            return _FIRST_RETRY_S
        each_s = (self.clock() - self._left_s[0]) / len(self._left_s)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, each_s * (self._num_refused + num_places)))

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing more and waits for running requests. False when some still ran after `timeout_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True
