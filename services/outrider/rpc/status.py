"""Converts errors to gRPC statuses with `google.rpc` details (ErrorInfo, BadRequest, RetryInfo), and back.

A handler can raise an `OutriderError` anywhere: the server's interceptor answers with its status.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from outrider.errors import MAX_MESSAGE_CHARS, Code, OutriderError, make_error

DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

M = TypeVar("M", bound=Message)


def to_status(error: OutriderError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, and BadRequest and RetryInfo where they apply."""
    status = status_pb2.Status(code=error.code, message=str(error)[:MAX_MESSAGE_CHARS])
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason or error.default_reason, domain=DOMAIN),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message[:MAX_MESSAGE_CHARS]
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
    await context.abort(_STATUS_CODES[error.code], status.message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.RpcError) -> OutriderError:
    """The error of a failed call, with the server's reason, field and retry delay if it sent them.

    Details that cannot be decoded, or contradict the call's code or message, are ignored; then only those two are
    known, and `reason` is None.
    """
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return make_error(Code.UNKNOWN, Code.UNKNOWN.name)
    call: Any = error  # typed for synchronous calls alone
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):
        status = None
    if status is not None:
        return from_status(status)
    code = Code(error.code().value[0])
    return make_error(code, error.details() or code.name)


def from_status(status: status_pb2.Status) -> OutriderError:
    """The error that a google.rpc.Status describes. Ignores unknown kinds of details."""
    info = _unpack(status.details, error_details_pb2.ErrorInfo())
    bad = _unpack(status.details, error_details_pb2.BadRequest())
    retry = _unpack(status.details, error_details_pb2.RetryInfo())
    violation = bad.field_violations[0] if bad is not None and bad.field_violations else None
    return make_error(
        Code(status.code),
        violation.description if violation is not None else status.message,
        reason=(info.reason or None) if info is not None else None,
        field=violation.field if violation is not None else None,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
    )


def _unpack(details: Iterable[AnyMessage], message: M) -> M | None:
    for detail in details:
        try:
            if detail.Unpack(message):
                return message
        except DecodeError:
            continue
    return None
