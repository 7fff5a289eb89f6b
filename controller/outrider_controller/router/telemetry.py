"""What the router tells operators: counters, log lines and the shared events stream. Token ids appear in none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from outrider.errors import OutriderError
from outrider.protocol.rounds import Round
from outrider.telemetry.metrics import RouterMetrics
from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider_controller.router.admission import Request
from outrider_controller.router.failover import Fault, Loss

log = logging.getLogger(__name__)

_MAX_PENDING_EVENTS = 256


class EventStream(Protocol):
    """The part of the metadata store that takes events."""

    async def emit(self, kind: str, fields: Mapping[str, str | int | float | bool]) -> None: ...


class RouterTelemetry:
    """One per router; its methods never wait. `async with` it: events are written by a task of its own."""

    def __init__(self, registry: CollectorRegistry, events: EventStream) -> None:
        self._metrics = RouterMetrics(registry)
        self._late = Counter(
            "outrider_late_replies", "Replies about sequences no longer open there.", ["role"], registry=registry
        )
        self._running = Gauge("outrider_router_requests_running", "Requests this router carries.", registry=registry)
        self._events = events
        self._pending: asyncio.Queue[tuple[str, dict[str, str | int]]] = asyncio.Queue(_MAX_PENDING_EVENTS)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RouterTelemetry:
        self._task = asyncio.create_task(self._write_events(), name="events writer")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def rounds(self, done: list[Round]) -> None:
        """Those of one engine step."""
        phases, queue, other, draft = self._metrics.phases, [], [], []
        for one in done:
            queue.append(one.queue_us / 1e6)
            other.append(max(0, one.round_us - one.queue_us - one.verify_us) / 1e6)
            if one.num_drafted:
                draft.append(one.draft_us / 1e6)
        phases.observe_same("verify", done[0].verify_us / 1e6, len(done))
        phases.observe("queue", queue)
        phases.observe("other", other)
        phases.observe("draft", draft)

    def late_reply(self, role: str) -> None:
        self._late.labels(role).inc()

    def running(self, count: int) -> None:
        self._running.set(count)

    def rejected(self, tenant: str, error: OutriderError) -> None:
        """A request ended before its first token."""
        self._metrics.rejected(tenant, error.reason or "UNKNOWN")

    def failover(self, role: str) -> None:
        """A sequence was opened again."""
        self._metrics.failover(role)

    def revision_changed(self, worker_id: str, request: Request, before: str, after: str) -> None:
        """An answer goes on with the same weights in another arithmetic."""
        log.warning("a request goes on as %s, no longer as %s", after, before, extra=_of(request, worker_id))
        self._event("revision_changed", worker_id, request, f"{before} to {after}")

    def lost_target(self, worker_id: str, request: Request, fault: Fault, why: str) -> None:
        log.warning("a target lost a request: %s", why, extra=_of(request, worker_id))
        self._event("target_lost", worker_id, request, fault.value)

    def lost_draft(self, worker_id: str, request: Request, loss: Loss, why: str) -> None:
        log.warning("a draft lost a request: %s", why, extra=_of(request, worker_id))
        self._metrics.fallback(loss.value)
        self._event("draft_lost", worker_id, request, loss.value)

    def _event(self, kind: str, worker_id: str, request: Request, reason: str) -> None:
        fields: dict[str, str | int] = {
            "worker_id": worker_id,
            "request_id": request.request_id,
            "model": request.model,
            "reason": reason,
        }
        # Full: the store is slow. Events are for people; requests do not wait for them.
        with suppress(asyncio.QueueFull):
            self._pending.put_nowait((kind, fields))

    async def _write_events(self) -> None:
        while True:
            kind, fields = await self._pending.get()
            try:
                await self._events.emit(kind, fields)
            except ValueError as error:
                log.error("event %s not written: %s", kind, error)


def _of(request: Request, worker_id: str) -> dict[str, str]:
    """The fields of a line about a request."""
    return {"request_id": request.request_id, "tenant": request.tenant, "worker": worker_id}
