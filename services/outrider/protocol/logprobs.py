"""Log probabilities on the wire. What a peer sent is checked here."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.options.logprobs import MAX_PROMPT_LOGPROBS, MAX_TOP_LOGPROBS, LogprobsOptions, TokenLogprobs
from outrider.rpc.v1 import router_pb2, sequence_pb2


def options_from_proto(message: sequence_pb2.LogprobsOptions, prompt_len: int) -> LogprobsOptions:
    """Raises InvalidRequest."""
    options = LogprobsOptions(message.num_top, message.prompt)
    if options.num_top > MAX_TOP_LOGPROBS:
        raise InvalidRequest("logprobs.num_top", f"must be at most {MAX_TOP_LOGPROBS}, got {options.num_top}")
    if options.num_of_prompt(prompt_len) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest("logprobs.prompt", f"more than {MAX_PROMPT_LOGPROBS} for a prompt of {prompt_len} tokens")
    return options


def options_to_proto(options: LogprobsOptions) -> sequence_pb2.LogprobsOptions:
    return sequence_pb2.LogprobsOptions(num_top=options.num_top, prompt=options.prompt)


def to_proto(logprobs: Sequence[TokenLogprobs]) -> list[sequence_pb2.TokenLogprobs]:
    return [
        sequence_pb2.TokenLogprobs(
            logprob=each.logprob, top_token_ids=each.top_token_ids, top_logprobs=each.top_logprobs
        )
        for each in logprobs
    ]


def check_commit(commit: sequence_pb2.Commit, asked: LogprobsOptions, prompt_len: int, vocab_size: int) -> None:
    """Raises InvalidRequest when they are not one per token, or when a value is impossible."""
    if len(commit.logprobs) != len(commit.token_ids):
        raise InvalidRequest("logprobs", f"{len(commit.logprobs)} for {len(commit.token_ids)} tokens")
    if commit.prompt_logprobs and not (asked.prompt and len(commit.prompt_logprobs) == prompt_len - 1):
        raise InvalidRequest("prompt_logprobs", f"{len(commit.prompt_logprobs)} for a prompt of {prompt_len} tokens")
    for name, messages in (("logprobs", commit.logprobs), ("prompt_logprobs", commit.prompt_logprobs)):
        for each in messages:
            count = len(each.top_token_ids)
            if count > asked.num_top or count != len(each.top_logprobs):
                raise InvalidRequest(name, f"{count} of the likeliest tokens where {asked.num_top} were asked for")
            if count and max(each.top_token_ids) >= vocab_size:
                raise InvalidRequest(name, f"an id is outside the vocabulary of {vocab_size}")
            # Written so that NaN fails too; and sums of single precision may end a little above 0.
            if not (each.logprob <= 1e-3 and all(value <= 1e-3 for value in each.top_logprobs)):
                raise InvalidRequest(name, "not a logarithm of a probability")


def pass_on(commit: sequence_pb2.Commit, response: router_pb2.RouteResponse) -> None:
    """Copies them from a target's commit to a response for a gateway."""
    response.logprobs.extend(commit.logprobs)
    response.prompt_logprobs.extend(commit.prompt_logprobs)
