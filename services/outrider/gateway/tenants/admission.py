"""Admission: limits running requests, in all and per tenant, and admits no new ones once the drain begins. What a
tenant has is decided by `TenantPlaces` in `outrider.runtime.places`. Refusals are paced, so that a caller that repeats
them on many connections leaves the gateway's time to others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from outrider.errors import Unavailable
from outrider.runtime.places import TenantPlaces

# Refusals that a caller gets in a second, and those that it gets at once after a pause; with the parts of a request
# that were read before, each costs some 2 ms.
_REFUSALS, _AT_ONCE = 50.0, 20
_MAX_WAIT_S = 10.0
_MAX_CALLERS = 10_000


@dataclass(slots=True)
class RefusalPace:
    """When the next refusal of each caller is due (a leaky bucket, as ITU-T I.371 has it)."""

    _full_s: dict[str, float] = field(default_factory=dict)

    def wait_s(self, caller: str, now_s: float) -> float:
        """Seconds until it may be sent. Not more than a client waits: those who have so many open wait as long with
        each."""
        if len(self._full_s) >= _MAX_CALLERS:
            self._full_s = {name: full_s for name, full_s in self._full_s.items() if full_s > now_s}
        full_s = max(now_s, self._full_s.get(caller, -math.inf)) + 1 / _REFUSALS
        wait_s = full_s - now_s - _AT_ONCE / _REFUSALS
        if wait_s < _MAX_WAIT_S:
            self._full_s[caller] = full_s
        return min(_MAX_WAIT_S, max(0.0, wait_s))


# Of all answers that are not sent as they grow; in pieces, as the places of a gateway.
MAX_KEPT_BYTES, PIECE_BYTES = 256 << 20, 1 << 16
CHUNK_BYTES = 1024
"""About what the text of one chunk takes until its answer is whole."""


@dataclass(slots=True)
class Kept:
    """The memory of one request's answers that are not sent as they grow."""

    places: TenantPlaces
    caller: str
    stack: ExitStack
    num_bytes: int = 0
    num_pieces: int = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded if that is more than there is room for, or more than the caller's share of it."""
        self.num_bytes += num_bytes + CHUNK_BYTES
        if pieces := self.num_bytes // PIECE_BYTES - self.num_pieces:
            self.stack.enter_context(self.places.hold(self.caller, 1.0, pieces))
            self.num_pieces += pieces


@dataclass(slots=True)
class Admission:
    max_running: int
    clock: Callable[[], float] = time.monotonic
    leaving: bool = False
    """The gateway reports that it is not ready. Requests that arrive anyway are admitted until `draining`."""
    draining: bool = False
    _places: TenantPlaces = field(init=False)
    _pieces: TenantPlaces = field(init=False)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _refusals: RefusalPace = field(default_factory=RefusalPace)

    def __post_init__(self) -> None:
        self._places = TenantPlaces(self.max_running, self.clock)
        unit = f"pieces of {PIECE_BYTES >> 10} KiB of answers that are not streamed are kept"
        self._pieces = TenantPlaces(MAX_KEPT_BYTES // PIECE_BYTES, self.clock, unit)

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

    @contextmanager
    def keeping(self, caller: str) -> Iterator[Kept]:
        """What is added within the block is kept until its end."""
        with ExitStack() as stack:
            yield Kept(self._pieces, caller, stack)

    async def refusing(self, caller: str) -> None:
        """To be awaited before a refusal is sent, with nothing held."""
        if wait_s := self._refusals.wait_s(caller, self.clock()):
            await asyncio.sleep(wait_s)

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
