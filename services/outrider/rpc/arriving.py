"""Bounds the messages that have begun to arrive on a gRPC server and have not ended.

gRPC keeps a message in memory from its first byte, once it is read, and says nothing of it before its last. So only a
few are read at once. The messages of honest clients are here by then, and take no time; one that does not end gives its
place up to others.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.errors import DeadlineExceeded, Overloaded

_GRACE_S = 0.1
"""A message that has not ended so soon gives its place up, if others wait; sooner if many do."""
_HURRY = 100
"""With so many waiting, half of that."""
_GRACE_WHEN_BUSY_S = 1.0
_MAX_LAG_S = 0.05
T = TypeVar("T")


@dataclass(slots=True)
class Arriving:
    """Owned by one event loop."""

    places: int
    """Messages read at once."""
    timeout_s: float = math.inf
    """For the whole of a message."""
    max_waiting: int = 1024
    _read: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Those that are read, with the time of their begin."""
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _due_s: float = 0.0

    async def take(self, read: Callable[[], Awaitable[T]]) -> T:
        """Reads a message. Raises DeadlineExceeded for one that takes too long, Overloaded for one that has given its
        place up.
        """
        if len(self._read) >= self.places:
            await self._place()
        limit = asyncio.timeout(None if math.isinf(self.timeout_s) else self.timeout_s)
        try:
            async with limit:
                self._read[limit] = asyncio.get_running_loop().time()
                return await read()
        except TimeoutError:
            if not limit.expired():
                raise
            if limit in self._read:
                raise DeadlineExceeded(f"the message did not arrive within {self.timeout_s:g} s") from None
            raise _crowded() from None
        finally:
            self._read.pop(limit, None)
            self._next()

    async def _place(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if len(self._waiting) > self.max_waiting:
            self._waiting.popleft().set_exception(_crowded())
        self._watch()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._next()
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def _next(self) -> None:
        # The last one first: whoever waits long is among many that do not end.
        while self._waiting and len(self._read) < self.places:
            place = self._waiting.pop()
            if not place.done():
                place.set_result(None)
                return

    def _watch(self) -> None:
        if self._timer is None and self._waiting and self._read:
            loop = asyncio.get_running_loop()
            grace_s = _GRACE_S / (1 + len(self._waiting) / _HURRY)
            self._due_s = max(loop.time() + grace_s / 4, min(self._read.values()) + grace_s)
            self._timer = loop.call_at(self._due_s, self._make_room)

    def _make_room(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._waiting and len(self._read) >= self.places:
            grace_s = _GRACE_S / (1 + len(self._waiting) / _HURRY)
            if loop.time() - self._due_s > _MAX_LAG_S:
                # A loop that was busy has not looked whether they have ended.
                grace_s = _GRACE_WHEN_BUSY_S
            for limit, since_s in list(self._read.items())[: len(self._waiting)]:
                if loop.time() - since_s >= grace_s:
                    del self._read[limit]
                    limit.reschedule(loop.time())
        self._watch()


def _crowded() -> Overloaded:
    return Overloaded("too many requests arrive that do not end", reason="UNFINISHED_REQUESTS", retry_after_s=1.0)
