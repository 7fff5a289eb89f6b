"""A proxy that adds to the round trip and takes nothing from throughput."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from outrider_controller.cli.up.ports import Ports

from benchmarks.support.delay_proxy import DelayProxy, set_round_trip


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, int]]:
    """A connection through the proxy to what sends everything back, and the proxy's control port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    ports = Ports()
    listen, control = ports.claim(), ports.claim()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = asyncio.create_task(DelayProxy({listen: f"127.0.0.1:{port}"}).run(control))
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError):
                    await set_round_trip(control, 0)
                    break
                await asyncio.sleep(0.02)
        reader, writer = await asyncio.open_connection("127.0.0.1", listen)
        yield reader, writer, control
        writer.close()
        # Both directions end with their sender.
        assert await asyncio.wait_for(reader.read(), 60) == b""
    finally:
        proxy.cancel()
        await asyncio.gather(proxy, return_exceptions=True)
        server.close()


async def round_trip_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    started_s = time.monotonic()
    writer.write(b"x")
    await reader.readexactly(1)
    return time.monotonic() - started_s


async def test_every_round_trip_takes_as_much_longer_as_was_asked_for() -> None:
    async with echo_behind_proxy() as (reader, writer, control):
        await set_round_trip(control, 60)
        assert min([await round_trip_s(reader, writer) for _ in range(3)]) >= 0.06
        await set_round_trip(control, 0)
        assert min([await round_trip_s(reader, writer) for _ in range(10)]) < 0.06


async def test_what_is_sent_meanwhile_does_not_queue_behind_the_delay() -> None:
    sent = bytes(range(256)) * 20_000
    async with echo_behind_proxy() as (reader, writer, control):
        await set_round_trip(control, 200)
        started_s = time.monotonic()
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        # 80 chunks of 64 KiB: one after the other they would take 16 s.
        assert time.monotonic() - started_s < 12
