"""The client's end of a connection, and the time a call may take."""

from __future__ import annotations

from typing import Any

import grpc

from outrider.errors import DeadlineExceeded
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, channel_options


def create_channel(address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to HOST:PORT with our limits and keepalive. Connects when first used; close it."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


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
