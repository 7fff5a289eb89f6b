"""A trace as plain figures: what the table shows and what programs read. Pure. Times are milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.rpc.enums import value_name
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.cli.show.trace.tokens import printable, sources_of

_SUMMED = (
    *("drafted", "verified", "accepted", "dropped_stale", "tokens"),
    *("round_ms", "wait_ms", "queue_ms", "prefill_ms", "verify_ms", "draft_queue_ms", "draft_ms", "wire_ms"),
)


def trace_row(part: trace.RequestTrace) -> dict[str, Any]:
    """One call to one router, rounds and events included."""
    return {
        "request_id": part.request_id,
        "trace_id": part.trace_id,
        "tenant": part.tenant,
        "model": part.model,
        "router": part.router_id,
        "started_unix_ms": part.started_unix_us // 1000,
        "speculation": value_name(router.SpeculationMode.DESCRIPTOR, part.speculation),
        "verification": value_name(sequence.VerificationMode.DESCRIPTOR, part.mode),
        "temperature": round(part.temperature, 6),
        "prompt_tokens": part.prompt_tokens,
        "cached_tokens": part.cached_tokens,
        "resumed_tokens": part.resumed_tokens,
        "output_tokens": part.output_tokens,
        "state": state(part),
        "duration_ms": _ms(part.duration_us),
        "time_to_first_token_ms": _ms(part.rounds[0].at_us) if part.rounds else None,
        "placing_ms": _ms(part.placing_us),
        "drafted": part.metrics.num_draft_tokens,
        "verified": part.metrics.num_verified_tokens,
        "accepted": part.metrics.num_accepted_draft_tokens,
        "dropped_stale": part.metrics.num_dropped_draft_tokens,
        "num_rounds": part.metrics.num_steps,
        "num_rounds_omitted": part.num_rounds_omitted,
        "events": [event_row(event) for event in part.events],
        "rounds": [round_row(index, one) for index, one in enumerate(part.rounds)],
    }


def round_row(index: int, one: trace.RoundTrace) -> dict[str, Any]:
    """One round. `queue_ms` leaves out the wait for a draft, which `wait_ms` is."""
    timing = one.timing
    return {
        "round": index,
        "position": one.base_len,
        "drafted": one.num_drafted,
        "verified": one.num_verified,
        "accepted": one.num_accepted,
        "dropped_stale": one.num_dropped,
        "tokens": one.num_tokens,
        "round_ms": _ms(timing.round_us),
        "wait_ms": _ms(timing.wait_us),
        "queue_ms": _ms(timing.queue_us - timing.wait_us),
        "prefill_ms": _ms(timing.prefill_us),
        "verify_ms": _ms(timing.verify_us),
        "draft_queue_ms": _ms(max(0, timing.draft_us - timing.compute_us)),
        "draft_ms": _ms(timing.compute_us),
        "wire_ms": _ms(timing.wire_us),
        "draft_source": one.source,
        "sources": [source_row(each) for each in one.sources],
        "token_sources": sources_of(one),
        "max_draft_tokens": one.max_draft_tokens,
        "max_wait_ms": _ms(one.max_wait_us),
        "batch_sequences": one.batch_sequences,
        "batch_tokens": one.batch_tokens,
        "chances": [round(chance / 255, 3) for chance in one.chances],
        "answer_ms": _ms(one.answer_us),
        "answer_draft_ms": _ms(one.answer_compute_us),
        "answer_tokens": one.answer_tokens,
        "at_ms": _ms(one.at_us),
        "token_ids": list(one.token_ids),
        "rejected_token_ids": list(one.rejected_token_ids),
    }


def source_row(one: sequence.SourceTokens) -> dict[str, Any]:
    """A draft worker's source and one of the target itself may have the same name."""
    return {
        "source": one.source,
        "made_by": "target" if one.own else "draft",
        "drafted": one.num_drafted,
        "verified": one.num_verified,
        "accepted": one.num_accepted,
    }


def by_source(rounds: Iterable[trace.RoundTrace]) -> dict[str, list[int]]:
    """Tokens of each source: drafted, verified, accepted."""
    sums: dict[str, list[int]] = {}
    for each in (each for one in rounds for each in one.sources):
        counts = each.num_drafted, each.num_verified, each.num_accepted
        name = printable(each.source)
        sums[name] = [a + b for a, b in zip(sums.get(name, [0, 0, 0]), counts, strict=True)]
    return sums


def event_row(event: trace.TraceEvent) -> dict[str, Any]:
    return {
        "at_ms": _ms(event.at_us),
        "position": event.position,
        "event": value_name(trace.TraceEventKind.DESCRIPTOR, event.kind),
        "role": value_name(worker.WorkerRole.DESCRIPTOR, event.role),
        "worker": event.worker_id,
        "model": event.model,
        "reason": event.reason,
    }


def state(part: trace.RequestTrace) -> str:
    """running, how it finished, or the reason for which it broke off."""
    if part.finish_reason:
        return value_name(sequence.FinishReason.DESCRIPTOR, part.finish_reason)
    return "running" if part.running else part.error


def totals(rounds: Iterable[trace.RoundTrace]) -> dict[str, Any]:
    """Sums over the rounds given; durations and counts only."""
    rows = [round_row(0, one) for one in rounds]
    return {name: sum(row[name] for row in rows) for name in _SUMMED}


def _ms(us: int) -> float:
    return us / 1000
