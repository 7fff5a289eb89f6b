"""LogitsOptions between the wire and the code. What a peer sent is checked here."""

from __future__ import annotations

from outrider.errors import InvalidRequest
from outrider.options.logits import LogitsOptions
from outrider.rpc.v1 import sequence_pb2


def from_proto(message: sequence_pb2.LogitsOptions, *, field: str = "logits") -> LogitsOptions:
    """Raises InvalidRequest naming the field, such as `logits.biases`."""
    if len(message.bias_token_ids) != len(message.biases):
        counts = f"{len(message.biases)} for {len(message.bias_token_ids)} tokens"
        raise InvalidRequest(f"{field}.biases", f"must be one per token, got {counts}")
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
        raise InvalidRequest(f"{field}.{error.field}", error.message) from None


def to_proto(options: LogitsOptions) -> sequence_pb2.LogitsOptions:
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
