"""The two halves of a stream: for clients (`until_first_ends`), and for handlers that write from a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from outrider.errors import DeadlineExceeded


class StreamEnded(Exception):
    """The stream is unusable; the message has the reason."""


async def read_stream(call: Any, received: Callable[[Any], None]) -> NoReturn:
    """Passes each message to `received`. Raises StreamEnded, or RpcError with the status of a server that ended it."""
    while (message := await call.read()) is not grpc.aio.EOF:
        if message is None:
            # gRPC returns this for bytes that do not parse.
            raise StreamEnded("a message cannot be read")
        received(message)
    raise StreamEnded(f"stream ended: {await call.details() or await call.code()}")


async def write_stream(call: Any, take: Callable[[], Awaitable[Any]]) -> NoReturn:
    """Writes the messages that `take` returns. Raises StreamEnded."""
    while True:
        message = await take()
        try:
            await call.write(message)
        except asyncio.InvalidStateError as error:
            raise StreamEnded("stream ended while writing") from error


M = TypeVar("M")

# If a client has stopped reading, a write to it never ends.
GRACE_S = 1.0


async def write_answers(outbox: asyncio.Queue[M | None], context: Any) -> None:
    """Writes the queue's messages up to a None."""
    while (message := await outbox.get()) is not None:
        await context.write(message)
        outbox.task_done()


async def write_within(context: Any, message: Any, timeout_s: float) -> None:
    """Raises DeadlineExceeded for a client that does not read, because its request would keep its place for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"nothing was read for {timeout_s:g} s") from error


async def stop_writing(
    writer: asyncio.Task[None], outbox: asyncio.Queue[M | None], grace_s: float | None = GRACE_S
) -> None:
    """Ends `write_answers` after its current message, if that ends within `grace_s`, and drops the rest."""
    while not outbox.empty():
        outbox.get_nowait()
    outbox.put_nowait(None)
    await let_end(writer, grace_s)


async def let_end(writer: asyncio.Task[None], grace_s: float | None = GRACE_S) -> None:
    """Waits for a writer that ends after its current message.

    A message is not interrupted: gRPC takes one operation at a time, and the end of the call is one too. So the status
    could not be sent, and the client would wait for it for ever.
    """
    # If the client has disconnected, the current write fails, and the handler may be cancelled here.
    writer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({writer}, timeout=grace_s)
    finally:
        writer.cancel()
