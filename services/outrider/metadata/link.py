"""The connection to Redis, which may be away: every call is bounded, and fails fast while it is.

A call that fails or takes too long closes the link. From then on calls return None at once, and a task asks for the
server, at first without delay, then every second at most, until it answers. So an outage costs a caller one bounded
wait, and a mere hiccup (our own event loop may have stalled) a few milliseconds without metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outrider.metadata.counters import StoreCounters
from outrider.metadata.timeouts import BACKGROUND_TIMEOUT_S, CALL_TIMEOUT_S

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CONNECTIONS = 8
_MIN_RETRY_S = 0.02
_MAX_RETRY_S = 1.0


class RedisLink:
    """Owned by one event loop. `close` it."""

    def __init__(self, url: str, counters: StoreCounters, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Does not connect yet. Raises ValueError for a URL that is none."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            # Bounded here instead, for the client does it with wait_for, which in Python 3.11 can swallow a
            # cancellation: that of our own timeout too.
            socket_timeout=None,
            socket_connect_timeout=BACKGROUND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self.available = True
        """False once the server was asked again in vain. Callers need not look: calls fail fast by themselves."""
        self.on_recovery: list[Callable[[], None]] = []
        """Called when the server answers again after it was away."""
        self._redis: Redis = Redis(connection_pool=pool)
        self._counters = counters
        self._call_timeout_s = call_timeout_s
        self._refusals: set[str] = set()
        self._recovery: asyncio.Task[None] | None = None

    async def call(self, work: Callable[[Redis], Awaitable[T]], timeout_s: float | None = None) -> T | None:
        """The work's result, or None when it could not be done in time. Whether it took effect is then unknown.

        Without `timeout_s`, somebody is waiting: the link's own bound for calls holds.
        """
        if self._recovery is not None:
            return None
        try:
            async with asyncio.timeout(self._call_timeout_s if timeout_s is None else timeout_s):
                return await work(self._redis)
        except (TimeoutError, redis.TimeoutError) as error:
            self._counters.num_timeouts += 1
            self._suspend(error)
        except (redis.ConnectionError, OSError) as error:
            self._suspend(error)
        except redis.RedisError as error:
            # It answers, only not as we would like: read-only, out of memory, a key of somebody else's.
            self._refused(error)
        return None

    async def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._recovery
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def _refused(self, error: redis.RedisError) -> None:
        self._counters.num_refused += 1
        kind = _kind(error)
        if kind not in self._refusals:
            self._refusals.add(kind)
            logger.warning("metadata store refuses a command (%s); further ones are only counted", kind)

    def _suspend(self, error: Exception) -> None:
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(error), name="metadata-recovery")

    async def _recover(self, error: Exception) -> None:
        lost_s = time.monotonic()
        delay_s = _MIN_RETRY_S
        while not await self._answers():
            if self.available:
                self.available = False
                self._counters.num_outages += 1
                logger.warning("metadata store is away (%s): going on with what is known", _kind(error))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
        self._recovery = None
        if not self.available:
            self.available = True
            logger.warning("metadata store is back after %.1f s", time.monotonic() - lost_s)
            for callback in self.on_recovery:
                callback()

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
                await self._redis.ping()
        except (TimeoutError, redis.RedisError, OSError):
            return False
        return True


def _kind(error: Exception) -> str:
    """What happened, without the URL and its password."""
    return type(error).__name__
