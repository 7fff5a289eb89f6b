"""Admission: limits running requests, in all and per tenant, and admits no new ones once the drain begins. What a
tenant has is decided by `TenantPlaces` in `outrider.runtime.places`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.errors import Unavailable
from outrider.runtime.places import TenantPlaces


@dataclass(slots=True)
class Admission:
    max_running: int
    clock: Callable[[], float] = time.monotonic
    leaving: bool = False
    """The gateway reports that it is not ready. Requests that arrive anyway are admitted until `draining`."""
    draining: bool = False
    _places: TenantPlaces = field(init=False)
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._places = TenantPlaces(self.max_running, self.clock)

    @property
    def running(self) -> int:
        return self._places.taken

    @contextmanager
    def enter(self, tenant: str = "", weight: float = 1.0, num_places: int = 1) -> Iterator[None]:
        """Holds `num_places` until the block is left. Raises Unavailable while draining, else as TenantPlaces."""
        if self.draining:
            raise Unavailable("this gateway is shutting down", reason="DRAINING", retry_after_s=1.0)
        try:
            with self._places.hold(tenant, weight, num_places):
                yield
        finally:
            self._left.set()

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
