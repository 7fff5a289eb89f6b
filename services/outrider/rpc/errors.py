"""Domain errors and the one table that turns them into gRPC statuses, and back.

Raise an `OutriderError` anywhere; the server's interceptor answers with its status and `google.rpc` details
(ErrorInfo, BadRequest, RetryInfo). A message is shown to the client: never quote a prompt in one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from outrider.rpc.v1 import router_pb2, sequence_pb2

DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"

_MAX_MESSAGE_CHARS = 1000

M = TypeVar("M", bound=Message)


class OutriderError(Exception):
    """What went wrong, in terms a caller can act on. The class decides the status code."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason: str | None = reason or self.default_reason
        """UPPER_SNAKE, stable, for programs. None: the peer gave no details, as when the transport itself broke."""
        self.field = field
        """Path of the field at fault, when one is."""
        self.retry_after_s = retry_after_s
        """When to try again, if trying again can help."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidRequest(OutriderError):
    """A field holds what it must not hold."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)


class NotSupported(OutriderError):
    """A field asks for something known that this server does not do."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "NOT_SUPPORTED"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)


class UnknownModel(OutriderError):
    """No live target serves the model of this name."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "UNKNOWN_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(f"no model named {model[:200]!r} is served", field="model")


class UnknownRequest(OutriderError):
    """Nothing is known of the request of this id."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "UNKNOWN_REQUEST"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="request_id")


class Overloaded(OutriderError):
    """No room now; nothing was started. Trying again later can help."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)


class Unavailable(OutriderError):
    """The one asked cannot do it now (draining, gone, nothing behind it); another may."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The caller went away or asked for an end."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class InternalError(OutriderError):
    """A fault of ours."""


_CODES = {code.value[0]: code for code in grpc.StatusCode}
_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        NotSupported,
        UnknownModel,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}


def make_error(
    code: grpc.StatusCode,
    message: str,
    *,
    reason: str | None = None,
    field: str | None = None,
    retry_after_s: float | None = None,
) -> OutriderError:
    """An error as a peer reported it, of the class that stands for `code`."""
    kind = _BY_CODE.get(code, OutriderError)
    error = kind.__new__(kind)
    OutriderError.__init__(error, message, field=field, retry_after_s=retry_after_s)
    error.reason = reason
    error.code = code
    return error


def to_status(error: OutriderError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, and BadRequest and RetryInfo where they apply."""
    status = status_pb2.Status(code=error.code.value[0], message=str(error)[:_MAX_MESSAGE_CHARS])
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason or error.default_reason, domain=DOMAIN),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message[:_MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(error.retry_after_s * 1e9))
        details.append(retry)
    for detail in details:
        status.details.add().Pack(detail)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """Ends the call with the error's status. Always raises."""
    status = to_status(error)
    await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.RpcError) -> OutriderError:
    """What a failed call says, with the server's reason, field and retry delay if it gave them.

    Details that cannot be decoded are ignored: the code alone is the answer then, and `reason` is None.
    """
    code = error.code() if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else grpc.StatusCode.UNKNOWN
    message = (error.details() if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else None) or str(code)
    status = _decode_status(_trailing_metadata(error))
    if status is None or status.code != code.value[0]:
        return make_error(code, message)
    return from_status(status)


def from_status(status: status_pb2.Status) -> OutriderError:
    """The error a google.rpc.Status describes. Details of unknown kinds are ignored."""
    info = _unpack(status.details, error_details_pb2.ErrorInfo())
    bad = _unpack(status.details, error_details_pb2.BadRequest())
    retry = _unpack(status.details, error_details_pb2.RetryInfo())
    violation = bad.field_violations[0] if bad is not None and bad.field_violations else None
    return make_error(
        _CODES.get(status.code, grpc.StatusCode.UNKNOWN),
        violation.description if violation is not None else status.message,
        reason=(info.reason or None) if info is not None else None,
        field=violation.field if violation is not None else None,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
    )


def to_sequence_error(sequence_id: int, error: OutriderError) -> sequence_pb2.SequenceError:
    """The error as one sequence's own end on a worker's stream."""
    return sequence_pb2.SequenceError(
        sequence_id=sequence_id,
        code=error.code.value[0],
        reason=error.reason or error.default_reason,
        field=error.field or "",
        message=error.message[:_MAX_MESSAGE_CHARS],
    )


def from_sequence_error(message: sequence_pb2.SequenceError) -> OutriderError:
    """What a worker said about one sequence. An unknown code reads as UNKNOWN."""
    return make_error(
        _CODES.get(message.code, grpc.StatusCode.UNKNOWN),
        message.message,
        reason=message.reason or None,
        field=message.field or None,
    )


def to_route_error(call_id: int, error: OutriderError) -> router_pb2.RouteError:
    """The error as one call's own end on a gateway's stream."""
    retry_after_s = error.retry_after_s
    return router_pb2.RouteError(
        call_id=call_id,
        code=error.code.value[0],
        reason=error.reason or error.default_reason,
        field=error.field or "",
        message=error.message[:_MAX_MESSAGE_CHARS],
        retry_after_us=None if retry_after_s is None else math.ceil(retry_after_s * 1e6),
    )


def from_route_error(message: router_pb2.RouteError) -> OutriderError:
    """What a router said about one call. An unknown code reads as UNKNOWN."""
    return make_error(
        _CODES.get(message.code, grpc.StatusCode.UNKNOWN),
        message.message,
        reason=message.reason or None,
        field=message.field or None,
        retry_after_s=message.retry_after_us / 1e6 if message.HasField("retry_after_us") else None,
    )


def _trailing_metadata(error: grpc.RpcError) -> Iterable[tuple[str, str | bytes]]:
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return error.trailing_metadata() or ()
    return ()


def _decode_status(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(details: Iterable[AnyMessage], message: M) -> M | None:
    for detail in details:
        try:
            if detail.Unpack(message):
                return message
        except DecodeError:
            continue
    return None
