"""How many requests run at once, and the drain: after it begins nothing new is let in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.errors import Overloaded, Unavailable


@dataclass(slots=True)
class Admission:
    max_running: int
    running: int = 0
    leaving: bool = False
    """It says that it is not ready. What comes all the same is let in until `draining`."""
    draining: bool = False
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def enter(self, num_places: int = 1) -> Iterator[None]:
        """Raises Unavailable while draining, Overloaded when full. Holds so many places until left."""
        if self.draining:
            raise Unavailable("this gateway is shutting down", reason="DRAINING", retry_after_s=1.0)
        if self.running + num_places > self.max_running:
            raise Overloaded(f"{self.running} requests are under way, the most this gateway takes", retry_after_s=1.0)
        self.running += num_places
        try:
            yield
        finally:
            self.running -= num_places
            self._left.set()

    async def drain(self, timeout_s: float) -> bool:
        """Lets nothing in and waits for what runs. False when some still ran after `timeout_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True
