"""Connections on which nothing is said: the same options as in production, with pings a hundred times as often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, Options, channel_options, server_options
from outrider.rpc.server import serving
from outrider.rpc.v1 import target_pb2, target_pb2_grpc

# Pings are due every 0.1 s then, but gRPC lets a client send one a second at most; a server allows one in 0.05 s.
_SHORTER = 100
# Pings that come too soon, after which the server ends the connection: fewer than gRPC's two, for a quicker test.
_STRIKES = ("grpc.http2.max_ping_strikes", 1)
_SILENCE_S = 4.0


def hastened(options: Options) -> Options:
    return [(name, int(value) // _SHORTER if _is_interval(name) else value) for name, value in options]


def _is_interval(name: str) -> bool:
    """Of pings. How long an end waits for an answer stays: a busy machine may take its time."""
    return name in ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")


class EchoTarget(target_pb2_grpc.TargetServiceServicer):
    """Answers each message of a stream with one."""

    def __init__(self) -> None:
        self.peers: set[str] = set()

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        self.peers.add(context.peer())
        return target_pb2.TargetServiceGetInfoResponse()

    async def Verify(self, requests: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        async for _ in requests:
            await context.write(target_pb2.VerifyResponse())


@asynccontextmanager
async def muted_by(silence: asyncio.Event, address: str) -> AsyncIterator[str]:
    """Where a server that says nothing any more is reached, as if its process were stopped: its kernel takes all
    bytes."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not silence.is_set():
                writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def connected(target: EchoTarget) -> AsyncIterator[target_pb2_grpc.TargetServiceAsyncStub]:
    server = grpc.aio.server(options=[*hastened(server_options(INTERNAL_MESSAGE_BYTES, 100)), _STRIKES])
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    async with serving(server, "127.0.0.1:0", services=[], grace_s=0.1) as life:
        options = hastened(channel_options(INTERNAL_MESSAGE_BYTES))
        async with grpc.aio.insecure_channel(life.address, options=options) as channel:
            yield target_pb2_grpc.TargetServiceStub(channel)


async def idle() -> None:
    """A connection without any call."""
    target = EchoTarget()
    async with connected(target) as stub:
        await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        await asyncio.sleep(_SILENCE_S)
        await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
    # A second connection would come from another port.
    assert len(target.peers) == 1


async def compute() -> None:
    """A stream on which nothing is said, as during a long prefill."""
    async with connected(EchoTarget()) as stub:
        call = stub.Verify()
        await call.write(target_pb2.VerifyRequest())
        await call.read()
        await asyncio.sleep(_SILENCE_S)
        await call.write(target_pb2.VerifyRequest())
        assert await call.read() == target_pb2.VerifyResponse()


async def test_an_idle_connection_and_a_silent_stream_stay_open_however_often_they_are_pinged() -> None:
    outcomes = await asyncio.gather(idle(), compute(), return_exceptions=True)
    assert outcomes == [None, None]


async def test_a_server_that_has_stopped_is_given_up_though_its_machine_takes_what_is_sent() -> None:
    server, silence = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES, 100)), asyncio.Event()
    target_pb2_grpc.add_TargetServiceServicer_to_server(EchoTarget(), server)
    options = [
        (name, int(value) // 10 if name.endswith(("keepalive_time_ms", "timeout_ms")) else value)
        for name, value in channel_options(INTERNAL_MESSAGE_BYTES)
    ]
    async with (
        serving(server, "127.0.0.1:0", services=[], grace_s=0.1) as life,
        muted_by(silence, life.address) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        await call.write(target_pb2.VerifyRequest())
        await call.read()
        silence.set()
        # Its 20 s are 2 s here.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
