"""A real server on loopback whose handlers do what a test tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.rpc.channel import create_channel
from outrider.rpc.options import Options
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc

SERVICE = "outrider.rpc.v1.GenerationService"

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]
Serve = Callable[..., AbstractAsyncContextManager[Any]]


def make_servicer(unary: Unary | None, stream: Stream | None) -> generation_pb2_grpc.GenerationServiceServicer:
    class Servicer(generation_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, request: Any, context: Any) -> Any:
            assert unary is not None
            return await unary(request, context)

        async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            assert stream is not None
            async for response in stream(request, context):
                yield response

    return Servicer()


@pytest.fixture
def serve() -> Serve:
    """`async with serve(unary=…, stream=…, max_message_bytes=…) as (stub, life)`."""

    @asynccontextmanager
    async def run(
        *,
        unary: Unary | None = None,
        stream: Stream | None = None,
        max_message_bytes: int = 1 << 20,
        more: Options | None = None,
    ) -> AsyncIterator[Any]:
        server = create_server(max_message_bytes=max_message_bytes, more=more)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(make_servicer(unary, stream), server)
        async with serving(server, "127.0.0.1:0", services=[SERVICE], grace_s=0.1) as life:
            await life.ready()
            async with create_channel(life.address, max_message_bytes=16 << 20) as channel:
                yield generation_pb2_grpc.GenerationServiceStub(channel), life

    return run


@pytest.fixture
def request_message() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(model="m", text="a very secret prompt")


@pytest.fixture
def call_error() -> Callable[[Awaitable[Any]], Awaitable[grpc.aio.AioRpcError]]:
    """The error a call ends with."""

    async def run(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value

    return run
