"""Requests wait here until a target has room, and are refused with a retry-after when none has room in time.

Each router has one queue per model. `fair_queue` decides the order; this module knows how long each request may wait
and how much room the targets have.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.errors import Overloaded

from outrider_controller.router import tuning
from outrider_controller.router.admission.fair_queue import FairQueue, Room, Ticket
from outrider_controller.router.config import AdmissionConfig
from outrider_controller.router.fleet.fleet import Fleet, TargetLink
from outrider_controller.router.fleet.loads import MAX_REPORT_AGE_S
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.request.checks import Request

OnAccepted = Callable[[], None]

# Clients of the OpenAI API ignore a longer one.
_MAX_RETRY_S = 60.0
_MIN_RETRY_S = 0.05


def _ticket(request: Request, now_s: float) -> Ticket:
    return Ticket(request.tenant, request.weight, request.cost, now_s, request.expected_tokens)


@dataclass(slots=True)
class _Pool:
    """The targets of one model."""

    queue: FairQueue = field(default_factory=FairQueue)
    turns: dict[Ticket, asyncio.Future[None]] = field(default_factory=dict)
    """Those of the waiting requests."""


class AdmissionQueue:
    def __init__(self, config: AdmissionConfig, fleet: Fleet, telemetry: RouterTelemetry) -> None:
        self._config = config
        self._fleet = fleet
        self._telemetry = telemetry
        self._pools: dict[str, _Pool] = {}

    @property
    def num_waiting(self) -> int:
        return sum(pool.queue.num_waiting for pool in self._pools.values())

    @property
    def num_running(self) -> int:
        return sum(pool.queue.num_running for pool in self._pools.values())

    @asynccontextmanager
    async def place(
        self, request: Request, deadline_s: float | None, on_accepted: OnAccepted = lambda: None
    ) -> AsyncIterator[float]:
        """Waits for a place for one request, which it has during the block. Raises Overloaded.

        `on_accepted` is called once the request has a place or waits for one, but not if it is refused at once. The
        block gets the time, by the loop's clock, until which the request may look for a target with room. A request
        that another router has begun does not wait.
        """
        now_s = asyncio.get_running_loop().time()
        until_s = now_s + self._patience_s(deadline_s)
        pool = self._pools.setdefault(request.model, _Pool())
        ticket = _ticket(request, now_s)
        try:
            if request.begun:
                pool.queue.admit(ticket, now_s)
                on_accepted()
            else:
                await self._admitted(request, pool, ticket, until_s, on_accepted)
            yield until_s
        finally:
            pool.queue.leave(ticket, asyncio.get_running_loop().time())
            self._hand_out(request.model)

    def fleet_changed(self) -> None:
        for model in self._pools:
            self._hand_out(model)

    def retry_after_s(self, request: Request, ticket: Ticket | None = None) -> float:
        """Seconds until such a request may get a place. `ticket`: its own, if it has one."""
        ticket = ticket or _ticket(request, asyncio.get_running_loop().time())
        wait_s = self._pools[request.model].queue.wait_s(ticket)
        if wait_s is None:
            return self._config.retry_after_s
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s))

    def _patience_s(self, deadline_s: float | None) -> float:
        timeout_s = self._config.queue_timeout_s
        return timeout_s if deadline_s is None else min(timeout_s, tuning.WAIT_SHARE * deadline_s)

    async def _admitted(
        self, request: Request, pool: _Pool, ticket: Ticket, until_s: float, on_accepted: OnAccepted
    ) -> None:
        """Returns when the request has a place. Raises Overloaded."""
        wait_s = pool.queue.wait_s(ticket)
        pool.queue.put(ticket, ticket.arrived_s)
        self._hand_out(request.model)
        if ticket.admitted_s is None:
            if wait_s is not None and wait_s > tuning.WAIT_SHARE * (until_s - ticket.arrived_s):
                raise self._refusal(
                    request, ticket, f"{request.model!r} has more requests in the queue than can start in time"
                )
            with self._telemetry.queued(ticket.tenant, request.model):
                await self._turn(request, pool, ticket, until_s, on_accepted)
        else:
            on_accepted()
        self._telemetry.waited(ticket.tenant, request.model, asyncio.get_running_loop().time() - ticket.arrived_s)

    async def _turn(
        self, request: Request, pool: _Pool, ticket: Ticket, until_s: float, on_accepted: OnAccepted
    ) -> None:
        turn = pool.turns[ticket] = asyncio.get_running_loop().create_future()
        try:
            if pool.queue.num_waiting > self._config.max_queued:
                pool.turns[pool.queue.push_out()].cancel()
            if not turn.cancelled():
                on_accepted()
            async with asyncio.timeout_at(until_s):
                await asyncio.wait({turn})
        except TimeoutError:
            # It may have got its place in the same moment.
            if ticket.admitted_s is None:
                waited_s = asyncio.get_running_loop().time() - ticket.arrived_s
                message = f"{request.model!r} had no room within {waited_s:.1f} s"
                raise self._refusal(request, ticket, message, reason="QUEUE_TIMEOUT") from None
        finally:
            del pool.turns[ticket]
        if turn.cancelled():
            raise self._refusal(
                request, ticket, f"{self._config.max_queued} requests are in the queue already; it is full"
            )

    def _refusal(self, request: Request, ticket: Ticket, message: str, reason: str | None = None) -> Overloaded:
        return Overloaded(message, retry_after_s=self.retry_after_s(request, ticket), reason=reason)

    def _hand_out(self, model: str) -> None:
        pool = self._pools[model]
        if not pool.queue.num_waiting:
            return
        for ticket in pool.queue.take(self._room(model, pool.queue), asyncio.get_running_loop().time()):
            turn = pool.turns.get(ticket)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _room(self, model: str, queue: FairQueue) -> Room:
        """Room at the model's live targets. Without any, up to `max_sessions` requests may go on to wait for one."""
        most, targets = self._config.max_sessions, self._fleet.live_targets(model)
        limits = [(one, one.info.max_sequences or most) for one in targets]
        places = float(sum(limit for _, limit in limits)) if targets else float(most)
        elsewhere = sum(min(limit, self._fleet.loads.num_elsewhere(one)) for one, limit in limits)
        held = queue.num_running - self._fleet.num_leaving(model)
        free = min(places - elsewhere - held, most - self.num_running)
        tokens = sum(one.info.num_blocks * one.info.block_size or math.inf for one in targets) if targets else math.inf
        return Room(
            places=places,
            free=free,
            part=min(most, places / self._fleet.loads.num_routers),
            tokens=tokens,
            free_tokens=self._free_tokens(targets, tokens, queue, elsewhere, held),
        )

    def _free_tokens(
        self, targets: Sequence[TargetLink], tokens: float, queue: FairQueue, elsewhere: float, held: float
    ) -> float:
        """Free tokens in the targets' KV caches: the higher of two estimates.

        The first is made from the expected need of each request. It is never old, but too low where requests share a
        prefix. The second is made from the targets' reports, which count shared prefixes but are up to
        `MAX_REPORT_AGE_S` old; running answers are assumed to grow by half of their length.
        """
        needed = elsewhere * queue.means.cost + queue.held_tokens * held / max(1, queue.num_running)
        reported = sum(self._fleet.loads.of(one).num_free_blocks * one.info.block_size for one in targets)
        since_s = asyncio.get_running_loop().time() - MAX_REPORT_AGE_S
        return max(tokens - needed, reported - queue.held_output / 2 - queue.admitted_since(since_s))
