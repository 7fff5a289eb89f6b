"""The router's counters, log lines and entries in the shared events stream. None contains token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import OutriderError
from outrider.metadata.event_writer import EventStream, EventWriter
from outrider.metadata.events import EventKind
from outrider.protocol.rounds import Round
from outrider.telemetry.metrics import PHASES, STEP_BUCKETS_S, Durations, LabelCap
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.failover import Fault, Loss

log = logging.getLogger(__name__)


class RouterTelemetry:
    """One per router; its methods never wait. Events are written while `events` is running."""

    def __init__(self, registry: CollectorRegistry, events: EventStream) -> None:
        self._phases = Durations(
            registry, "outrider_round_duration_seconds", "Parts of one speculation round.", "phase", PHASES
        )
        self._fallbacks = Counter(
            "outrider_fallback", "Requests that went on without a draft, by reason.", ["reason"], registry=registry
        )
        self._failovers = Counter(
            "outrider_failover", "Sequences opened again on another worker.", ["role"], registry=registry
        )
        for role in ("target", "draft"):
            # 0 from the start: in a counter that begins with its first event, Prometheus sees no increase.
            self._failovers.labels(role)
        self._rejected = Counter(
            "outrider_admission_rejected", "Requests refused before any token.", ["tenant", "reason"], registry=registry
        )
        self._queued = Gauge(
            "outrider_admission_queue_length",
            "Requests that wait for a target with room.",
            ["tenant", "model_name"],
            registry=registry,
        )
        self._waited = Histogram(
            "outrider_admission_queue_seconds",
            "Wait for a target with room, of requests that were admitted.",
            ["tenant"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._tenants = LabelCap(100)
        self._late = Counter(
            "outrider_late_replies", "Replies about sequences no longer open there.", ["role"], registry=registry
        )
        self._low_acceptance = Counter(
            "outrider_low_acceptance",
            "Requests with an acceptance of the last 200 verified draft tokens below one half or their floor.",
            ["tenant"],
            registry=registry,
        )
        self._attached = Counter(
            "outrider_attached_tokens",
            "Tokens that servers which take their requests themselves say that they served.",
            registry=registry,
        )
        self._running = Gauge("outrider_router_requests_running", "Requests this router carries.", registry=registry)
        self.events = EventWriter(events)

    def rounds(self, done: list[Round]) -> None:
        phases, verify_us = self._phases, done[0].verify_us
        phases.observe_same("verify", verify_us / 1e6, len(done))
        phases.observe("queue", [one.queue_us / 1e6 for one in done])
        phases.observe("other", [max(0, one.round_us - one.queue_us - verify_us) / 1e6 for one in done])
        phases.observe("draft", [one.draft_us / 1e6 for one in done if one.num_drafted])

    def attached_tokens(self, count: int) -> None:
        self._attached.inc(count)

    def late_reply(self, role: str) -> None:
        self._late.labels(role).inc()

    def running(self, count: int) -> None:
        self._running.set(count)

    def rejected(self, tenant: str, error: OutriderError) -> None:
        """A request ended before its first token."""
        self._rejected.labels(self._tenants(tenant), error.reason or "UNKNOWN").inc()

    @contextmanager
    def queued(self, tenant: str, model: str) -> Iterator[None]:
        """Counts a request as waiting for a place during the block."""
        with self._queued.labels(self._tenants(tenant), model).track_inprogress():
            yield

    def waited(self, tenant: str, model: str, seconds: float) -> None:
        """A request got its place after `seconds`."""
        self._queued.labels(self._tenants(tenant), model)  # 0 from its first request on, not absent until one waits
        self._waited.labels(self._tenants(tenant)).observe(seconds)

    def failover(self, role: str) -> None:
        """A sequence was opened again on another worker."""
        self._failovers.labels(role).inc()

    def revision_changed(self, worker_id: str, request: Request, before: str, after: str) -> None:
        """An answer continues with the same weights in another arithmetic."""
        log.warning("a request goes on as %s, no longer as %s", after, before, extra=_of(request, worker_id))
        self._event(EventKind.REVISION_CHANGED, worker_id, request, f"{before} to {after}")

    def lost_target(self, worker_id: str, request: Request, fault: Fault, why: str) -> None:
        log.warning("a target lost a request: %s", why, extra=_of(request, worker_id))
        self._event(EventKind.TARGET_LOST, worker_id, request, fault.value)

    def lost_draft(self, worker_id: str, request: Request, loss: Loss, why: str) -> None:
        log.warning("a draft lost a request: %s", why, extra=_of(request, worker_id))
        self._fallbacks.labels(loss.value).inc()
        self._event(EventKind.DRAFT_LOST, worker_id, request, loss.value)

    def low_acceptance(self, draft_id: str, request: Request, acceptance: float | None) -> None:
        """Of a request's last 200 verified tokens the target accepted fewer than half, or than the tenant's floor."""
        log.warning("the target accepts few drafted tokens: %.2f of 200", acceptance, extra=_of(request, draft_id))
        self._low_acceptance.labels(self._tenants(request.tenant)).inc()
        self._event(EventKind.WINDOW_BELOW_FLOOR, draft_id, request, f"{acceptance:.2f} of the last 200")

    def _event(self, kind: EventKind, worker_id: str, request: Request, reason: str) -> None:
        fields = {"worker_id": worker_id, "tenant": request.tenant, "model": request.model, "reason": reason}
        self.events.emit(kind, fields, request_id=request.request_id)


def _of(request: Request, worker_id: str) -> dict[str, str]:
    """The fields of a log line about a request."""
    return {"request_id": request.request_id, "tenant": request.tenant, "worker": worker_id}
