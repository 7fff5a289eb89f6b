"""What commands ask of a gateway ends when they stop listening."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import generation_pb2_grpc
from outrider_controller.cli.client import Gateway


class Talkative(generation_pb2_grpc.GenerationServiceServicer):
    """Says more than anybody listens to."""

    async def StreamGenerate(  # type: ignore[override]
        self, request: generation.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[generation.StreamGenerateResponse]:
        for _ in range(50):
            yield generation.StreamGenerateResponse(text="x" * 100)
            await asyncio.sleep(0.001)


async def test_a_stream_that_is_left_half_way_keeps_no_place_on_its_connection() -> None:
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 2)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Talkative(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Gateway(f"127.0.0.1:{port}") as gateway:
            for _ in range(5):
                async with aclosing(gateway.stream(generation.GenerateRequest(), timeout_s=20)) as chunks:
                    assert (await anext(chunks)).text
    finally:
        await server.stop(None)
