"""A finished request as OpenTelemetry spans: the request; below it queue, prefill and every round; below a round the
work of its draft and its target.

Spans are made when the request has ended, on a thread of their own, off the path of the tokens. Neither text nor token
ids are recorded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.telemetry.tracing import Tracing, parent_of

from outrider_controller.router.observe.tracing import KeptTrace
from outrider_controller.router.request.checks import Request

log = logging.getLogger(__name__)

_MAX_PENDING = 256

Attributes = Mapping[str, str | int | float | bool | list[str]]


class SpanWriter:
    def __init__(self, tracing: Tracing) -> None:
        self.num_dropped = 0
        """Requests without spans, because too many others were waiting for theirs."""
        self._tracing = tracing
        self._pool = ThreadPoolExecutor(1, "spans")
        self._room = threading.BoundedSemaphore(_MAX_PENDING)

    def ended(self, ended: KeptTrace, request: Request) -> None:
        """Never blocks."""
        if not self._room.acquire(blocking=False):
            self.num_dropped += 1
            return
        self._pool.submit(self._write, ended, request)

    def close(self) -> None:
        """Blocks until everything is sent."""
        self._pool.shutdown()
        self._tracing.close()

    def _write(self, ended: KeptTrace, request: Request) -> None:
        try:
            write_spans(self._tracing.tracer, ended.message(), request)
        except Exception as error:
            about = {"request_id": request.request_id, "tenant": request.tenant}
            log.error("no spans for a request: %s", type(error).__name__, exc_info=error, extra=about)
        finally:
            self._room.release()


def write_spans(tracer: Tracer, ended: trace.RequestTrace, request: Request) -> None:
    """Writes all spans of one request, as children of the caller's span."""
    start_us = ended.started_unix_us
    span = tracer.start_span(
        f"route {ended.model}",
        parent_of(request.trace_context),
        SpanKind.SERVER,
        _request_attributes(ended, request),
        start_time=start_us * 1000,
    )
    if span.is_recording():
        for event in ended.events:
            span.add_event(_event_name(event), _event_attributes(event), (start_us + event.at_us) * 1000)
        if ended.error:
            span.set_status(Status(StatusCode.ERROR, ended.error))
        _write_phases(tracer, span, ended)
    span.end((start_us + ended.duration_us) * 1000)


def _write_phases(tracer: Tracer, parent: Span, ended: trace.RequestTrace) -> None:
    def child(under: Span, name: str, from_us: int, to_us: int, attributes: Attributes) -> Span:
        context, start_us = set_span_in_context(under), ended.started_unix_us
        span = tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=(start_us + from_us) * 1000)
        span.end((start_us + to_us) * 1000)
        return span

    def work(under: Span, one: trace.RoundTrace, begun_us: int) -> None:
        """Spans of the workers, by their own durations. A draft's span ends at the latest where verification begins."""
        verify_us = max(begun_us, one.at_us - one.timing.verify_us)
        workers = _workers_at(ended, one.at_us)
        # What the target looks up itself is part of its step.
        if any(not each.own for each in one.sources):
            drafted_us = min(verify_us, begun_us + one.timing.draft_us)
            at_draft = _at(workers, worker.WORKER_ROLE_DRAFT)
            child(under, "draft", max(0, drafted_us - one.timing.draft_us), drafted_us, at_draft)
        child(under, "verify", verify_us, one.at_us, _at(workers, worker.WORKER_ROLE_TARGET))

    for index, one in enumerate(ended.rounds):
        begun_us = max(0, one.at_us - one.timing.round_us)
        if index == 0:
            # The step that decides the first token also runs the last part of the prompt.
            prefill_us = max(begun_us, one.at_us - one.timing.prefill_us - one.timing.verify_us)
            child(parent, "queue", 0, prefill_us, {"outrider.placing_seconds": ended.placing_us / 1e6})
            span = child(parent, "prefill", prefill_us, one.at_us, round_attributes(index, one))
            work(span, one, prefill_us)
        else:
            span = child(parent, "round", begun_us, one.at_us, round_attributes(index, one))
            work(span, one, begun_us)


def _workers_at(ended: trace.RequestTrace, at_us: int) -> dict[int, str]:
    """By role, the id of the worker that had the request at `at_us`."""
    found: dict[int, str] = {}
    for event in ended.events:
        if event.at_us <= at_us and event.kind == trace.TRACE_EVENT_KIND_OPENED:
            found[event.role] = event.worker_id
    return found


def _at(workers: Mapping[int, str], role: int) -> Attributes:
    return {"outrider.worker": workers[role]} if role in workers else {}


def round_attributes(index: int, one: trace.RoundTrace) -> Attributes:
    """What `outrider trace` shows of a round, except the tokens. Times are in seconds."""
    timing = one.timing
    return {
        "outrider.round.index": index,
        "outrider.round.position": one.base_len,
        "outrider.round.tokens": one.num_tokens,
        "outrider.round.max_draft_tokens": one.max_draft_tokens,
        "outrider.round.drafted": one.num_drafted,
        "outrider.round.verified": one.num_verified,
        "outrider.round.accepted": one.num_accepted,
        "outrider.round.dropped": one.num_dropped,
        "outrider.round.draft_source": one.source,
        "outrider.round.batch_sequences": one.batch_sequences,
        "outrider.round.wait_seconds": timing.wait_us / 1e6,
        "outrider.round.draft_queue_seconds": max(0, timing.draft_us - timing.compute_us) / 1e6,
        "outrider.round.draft_seconds": timing.compute_us / 1e6,
        "outrider.round.wire_seconds": timing.wire_us / 1e6,
        "outrider.round.queue_seconds": (timing.queue_us - timing.wait_us) / 1e6,
        "outrider.round.prefill_seconds": timing.prefill_us / 1e6,
        "outrider.round.verify_seconds": timing.verify_us / 1e6,
    }


def _request_attributes(ended: trace.RequestTrace, request: Request) -> Attributes:
    params, sums = request.params, ended.metrics
    attributes: dict[str, str | int | float | bool | list[str]] = {
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "outrider.router": ended.router_id,
        "outrider.tenant": ended.tenant,
        "outrider.speculation": _name(router.SpeculationMode.Name(ended.speculation), "SPECULATION_MODE_"),
        "outrider.verification_mode": _name(sequence.VerificationMode.Name(ended.mode), "VERIFICATION_MODE_"),
        "outrider.resumed_tokens": ended.resumed_tokens,
        "outrider.rounds": sums.num_steps,
        "outrider.drafted_tokens": sums.num_draft_tokens,
        "outrider.verified_tokens": sums.num_verified_tokens,
        "outrider.accepted_tokens": sums.num_accepted_draft_tokens,
        "outrider.dropped_tokens": sums.num_dropped_draft_tokens,
        "outrider.target_failovers": sums.num_target_failovers,
        "outrider.draft_failovers": sums.num_draft_failovers,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if ended.finish_reason:
        reason = _name(sequence.FinishReason.Name(ended.finish_reason), "FINISH_REASON_")
        attributes["gen_ai.response.finish_reasons"] = [reason]
    if ended.error:
        attributes["error.type"] = ended.error
    return attributes


def _event_name(event: trace.TraceEvent) -> str:
    role = _name(worker.WorkerRole.Name(event.role), "WORKER_ROLE_")
    return f"outrider.{role}.{_name(trace.TraceEventKind.Name(event.kind), 'TRACE_EVENT_KIND_')}"


def _event_attributes(event: trace.TraceEvent) -> Attributes:
    where: dict[str, str | int] = {"outrider.worker": event.worker_id, "outrider.position": event.position}
    return {**where, "outrider.reason": event.reason} if event.reason else where


def _name(constant: str, prefix: str) -> str:
    return constant.removeprefix(prefix).lower()
