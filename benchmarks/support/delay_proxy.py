"""A TCP proxy that adds to the round trip without reducing throughput. For measurements, in its own process:

python -m benchmarks.support.delay_proxy CONTROL_PORT LISTEN_PORT=HOST:PORT...

A path in place of HOST:PORT is that of a Unix socket.

Every chunk leaves half of the added round trip after its arrival, independent of earlier chunks. A line with a number
of milliseconds, sent to the control port, changes the added round trip for later chunks; the reply is the same line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import sys
from dataclasses import dataclass, field

from outrider_controller.cli.up.stack import go_first

_HOST = "127.0.0.1"
# Above the priority of every Outrider process.
_PRIORITY = 10
_CHUNK_BYTES = 1 << 16
Chunk = tuple[float, bytes]


@dataclass(slots=True)
class Delay:
    """Added delay of one direction, in seconds."""

    seconds: float = 0.0


@dataclass(slots=True)
class DelayProxy:
    """Serves until cancelled. `listens`: port to listen on → HOST:PORT, or socket, to forward to."""

    listens: dict[int, str]
    delay: Delay = field(default_factory=Delay)

    async def run(self, control_port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for port, to in self.listens.items():
                server = await asyncio.start_server(self._connection(to), _HOST, port)
                await stack.enter_async_context(server)
            # Last, so that a client of the control port can reach all other ports.
            control = await stack.enter_async_context(await asyncio.start_server(self._control, _HOST, control_port))
            await control.serve_forever()

    def _connection(self, to: str):  # type: ignore[no-untyped-def]
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far_reader, far_writer = await _open(to)
            except OSError:
                writer.close()
                return
            _no_delay(writer)
            _no_delay(far_writer)
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

        return pass_on

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction until its sender has ended and everything has arrived."""
        under_way: asyncio.Queue[Chunk] = asyncio.Queue()
        leaving = asyncio.create_task(_leave(under_way, writer))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                under_way.put_nowait((loop.time() + self.delay.seconds, data))
        under_way.put_nowait((loop.time() + self.delay.seconds, b""))
        await leaving

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.delay.seconds = float(line) / 2e3
            writer.write(line)
            await writer.drain()
        writer.close()


async def _leave(under_way: asyncio.Queue[Chunk], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()


async def _open(to: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if to.startswith("/"):
        return await asyncio.open_unix_connection(to)
    host, _, port = to.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _no_delay(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def set_round_trip(control_port: int, added_ms: float) -> None:
    """Sets the added round trip of this machine's proxy with that control port. Raises OSError."""
    reader, writer = await asyncio.open_connection(_HOST, control_port)
    try:
        writer.write(f"{added_ms}\n".encode())
        await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def main() -> None:
    # High priority, because a real network does not wait for a core.
    go_first(os.getpid(), _PRIORITY)
    listens = {int(port): to for port, _, to in (argument.partition("=") for argument in sys.argv[2:])}
    # epoll waits in whole milliseconds, select in microseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with contextlib.suppress(KeyboardInterrupt):
        loop.run_until_complete(DelayProxy(listens).run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
