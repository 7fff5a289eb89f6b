from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from outrider.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotSupported,
    OutriderError,
    Overloaded,
    Unavailable,
    UnknownModel,
    make_error,
)
from outrider.protocol.errors import from_route_error, from_sequence_error, to_route_error, to_sequence_error
from outrider.rpc.channel import create_channel
from outrider.rpc.status import DETAILS_KEY, from_rpc_error, from_status, to_status
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, sequence_pb2

ERRORS = [
    InvalidRequest("sampling.top_p", "is 7"),
    NotSupported("n", "only 1 is supported"),
    UnknownModel("gpt-17"),
    Overloaded("queue is full", retry_after_s=2.5),
    Unavailable("draining", reason="DRAINING", retry_after_s=0.1),
    DeadlineExceeded("too late"),
    Cancelled("left"),
    InternalError("oops"),
]


def facts(error: OutriderError) -> tuple[Any, ...]:
    return type(error), error.code, error.reason, error.field, error.retry_after_s, error.message


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_at_the_client_as_it_was_raised(
    error: OutriderError, serve: Any, request_message: Any, call_error: Callable[..., Any]
) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise error

    async with serve(unary=fail) as (stub, _):
        arrived = from_rpc_error(await call_error(stub.Generate(request_message)))
    assert facts(arrived) == facts(error)
    assert str(arrived) == str(error)


def test_the_status_names_the_field_and_the_delay_in_google_rpc_details() -> None:
    status = to_status(InvalidRequest("sampling.top_p", "is 7"))
    assert status.code == Code.INVALID_ARGUMENT
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_FIELD", "outrider")
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.top_p"
    retry = error_details_pb2.RetryInfo()
    assert to_status(Overloaded("full", retry_after_s=1.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_reason_is_upper_snake_as_error_info_wants_it(error: OutriderError) -> None:
    assert error.reason is not None
    assert error.reason.replace("_", "").isalpha() and error.reason.isupper() and len(error.reason) <= 63


def test_a_sequence_error_carries_code_reason_field_and_message() -> None:
    error = InvalidRequest("drafts[0].token_ids[3]", "token id 9 is outside the vocabulary of 4")
    message = to_sequence_error(17, error)
    assert message.sequence_id == 17
    assert facts(from_sequence_error(message)) == facts(error)


def test_a_sequence_error_with_a_code_from_the_future_is_still_an_error() -> None:
    error = from_sequence_error(sequence_pb2.SequenceError(code=99, message="what"))
    assert (error.code, error.reason, error.field) == (Code.UNKNOWN, None, None)


def test_a_very_long_message_does_not_make_a_very_large_status() -> None:
    assert to_status(InvalidRequest("x", "y" * 100_000)).ByteSize() < 4000
    assert to_sequence_error(1, InvalidRequest("x", "y" * 100_000)).ByteSize() < 2000


async def test_a_peer_that_cannot_be_reached_is_unavailable_without_a_reason(
    request_message: generation_pb2.GenerateRequest, call_error: Callable[..., Any]
) -> None:
    async with create_channel("127.0.0.1:1") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = from_rpc_error(await call_error(stub.Generate(request_message)))
    assert isinstance(error, Unavailable)
    assert error.reason is None


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b"", to_status(Overloaded("x")).SerializeToString()])
async def test_details_that_are_garbage_or_contradict_the_code_are_ignored(
    details: bytes, serve: Any, request_message: Any, call_error: Callable[..., Any]
) -> None:
    async def fail(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here", ((DETAILS_KEY, details),))

    async with serve(unary=fail) as (stub, _):
        error = from_rpc_error(await call_error(stub.Generate(request_message)))
    assert (error.code, error.reason, error.message) == (Code.NOT_FOUND, None, "not here")


def test_a_status_without_details_keeps_its_message() -> None:
    status = to_status(Overloaded("full"))
    del status.details[:]
    error = from_status(status)
    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_s, error.reason) == ("full", None, None)


def test_a_code_without_a_class_of_its_own_is_kept() -> None:
    assert make_error(Code.ABORTED, "stale epoch").code is Code.ABORTED


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_on_a_gateways_stream(error: OutriderError) -> None:
    message = to_route_error(7, error)
    assert message.call_id == 7
    assert facts(from_route_error(message)) == facts(error)
