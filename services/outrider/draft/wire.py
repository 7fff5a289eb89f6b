"""Converts messages to the worker's events, and its reports to messages. Every field is checked here, even if a peer
did.

An invalid message about one sequence becomes an event about that sequence; `events_of` does not raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from outrider.draft import events
from outrider.draft.events import DraftReport, Event, Proposed
from outrider.drafting.source import Features
from outrider.errors import InvalidRequest
from outrider.limits import MAX_TREE_TOKENS, MAX_UINT32, to_us
from outrider.protocol.convert import (
    distribution_to_proto,
    mode_from_proto,
    sampling_to_proto,
)
from outrider.protocol.errors import to_sequence_error
from outrider.protocol.sequences import spec_from_proto
from outrider.rpc.v1 import draft_pb2, sequence_pb2
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import VerificationMode
from outrider.worker.events import Closed, Opened, SequenceKey, translated

_MAX_COMMITTED = MAX_TREE_TOKENS + 1
_MAX_BEYOND = 1 << 20


@dataclass(frozen=True, slots=True)
class ProposalLimits:
    """Bounds that every message is checked against."""

    max_context_len: int
    max_draft_tokens: int
    """Most tokens of one proposal. A router may request more; it gets this many."""


def events_of(request: draft_pb2.DraftRequest, stream: int, limits: ProposalLimits, now_s: float) -> Iterator[Event]:
    """The events of a request, in the order of its fields."""
    for opening in request.opens:
        key = SequenceKey(stream, opening.sequence_id)
        yield translated(key, partial(_opened, key, opening, limits, now_s))
    for commit in request.commits:
        key = SequenceKey(stream, commit.sequence_id)
        yield translated(key, partial(_committed, key, commit, limits, now_s))
    for setting in request.settings:
        key = SequenceKey(stream, setting.sequence_id)
        yield events.Limited(key, _allowed(setting.speculation, limits), now_s)
    for close in request.closes:
        yield Closed(SequenceKey(stream, close.sequence_id))


def _allowed(speculation: sequence_pb2.Speculation, limits: ProposalLimits) -> Speculation:
    """The requested limits, cut to this worker's."""
    count = min(speculation.max_draft_tokens, limits.max_draft_tokens)
    # Written so that NaN sets no limit.
    least = min(speculation.min_chance, 1.0) if speculation.min_chance > 0 else 0.0
    return Speculation(count, min_chance=least)


def _opened(key: SequenceKey, message: sequence_pb2.OpenSequence, limits: ProposalLimits, now_s: float) -> Opened:
    return Opened(key, spec_of(message, limits), now_s)


def _committed(
    key: SequenceKey, message: sequence_pb2.Commit, limits: ProposalLimits, now_s: float
) -> events.DraftCommitted:
    if (count := len(message.token_ids)) > _MAX_COMMITTED:
        raise InvalidRequest("token_ids", f"{count} in one commit; at most {_MAX_COMMITTED} are accepted")
    # A target's context may be longer than this worker's, which then proposes nothing.
    if message.base_len + count > limits.max_context_len + _MAX_BEYOND:
        raise InvalidRequest("base_len", f"{message.base_len} is far beyond the context of {limits.max_context_len}")
    finished = message.finish_reason != sequence_pb2.FINISH_REASON_UNSPECIFIED
    features, bits = None, message.feature_bits or 16
    if message.features:
        features = Features(message.features_start, message.features, bits)
    return events.DraftCommitted(key, message.base_len, tuple(message.token_ids), finished, now_s, features)


def spec_of(message: sequence_pb2.OpenSequence, limits: ProposalLimits) -> SequenceSpec:
    """Raises InvalidRequest."""
    spec = spec_from_proto(
        SequenceSpec,
        message,
        committed=tuple(message.committed_token_ids),
        mode=mode_from_proto(message.mode),
        speculation=_allowed(message.speculation, limits),
        salt=message.cache_salt,
    )
    # The target's vocabulary may have more padding than this model's: the drafter reads any id.
    spec.check(MAX_UINT32 + 1, limits.max_context_len)
    return spec


def responses_of(report: DraftReport, now_s: float) -> dict[int, draft_pb2.DraftResponse]:
    responses: dict[int, draft_pb2.DraftResponse] = {}
    for proposed in report.proposals:
        responses.setdefault(proposed.key.stream, draft_pb2.DraftResponse()).drafts.append(_draft(proposed, now_s))
    for failed in report.failures:
        error = to_sequence_error(failed.key.sequence_id, failed.error)
        responses.setdefault(failed.key.stream, draft_pb2.DraftResponse()).errors.append(error)
    for key, share_s in report.removed:
        usage = sequence_pb2.SequenceUsage(sequence_id=key.sequence_id, share_us=to_us(share_s))
        responses.setdefault(key.stream, draft_pb2.DraftResponse()).usage.append(usage)
    return responses


def _draft(proposed: Proposed, now_s: float) -> sequence_pb2.Draft:
    tree, ratio = proposed.tree, proposed.spec.mode is VerificationMode.RATIO
    taken_s = max(0.0, now_s - proposed.since_s)
    return sequence_pb2.Draft(
        sequence_id=proposed.key.sequence_id,
        epoch=proposed.epoch,
        base_len=tree.base_len,
        token_ids=tree.token_ids,
        parents=tree.parents,
        q=[distribution_to_proto(q) for q in tree.q],
        confidence=tree.chances,
        sampling=sampling_to_proto(proposed.spec.params) if ratio else None,
        source=tree.source,
        draft_us=to_us(taken_s),
        # The compute of a sequence that was catching up includes earlier commits.
        compute_us=to_us(min(taken_s, proposed.compute_s)),
        matched=tree.matched,
        share_us=to_us(proposed.share_s),
    )
