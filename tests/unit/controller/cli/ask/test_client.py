"""What commands ask of a gateway ends when they stop listening."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import generation_pb2_grpc
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import CommandError, ExitCode


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


class Locked(generation_pb2_grpc.GenerationServiceServicer):
    """Asks everybody for a key."""

    async def StreamGenerate(  # type: ignore[override]
        self, request: generation.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[generation.StreamGenerateResponse]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key: send it as the header `Authorization`")
        yield generation.StreamGenerateResponse()


@pytest.mark.parametrize(("key", "said"), [("", "OUTRIDER_API_KEY"), ("wrong", "no API key: send it as the header")])
async def test_who_gave_no_key_is_told_where_commands_take_it_from(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", key)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Locked(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Gateway(f"127.0.0.1:{port}") as gateway:
            with pytest.raises(CommandError, match=said) as caught:
                await gateway.answer(generation.GenerateRequest())
    finally:
        await server.stop(None)
    assert caught.value.exit_code is ExitCode.DENIED
