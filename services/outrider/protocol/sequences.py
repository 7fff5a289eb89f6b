"""A sequence's spec in messages: read from a RouteRequest or an OpenSequence, which name most fields alike, and written
to an OpenSequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from outrider.errors import InvalidRequest
from outrider.limits import MAX_STOP_TOKENS
from outrider.options.logprobs import LogprobsOptions
from outrider.protocol import convert, logprobs
from outrider.rpc.v1 import router_pb2, sequence_pb2
from outrider.sequence.spec import SampleConsent, SequenceSpec
from outrider.sequence.speculation import Speculation

_Spec = TypeVar("_Spec", bound=SequenceSpec)


def spec_from_proto(
    kind: type[_Spec], message: router_pb2.RouteRequest | sequence_pb2.OpenSequence, **more: Any
) -> _Spec:
    """`more`: what is not the same in both messages. Raises InvalidRequest for a value that none may have."""
    if message.samples not in sequence_pb2.SampleConsent.values():
        raise InvalidRequest("samples", f"{message.samples} is not a consent")
    if (num_stops := len(message.stopping.stop_token_ids)) > MAX_STOP_TOKENS:
        raise InvalidRequest("stopping.stop_token_ids", f"must be at most {MAX_STOP_TOKENS}, got {num_stops}")
    return kind(
        prompt=tuple(message.prompt_token_ids),
        params=convert.sampling_from_proto(message.sampling),
        max_new_tokens=message.stopping.max_new_tokens,
        stop_token_ids=frozenset(message.stopping.stop_token_ids),
        logits=convert.logits_from_proto(message.logits) if message.HasField("logits") else None,
        logprobs=_logprobs(message),
        prediction=tuple(message.predicted_token_ids),
        request_id=message.request_id,
        tenant=message.tenant,
        samples=SampleConsent(message.samples),
        consent_unix_us=message.consent_unix_us,
        **more,
    )


def opening_for_draft(
    spec: SequenceSpec, sequence_id: int, committed: Sequence[int], speculation: Speculation
) -> sequence_pb2.OpenSequence:
    """What a draft worker is sent. Raises ValueError for a token id that no message can hold."""
    return sequence_pb2.OpenSequence(
        sequence_id=sequence_id,
        prompt_token_ids=spec.prompt,
        committed_token_ids=committed,
        sampling=convert.sampling_to_proto(spec.params),
        stopping=sequence_pb2.Stopping(max_new_tokens=spec.max_new_tokens, stop_token_ids=sorted(spec.stop_token_ids)),
        mode=convert.mode_to_proto(spec.mode),
        speculation=speculation_to_proto(speculation),
        cache_salt=spec.salt,
        request_id=spec.request_id,
        tenant=spec.tenant,
    )


def opening_for_target(
    spec: SequenceSpec,
    sequence_id: int,
    committed: Sequence[int],
    speculation: Speculation,
    draft: sequence_pb2.DraftAssignment | None,
) -> sequence_pb2.OpenSequence:
    message = opening_for_draft(spec, sequence_id, committed, speculation)
    more = sequence_pb2.OpenSequence(
        logits=None if spec.logits is None else convert.logits_to_proto(spec.logits),
        logprobs=None if spec.logprobs is None else logprobs.options_to_proto(spec.logprobs),
        predicted_token_ids=spec.prediction,
        draft=draft,
        samples=sequence_pb2.SampleConsent.ValueType(spec.samples),
        consent_unix_us=spec.consent_unix_us,
    )
    message.MergeFrom(more)
    return message


def speculation_to_proto(speculation: Speculation) -> sequence_pb2.Speculation:
    return sequence_pb2.Speculation(
        max_draft_tokens=speculation.max_draft_tokens,
        max_wait_us=speculation.max_wait_us,
        weight=speculation.weight,
        max_own_draft_tokens=speculation.max_own_draft_tokens,
        min_chance=speculation.min_chance,
    )


def _logprobs(message: router_pb2.RouteRequest | sequence_pb2.OpenSequence) -> LogprobsOptions | None:
    if not message.HasField("logprobs"):
        return None
    return logprobs.options_from_proto(message.logprobs, len(message.prompt_token_ids))
