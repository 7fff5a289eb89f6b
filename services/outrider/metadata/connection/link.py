"""The connection to Redis, which may be unreachable or far away. Every call has a timeout, and fails at once while it
cannot succeed.

There are two kinds of calls. Those that a request waits for have 50 ms; background calls have a second. If the server
is slower than 50 ms, only the first kind fails, so leases are still written and read. If it does not answer at all,
both kinds return None at once. Meanwhile a task tries to reach the server, at first without delay, then at most every
second, until it is fast enough for both. So an outage costs a caller one bounded wait, and a short stall (perhaps of
our own event loop) a few milliseconds without metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import redis
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outrider.errors import Unavailable
from outrider.metadata.connection.address import open_pool
from outrider.metadata.connection.causes import (
    CLUSTER,
    NO_ANSWER,
    NO_ANSWER_TO_TLS,
    READ_ONLY,
    SENTINEL,
    SILENT,
    cause,
    lasts,
)
from outrider.metadata.connection.reading import MalformedError, Work
from outrider.metadata.connection.timeouts import BACKGROUND_TIMEOUT_S, CALL_TIMEOUT_S, StoreCounters
from outrider.runtime.supervision import stop

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NOT_UNDERSTOOD = "metadata store gives an answer that cannot be understood"
# What has answered is asked as it wants to be: no guess about TLS.
_HAS_ANSWERED = {SILENT: "it closes its connections"}
_MAX_CONNECTIONS = 8
_MIN_RETRY_S = 0.02
_MAX_RETRY_S = 1.0
_NUM_RECONNECTS = 3
_MAX_ANSWER_BYTES = 128 << 20
"""Well above the leases of a thousand workers."""
_REPORT_S = 60.0
"""How often the same refusal is logged."""
_READ_ONLY_S = 0.1
"""For so long no call reconnects, after reconnecting led to a server that takes no writes."""


class Answers(Enum):
    IN_TIME = "in time for all calls"
    LATE = "in time only for calls that nobody waits for"
    NOT = "not at all"


class _BoundedParser(_AsyncRESP2Parser):
    """The client's own has no bound: within a timeout a server can send gigabytes."""

    async def _read(self, length: int) -> bytes:
        if not 0 <= length <= _MAX_ANSWER_BYTES - self._pos:
            raise redis.InvalidResponse(f"{length} bytes in one answer")
        data: bytes = await super()._read(length)
        return data


class RedisLink:
    """Owned by one event loop. `close` it."""

    def __init__(self, url: str, counters: StoreCounters, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Does not connect yet. Raises ValueError for an invalid URL."""
        self._background_timeout_s = max(BACKGROUND_TIMEOUT_S, call_timeout_s)
        settings = {
            # This class sets timeouts instead, because the client uses wait_for, which in Python 3.11 can swallow a
            # cancellation, also that of our own timeout.
            "socket_timeout": None,
            "socket_connect_timeout": self._background_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "parser_class": _BoundedParser,
        }
        pool = open_pool(url, max_connections=_MAX_CONNECTIONS, settings=settings)
        self.available = True
        """False after a failed attempt to reach the server again. Callers need not check: calls fail at once anyway."""
        self.on_recovery: list[Callable[[], None]] = []
        """Called when the server answers again after an outage."""
        self._redis: Redis = Redis(connection_pool=pool)
        # A server without TLS waits for more of the first message.
        self._means = {NO_ANSWER: NO_ANSWER_TO_TLS} if url.startswith("rediss") else {}
        # Not every pool waits for a free connection.
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._counters = counters
        self._call_timeout_s = call_timeout_s
        self._reported: dict[str, float] = {}
        """What was logged, and when."""
        self._answers = Answers.IN_TIME
        self._recovery: asyncio.Task[None] | None = None
        self._reconnects_from_s = -math.inf

    async def call(self, work: Work[T]) -> T | None:
        """For calls that a request waits for: the result of `work`, or None if it took more than 50 ms.

        None does not say whether `work` took effect.
        """
        if self._answers is not Answers.IN_TIME:
            return None
        return await self._try(work, self._call_timeout_s, Answers.LATE)

    async def call_in_background(self, work: Work[T], waits_s: float = 0.0) -> T | None:
        """The same for calls that no request waits for, within a second. `waits_s`: for which the server may wait."""
        if self._answers is Answers.NOT:
            return None
        return await self._try(work, waits_s + self._background_timeout_s, Answers.NOT)

    async def require(self, work: Work[T]) -> T:
        """Like `call_in_background`, for work that never returns None. Raises Unavailable instead."""
        answer = await self.call_in_background(work)
        if answer is None:
            raise Unavailable("the metadata store does not answer", reason="NO_METADATA", retry_after_s=1.0)
        return answer

    async def problem(self) -> str | None:
        """Why this server can never be used as it is; None if it can, or does not answer. Logs what may pass. Within a
        second."""
        try:
            async with asyncio.timeout(self._background_timeout_s):
                faults = await self._faults()
        except Exception as error:
            if lasts(error):
                return cause(error)
            self._report("metadata store does not answer yet", self._cause(error))
            return None
        self._warn(faults)
        return next((fault for fault in faults if fault in (CLUSTER, SENTINEL)), None)

    async def _faults(self) -> list[str]:
        """HELLO is permitted to every user."""
        client: Any = self._redis
        hello = await client.execute_command("HELLO")
        if not isinstance(hello, list):
            return []
        said = {_text(name): _text(value) for name, value in zip(hello[::2], hello[1::2], strict=False)}
        faults = [{"cluster": CLUSTER, "sentinel": SENTINEL}.get(said.get("mode", ""), "")]
        faults += [READ_ONLY] if said.get("role") in ("replica", "slave") else []
        # Not every user may ask this.
        with contextlib.suppress(redis.RedisError):
            memory: Any = await self._redis.info("memory")
            policy = str(memory.get("maxmemory_policy", "noeviction"))
            if memory.get("maxmemory") and policy != "noeviction":
                faults.append(f"it drops leases and keys when its memory is full: its maxmemory-policy is {policy}")
        return [fault for fault in faults if fault]

    def _cause(self, error: Exception) -> str:
        why = cause(error)
        return self._means.get(why, why)

    def _warn(self, faults: list[str]) -> None:
        for fault in faults:
            self._report("metadata store is not as it has to be", fault)

    async def close(self) -> None:
        await stop(self._recovery)
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def leave_out(self, what: str) -> None:
        """Counts and reports what cannot be read of an answer whose other parts are used."""
        self._counters.num_malformed += 1
        self._report("metadata store has what cannot be read, and is left out", what)

    async def _try(self, work: Work[T], timeout_s: float, when_late: Answers) -> T | None:
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                answer = await self._on_primary(work)
                self._means = _HAS_ANSWERED
                return answer
        except (TimeoutError, redis.TimeoutError) as error:
            self._counters.num_timeouts += 1
            self._suspend(when_late, error)
        except (redis.ConnectionError, OSError) as error:
            self._suspend(Answers.NOT, error)
        except redis.RedisError as error:
            # The server answers with an error: read-only, out of memory, a key that another program has set.
            self._counters.num_refused += 1
            self._report("metadata store refuses a command", cause(error))
        except MalformedError as error:
            # One damaged record does not make it an outage.
            self._counters.num_malformed += 1
            self._report(_NOT_UNDERSTOOD, cause(error))
        except Exception as error:
            # The server may be something else than Redis and answer anything.
            self._report(_NOT_UNDERSTOOD, cause(error))
            self._suspend(Answers.NOT, error)
        return None

    async def _on_primary(self, work: Work[T]) -> T:
        """Behind one address another server may have become the primary. Connections lead to the old one until they
        are closed, and it refuses writes."""
        for _ in range(_NUM_RECONNECTS):
            try:
                return await work(self._redis)
            except redis.exceptions.ReadOnlyError:
                if time.monotonic() < self._reconnects_from_s:
                    raise
            # More than once, because a call beside this one may have returned a connection to the old one meanwhile.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
        self._reconnects_from_s = time.monotonic() + _READ_ONLY_S
        return await work(self._redis)

    def _report(self, problem: str, why: str) -> None:
        now_s = time.monotonic()
        if now_s - self._reported.get(why, -math.inf) >= _REPORT_S:
            self._reported[why] = now_s
            logger.warning("%s: %s", problem, why)

    def _suspend(self, answers: Answers, error: Exception) -> None:
        # Keep the worse state: a late answer does not show that a refused connection works again.
        if self._answers is not Answers.NOT:
            self._answers = answers
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(error), name="metadata-recovery")

    async def _recover(self, error: Exception) -> None:
        lost_s = time.monotonic()
        delay_s = _MIN_RETRY_S
        while (answers := await self._ask()) is not Answers.IN_TIME:
            self._answers = answers
            self._note(answers, error, lost_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
        self._answers, self._recovery = answers, None
        self._note(answers, error, lost_s)

    def _note(self, answers: Answers, error: Exception, lost_s: float) -> None:
        """Logs the loss and the return of the server, and calls `on_recovery` at its return."""
        if self.available is (answers is not Answers.NOT):
            return
        self.available = not self.available
        if not self.available:
            self._counters.num_outages += 1
            logger.warning("metadata store is away (%s): going on with what is known", self._cause(error))
            return
        logger.warning("metadata store is back after %.1f s", time.monotonic() - lost_s)
        for callback in self.on_recovery:
            try:
                callback()
            except Exception:
                # This task must continue, or all later calls fail.
                logger.exception("the return of the metadata store was not taken up")

    async def _ask(self) -> Answers:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._background_timeout_s):
                await self._redis.ping()
                took_s = time.monotonic() - started_s
                with contextlib.suppress(redis.RedisError):
                    # It may be another server than before.
                    self._warn(await self._faults())
        except Exception:
            # After any error, try again: only this task can end the outage.
            return Answers.NOT
        return Answers.IN_TIME if took_s < self._call_timeout_s else Answers.LATE


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
