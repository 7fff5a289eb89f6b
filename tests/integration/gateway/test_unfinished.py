"""Requests that do not end: what all of them hold together is bounded, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from outrider.errors import Code, DeadlineExceeded, Overloaded
from outrider.gateway.config import GatewayLimits
from outrider.rpc.access.roles import ClusterSecret, RoleGuard
from outrider.rpc.arriving import Arriving
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import generation_pb2_grpc

from tests.integration.gateway import raw_http2
from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import ScriptedRouter, routing
from tests.integration.gateway.test_connections import connect, rest_of, serves

BODY = 1 << 20
LIMITS = GatewayLimits(max_body_bytes=BODY, max_unread_bytes=16 * BODY, body_timeout_s=60.0)
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


async def begin(address: str, size: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(address)
    writer.write(HEAD.format(size).encode() + b" " * sent)
    await writer.drain()
    return reader, writer


async def test_above_the_bound_the_bodies_that_take_longest_are_given_up_and_a_new_one_is_answered(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    async with routing(router) as address, gateway(address, limits=LIMITS) as running:
        opened = [await begin(running.http_address, BODY, BODY - 1) for _ in range(12)]
        # A quarter of 16 bodies.
        refused = await asyncio.gather(*(rest_of(reader, 60) for reader, _ in opened[:6]))
        # A reset, because the server reads no further, may come before the answer.
        answers = [each for each in refused if each]
        assert answers and all(b" 503 " in each and b"Retry-After" in each for each in answers)
        assert await serves(running.http_address)
        last, writer = opened[-1]
        assert not last.at_eof()
        # What has not been given up is answered when its end comes.
        writer.write(b" ")
        assert b" 400 " in await asyncio.wait_for(last.read(4096), 30)


async def test_what_follows_an_answer_is_held_by_nobody(gateway: OpenGateway, router: ScriptedRouter) -> None:
    async with routing(router) as address, gateway(address, limits=LIMITS) as running:
        # No route: answered before the body.
        reader, writer = await connect(running.http_address)
        writer.write(HEAD.replace("/v1/completions", "/nowhere").format(BODY).encode() + b" " * (BODY - 1))
        assert b" 404 " in await asyncio.wait_for(reader.read(4096), 30)
        assert await serves(running.http_address)


class _Messages:
    """Each comes to its end when it is told to."""

    def __init__(self, count: int) -> None:
        self.ends = [asyncio.Event() for _ in range(count)]
        self.begun = list[int]()

    def reading(self, number: int) -> Callable[[], Awaitable[int]]:
        async def read() -> int:
            self.begun.append(number)
            await self.ends[number].wait()
            return number

        return read


async def test_of_messages_only_so_many_are_read_at_once_and_one_without_an_end_makes_room() -> None:
    messages, arriving = _Messages(9), Arriving(places=2)
    tasks = [asyncio.create_task(arriving.take(messages.reading(number))) for number in range(3)]
    await asyncio.sleep(0)
    assert messages.begun == [0, 1]
    # The third waits, and the first two do not end: one gives its place up, and no more than wait.
    [given_up], [_] = await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(given_up.exception(), Overloaded)
    messages.ends[2].set()
    assert await asyncio.wait_for(tasks[2], 60) == 2
    for end in messages.ends:
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not arriving._read and not arriving._waiting


async def test_a_burst_of_messages_that_are_here_is_read_whole() -> None:
    messages, arriving = _Messages(500), Arriving(places=4)
    for end in messages.ends:
        end.set()
    assert sorted(await asyncio.gather(*(arriving.take(messages.reading(n)) for n in range(500)))) == list(range(500))


async def test_a_message_that_takes_too_long_ends_and_so_does_one_that_is_cancelled() -> None:
    messages, arriving = _Messages(3), Arriving(places=1, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded):
        await arriving.take(messages.reading(0))
    first = asyncio.create_task(arriving.take(messages.reading(1)))
    second = asyncio.create_task(arriving.take(messages.reading(2)))
    await asyncio.sleep(0)
    second.cancel()
    messages.ends[1].set()
    assert await first == 1
    assert not arriving._read and not arriving._waiting


async def test_of_too_many_that_wait_the_first_is_refused() -> None:
    messages, arriving = _Messages(4), Arriving(places=1, max_waiting=2)
    tasks = [asyncio.create_task(arriving.take(messages.reading(number))) for number in range(4)]
    with pytest.raises(Overloaded):
        await tasks[1]
    for end in messages.ends:
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_call_without_a_proof_is_refused_before_its_message_has_arrived() -> None:
    server = create_server(guard=RoleGuard(ClusterSecret(b"0123456789abcdef")))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation_pb2_grpc.GenerationServiceServicer(), server)
    async with serving(server, "127.0.0.1:0", services=[]) as life:
        reader, writer = await raw_http2.connect(life.address)
        head = raw_http2.call_head("/outrider.rpc.v1.GenerationService/Generate")
        begun = raw_http2.call_message(b" " * BODY)[:100]
        writer.write(raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, head))
        writer.write(raw_http2.frame(raw_http2.DATA, 0, 1, begun))
        async with asyncio.timeout(30):
            kind, flags = 0, 0
            while (kind, flags & raw_http2.END_STREAM) != (raw_http2.HEADERS, raw_http2.END_STREAM):
                header = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
                kind, flags = header[3], header[4]
        # As an HPACK literal.
        assert b"grpc-status\x02%d" % Code.UNAUTHENTICATED in payload


async def test_a_call_that_ends_without_a_message_is_told_so() -> None:
    server = create_server()
    health = "/grpc.health.v1.Health/Check"
    async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
        call = channel.stream_unary(health)(iter(()))
        with pytest.raises(grpc.aio.AioRpcError, match="has no message"):
            await call


def test_however_large_bodies_may_be_some_can_arrive() -> None:
    limits = GatewayLimits(max_body_bytes=1 << 30)
    assert limits.grpc_places >= 2 and limits.max_unread_http_bytes >= 2 << 30
