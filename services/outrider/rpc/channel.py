"""The client's end of a connection, and the time a call may take."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from outrider.errors import DeadlineExceeded, Unavailable
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, channel_options


def create_channel(address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to HOST:PORT with our limits and keepalive. Connects when first used; close it."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


async def wait_ready(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Waits until the channel is connected. Raises Unavailable when it is not within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(f"no connection within {timeout_s:g} s", reason="UNREACHABLE") from None


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], *, margin_s: float = 0.05) -> float | None:
    """Deadline for a call made on behalf of this one; None when the caller set none.

    The margin leaves time to answer before the caller stops listening. Raises DeadlineExceeded when nothing is left.
    """
    left_s = context.time_remaining()
    # Without a deadline gRPC reports none, or one so far off that it stands for none.
    if left_s is None or left_s > 1e8:
        return None
    if left_s <= margin_s:
        raise DeadlineExceeded("the deadline has passed")
    return left_s - margin_s
