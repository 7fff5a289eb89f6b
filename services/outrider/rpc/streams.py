"""The client's two halves of a stream: what it reads, and what it writes as it comes. For `until_first_ends`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc


class StreamEnded(Exception):
    """The stream is unusable; the message says why."""


async def read_stream(call: Any, received: Callable[[Any], None]) -> NoReturn:
    """Passes each message on. Raises StreamEnded, or RpcError with the status of a server that broke it off."""
    while (message := await call.read()) is not grpc.aio.EOF:
        if message is None:
            # What gRPC gives for bytes that do not parse.
            raise StreamEnded("a message cannot be read")
        received(message)
    raise StreamEnded(f"stream ended: {await call.details() or await call.code()}")


async def write_stream(call: Any, take: Callable[[], Awaitable[Any]]) -> NoReturn:
    """Writes what `take` gives. Raises StreamEnded."""
    while True:
        message = await take()
        try:
            await call.write(message)
        except asyncio.InvalidStateError as error:
            raise StreamEnded("stream ended while writing") from error
