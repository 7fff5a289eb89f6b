"""Errors of one sequence or one call, as messages on a stream that continues. `rpc/status.py` has those that end an
RPC."""

from __future__ import annotations

import math

from outrider.errors import MAX_MESSAGE_CHARS, Code, InternalError, OutriderError, make_error
from outrider.limits import MAX_ERROR_NAME_CHARS
from outrider.rpc.v1 import router_pb2, sequence_pb2


def to_sequence_error(sequence_id: int, error: Exception) -> sequence_pb2.SequenceError:
    """The error as one sequence's own end on a worker's stream."""
    if not isinstance(error, OutriderError):
        # The message of an unforeseen error could quote a prompt, so only its type leaves the worker.
        error = InternalError(f"{type(error).__name__} in a step")
    return sequence_pb2.SequenceError(
        sequence_id=sequence_id,
        code=error.code,
        reason=error.reason or error.default_reason,
        field=error.field or "",
        message=error.message[:MAX_MESSAGE_CHARS],
    )


def from_sequence_error(message: sequence_pb2.SequenceError) -> OutriderError:
    """A worker's error about one sequence. An unknown code reads as UNKNOWN."""
    return make_error(
        Code(message.code),
        message.message[:MAX_MESSAGE_CHARS],
        reason=message.reason[:MAX_ERROR_NAME_CHARS] or None,
        field=message.field[:MAX_ERROR_NAME_CHARS] or None,
    )


def to_route_error(call_id: int, error: OutriderError) -> router_pb2.RouteError:
    """The error as one call's own end on a gateway's stream."""
    retry_after_s = error.retry_after_s
    return router_pb2.RouteError(
        call_id=call_id,
        code=error.code,
        reason=error.reason or error.default_reason,
        field=error.field or "",
        message=error.message[:MAX_MESSAGE_CHARS],
        retry_after_us=None if retry_after_s is None else math.ceil(retry_after_s * 1e6),
    )


def from_route_error(message: router_pb2.RouteError) -> OutriderError:
    """A router's error about one call. An unknown code reads as UNKNOWN."""
    return make_error(
        Code(message.code),
        message.message[:MAX_MESSAGE_CHARS],
        reason=message.reason[:MAX_ERROR_NAME_CHARS] or None,
        field=message.field[:MAX_ERROR_NAME_CHARS] or None,
        retry_after_s=message.retry_after_us / 1e6 if message.HasField("retry_after_us") else None,
    )
