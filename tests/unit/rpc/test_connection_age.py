"""A server that is restarted behind a load balancer, under clients that never pause."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from outrider.rpc.options import public_options
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc

from tests.unit.rpc.conftest import Serve

AGED = public_options(max_connections=64, max_streams=64, first_bytes_s=10, idle_s=60, age_s=0.2)


@dataclass
class Balancer:
    """Carries each new connection to `current`; those that are open stay where they are."""

    current: str
    open: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = self.current
        self.open[address] += 1
        there, back = await asyncio.open_connection(*address.rsplit(":", 1))
        await asyncio.gather(_pass(reader, back), _pass(there, writer))
        self.open[address] -= 1


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def ask(address: str, message: generation_pb2.GenerateRequest, over: asyncio.Event) -> int:
    """Calls without a pause or a retry. Returns how many; raises what the first one that fails does."""
    count = 0
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        while not over.is_set():
            await stub.Generate(message, timeout=30)
            count += 1
    return count


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # A count, which nobody announces.
            await asyncio.sleep(0.01)


async def test_no_call_is_lost_when_a_server_stops_after_its_clients_have_connected_anew(
    serve: Serve, request_message: generation_pb2.GenerateRequest
) -> None:
    async def answer(request: Any, context: Any) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse()

    async with AsyncExitStack() as stack:
        (_, first), (_, second) = [await stack.enter_async_context(serve(unary=answer, more=AGED)) for _ in range(2)]
        balancer, over = Balancer(first.address), asyncio.Event()
        address = await stack.enter_async_context(balancer.listening())
        clients = [asyncio.create_task(ask(address, request_message, over)) for _ in range(4)]
        await until(lambda: balancer.open[first.address] == len(clients))
        balancer.current = second.address
        await until(lambda: balancer.open[first.address] == 0)
        first.go_away(1.0)
        await asyncio.sleep(0.1)
        over.set()
        assert min(await asyncio.gather(*clients)) > 0
