"""The reading and writing halves of a client's stream, for `until_first_ends`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc


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
