"""Converts between messages and the types that the code uses. Everything a peer sent is checked here.

Errors are `InvalidRequest` and name the field as the peer would write it, such as `sampling.top_p`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.options.logits import LogitsOptions
from outrider.options.sampling import DraftDistribution, SamplingParams, VerificationMode
from outrider.rpc.v1 import sequence_pb2

_MODES = {
    sequence_pb2.VERIFICATION_MODE_GREEDY: VerificationMode.GREEDY,
    sequence_pb2.VERIFICATION_MODE_COUPLED: VerificationMode.COUPLED,
    sequence_pb2.VERIFICATION_MODE_RATIO: VerificationMode.RATIO,
}
_VALUES = {mode: value for value, mode in _MODES.items()}


def sampling_from_proto(message: sequence_pb2.Sampling) -> SamplingParams:
    """Raises InvalidRequest naming the field, such as `sampling.temperature`."""
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.{error.field}", error.message) from None


def sampling_to_proto(params: SamplingParams) -> sequence_pb2.Sampling:
    """Rounds to single precision. The result of `sampling_from_proto` converts back without loss."""
    return sequence_pb2.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )


def mode_from_proto(value: sequence_pb2.VerificationMode.ValueType) -> VerificationMode:
    """Raises InvalidRequest for an unset or unknown mode."""
    mode = _MODES.get(value)
    if mode is None:
        raise InvalidRequest("mode", f"{value} is not a verification mode")
    return mode


def mode_to_proto(mode: VerificationMode) -> sequence_pb2.VerificationMode.ValueType:
    return _VALUES[mode]


def distributions_from_proto(messages: Sequence[sequence_pb2.DraftDistribution]) -> list[DraftDistribution]:
    """Raises InvalidRequest naming the field, such as `q[2].counts`."""
    found = []
    for index, message in enumerate(messages):
        try:
            found.append(DraftDistribution(tuple(message.token_ids), tuple(message.counts)))
        except InvalidRequest as error:
            raise InvalidRequest(f"q[{index}].{error.field}", error.message) from None
    return found


def distribution_to_proto(distribution: DraftDistribution) -> sequence_pb2.DraftDistribution:
    return sequence_pb2.DraftDistribution(token_ids=distribution.token_ids, counts=distribution.counts)


def logits_from_proto(message: sequence_pb2.LogitsOptions) -> LogitsOptions:
    """Raises InvalidRequest naming the field, such as `logits.biases`."""
    if len(message.bias_token_ids) != len(message.biases):
        counts = f"{len(message.biases)} for {len(message.bias_token_ids)} tokens"
        raise InvalidRequest("logits.biases", f"must be one per token, got {counts}")
    try:
        return LogitsOptions(
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty,
            logit_bias=tuple(zip(message.bias_token_ids, message.biases, strict=True)),
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=tuple(tuple(run.token_ids) for run in message.bad_words),
            min_tokens=message.min_tokens,
            grammar=message.grammar,
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"logits.{error.field}", error.message) from None


def logits_to_proto(options: LogitsOptions) -> sequence_pb2.LogitsOptions:
    return sequence_pb2.LogitsOptions(
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        bias_token_ids=[token_id for token_id, _ in options.logit_bias],
        biases=[bias for _, bias in options.logit_bias],
        allowed_token_ids=options.allowed_token_ids,
        bad_words=[sequence_pb2.TokenRun(token_ids=word) for word in options.bad_words],
        min_tokens=options.min_tokens,
        grammar=options.grammar,
    )
