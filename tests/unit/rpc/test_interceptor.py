from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from outrider.errors import InternalError, InvalidRequest
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2

Response = generation_pb2.StreamGenerateResponse


async def test_an_unexpected_exception_becomes_internal_and_its_message_reaches_neither_client_nor_log(
    serve: Any, request_message: Any, call_error: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise RuntimeError(f"could not tokenize {request.text}")

    with caplog.at_level(logging.DEBUG):
        async with serve(unary=fail) as (stub, _):
            error = from_rpc_error(await call_error(stub.Generate(request_message)))
    assert isinstance(error, InternalError)
    assert error.message == "internal error"
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("outrider"))
    assert "RuntimeError in /outrider.rpc.v1.GenerationService/Generate" in ours
    assert "test_interceptor.py" in ours
    assert "secret" not in caplog.text


async def test_a_stream_delivers_what_it_had_before_the_error(serve: Any, request_message: Any) -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[Response]:
        yield Response(text="a")
        yield Response(text="b")
        raise InvalidRequest("options.stop", "is odd")

    got: list[str] = []
    async with serve(stream=stream) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request_message)):
                got.append(response.text)
    assert got == ["a", "b"]
    assert from_rpc_error(caught.value).field == "options.stop"


async def test_a_handler_may_abort_by_itself(serve: Any, request_message: Any, call_error: Callable[..., Any]) -> None:
    async def fail(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "twice")

    async with serve(unary=fail) as (stub, _):
        error = await call_error(stub.Generate(request_message))
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "twice")


async def test_a_stream_is_closed_at_once_when_its_client_leaves_between_two_messages(
    serve: Any, request_message: Any
) -> None:
    closed = asyncio.Event()

    async def stream(request: Any, context: Any) -> AsyncIterator[Response]:
        try:
            # More than fits the transport's window: the handler stands between two messages.
            while True:
                yield Response(text="x" * 100_000)
        finally:
            closed.set()

    async with serve(stream=stream) as (stub, _):
        call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request_message))
        await call.read()
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_bytes_that_are_no_message_are_the_callers_fault_and_leave_no_trace_in_the_log(
    serve: Any, call_error: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def unary(request: Any, context: Any) -> Any:
        raise AssertionError("reached the handler")

    async def stream(request: Any, context: Any) -> AsyncIterator[Response]:
        raise AssertionError("reached the handler")
        yield Response()

    async with serve(unary=unary, stream=stream) as (_, life), grpc.aio.insecure_channel(life.address) as channel:
        service = "/outrider.rpc.v1.GenerationService"
        error = from_rpc_error(await call_error(channel.unary_unary(f"{service}/Generate")(b"\xff" * 9)))
        answers = channel.unary_stream(f"{service}/StreamGenerate")(b"\xff" * 9)
        streamed = from_rpc_error(await call_error(answers.read()))
    for seen in (error, streamed):
        assert isinstance(seen, InvalidRequest)
        assert seen.field == "request"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
