"""Converts messages to the worker's events, and its reports to messages. Every field is checked here, even if a peer
did.

An invalid message about one sequence becomes an event about that sequence; `events_of` does not raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.drafting.source import DraftAssignment
from outrider.limits import to_us
from outrider.protocol import convert, logprobs
from outrider.protocol.errors import to_sequence_error
from outrider.protocol.rounds import sources_to_proto
from outrider.protocol.sequences import spec_from_proto
from outrider.rpc.v1 import sequence_pb2, target_pb2
from outrider.sequence.spec import SampleConsent, SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.requests.events import Adjusted, Event
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.worker.events import Closed, Opened, SequenceKey, translated


def events_of(request: target_pb2.VerifyRequest, stream: int, limits: Limits, now_s: float) -> Iterator[Event]:
    """The events of a request, in the order of its fields."""
    for opening in request.opens:
        key = SequenceKey(stream, opening.sequence_id)
        yield translated(key, partial(_opened, key, opening, limits, now_s))
    for setting in request.settings:
        key = SequenceKey(stream, setting.sequence_id)
        yield translated(key, partial(_adjusted, key, setting, limits))
    for close in request.closes:
        yield Closed(SequenceKey(stream, close.sequence_id))


def _opened(key: SequenceKey, message: sequence_pb2.OpenSequence, limits: Limits, now_s: float) -> Opened:
    return Opened(key, spec_of(message, limits), now_s)


def _adjusted(key: SequenceKey, message: sequence_pb2.SetSpeculation, limits: Limits) -> Adjusted:
    return Adjusted(key, speculation_of(message.speculation, limits))


def spec_of(message: sequence_pb2.OpenSequence, limits: Limits) -> SequenceSpec:
    """Raises InvalidRequest."""
    spec = spec_from_proto(
        SequenceSpec,
        message,
        committed=tuple(message.committed_token_ids),
        mode=convert.mode_from_proto(message.mode),
        speculation=speculation_of(message.speculation, limits),
        salt=message.cache_salt,
    )
    limits.check(spec)
    return spec if limits.samples else replace(spec, samples=SampleConsent.OFF)


def speculation_of(message: sequence_pb2.Speculation, limits: Limits) -> Speculation:
    """Raises InvalidRequest."""
    speculation = Speculation(
        max_draft_tokens=message.max_draft_tokens,
        max_wait_us=message.max_wait_us,
        weight=message.weight or 1.0,
        # As many as this target verifies: no draft worker has to agree.
        max_own_draft_tokens=min(message.max_own_draft_tokens, limits.max_draft_tokens),
    )
    speculation.check(limits.max_draft_tokens)
    return speculation


def assignment_of(message: sequence_pb2.DraftAssignment) -> DraftAssignment | None:
    """None for one that names no draft."""
    if not message.address:
        return None
    return DraftAssignment(message.worker_id, message.address, message.sequence_id)


def response_of(report: TargetReport) -> dict[int, target_pb2.VerifyResponse]:
    """One message for each stream that the report concerns."""
    responses: dict[int, target_pb2.VerifyResponse] = {}

    def to(key: SequenceKey) -> target_pb2.VerifyResponse:
        if key.stream not in responses:
            responses[key.stream] = empty_response(report)
        return responses[key.stream]

    for committed in report.commits:
        to(committed.key).commits.append(_commit(committed))
    for failed in report.failures:
        to(failed.key).errors.append(to_sequence_error(failed.key.sequence_id, failed.error))
    for key, times in report.removed:
        if share_us := to_us(times.share_s):
            to(key).usage.add(sequence_id=key.sequence_id, share_us=share_us)
    return responses


def empty_response(report: TargetReport) -> target_pb2.VerifyResponse:
    """Reports only that a step has ended."""
    return target_pb2.VerifyResponse(
        step_us=report.step_us,
        batch_sequences=report.batch_sequences,
        batch_tokens=report.batch_tokens,
        row_price=report.row_price,
        best_chance=report.best_chance,
    )


def _commit(committed: StepRow[Any]) -> sequence_pb2.Commit:
    times = committed.times
    return sequence_pb2.Commit(
        sequence_id=committed.key.sequence_id,
        base_len=committed.base_len,
        token_ids=committed.token_ids,
        num_drafted=committed.num_drafted,
        num_verified=committed.num_verified,
        num_accepted=committed.num_accepted,
        finish_reason=sequence_pb2.FinishReason.ValueType(committed.finish.value),
        num_dropped=committed.num_dropped,
        queue_us=to_us(times.queue_s),
        wait_us=to_us(times.wait_s),
        prefill_us=to_us(times.prefill_s),
        num_cached_tokens=committed.num_cached_tokens,
        rejected_token_ids=committed.rejected,
        draft_stats=committed.draft_stats,
        logprobs=logprobs.to_proto(committed.logprobs),
        prompt_logprobs=logprobs.to_proto(committed.prompt_logprobs),
        share_us=to_us(times.share_s),
        wasted_us=to_us(times.wasted_s),
        chances=committed.chances,
        drafted_us=to_us(times.drafted_s),
        num_branch_tokens=committed.num_branch_tokens,
        **_sources(committed),
    )


def _sources(committed: StepRow[Any]) -> dict[str, Any]:
    """Nothing where the other fields say it all."""
    sources, stats = committed.sources, committed.draft_stats
    drafted_by = None if stats is None else (stats.source, False)
    if not committed.num_branch_tokens and [one[:2] for one in sources] == [drafted_by]:
        return {}
    token_sources = committed.token_sources if len(sources) > 1 else ()
    return {"sources": sources_to_proto(sources), "token_sources": token_sources}
