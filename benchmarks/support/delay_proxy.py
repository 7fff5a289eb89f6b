"""A TCP proxy that adds to the round trip and takes nothing from throughput. For measurements, as a process of its own:

python -m benchmarks.support.delay_proxy CONTROL_PORT LISTEN_PORT=HOST:PORT...

A path in the place of HOST:PORT is that of a Unix socket.

Every chunk leaves half of the added round trip after it came, whatever is on its way before it. A line with a number of
milliseconds, sent to the control port, changes that for what comes from then on; it is answered with the same line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import sys
from dataclasses import dataclass, field

from outrider_controller.cli.priorities import go_first

_HOST = "127.0.0.1"
# Above all that an Outrider process asks for.
_PRIORITY = 10
_CHUNK_BYTES = 1 << 16
Chunk = tuple[float, bytes]


@dataclass(slots=True)
class Delay:
    """Of one way, in seconds."""

    seconds: float = 0.0


@dataclass(slots=True)
class DelayProxy:
    """Serves until cancelled. `listens`: port to listen on → HOST:PORT, or socket, to pass on to."""

    listens: dict[int, str]
    delay: Delay = field(default_factory=Delay)

    async def run(self, control_port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for port, to in self.listens.items():
                server = await asyncio.start_server(self._connection(to), _HOST, port)
                await stack.enter_async_context(server)
            # Last: who reaches it can reach all.
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
        """One direction, until its sender has ended and all it sent has arrived."""
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
    """Tells the proxy of this machine that listens for control there. Raises OSError."""
    reader, writer = await asyncio.open_connection(_HOST, control_port)
    try:
        writer.write(f"{added_ms}\n".encode())
        await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def main() -> None:
    # A network waits for nobody's turn on a core.
    go_first(os.getpid(), _PRIORITY)
    listens = {int(port): to for port, _, to in (argument.partition("=") for argument in sys.argv[2:])}
    # epoll waits in whole milliseconds, select in microseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with contextlib.suppress(KeyboardInterrupt):
        loop.run_until_complete(DelayProxy(listens).run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
