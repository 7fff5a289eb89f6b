"""Reads request bodies within the gateway's limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from outrider.gateway.config import GatewayLimits
from outrider.gateway.http.errors import HttpError

_CLOSE = {"Connection": "close"}
# A body above the limit is read up to this many times the limit and dropped: else a client that still sends gets a
# connection reset instead of the answer.
_READ_ON = 8


async def read_body(request: Request, limits: GatewayLimits) -> bytes:
    """The whole body, within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type: has to be application/json, not {kind or 'empty'}", param="Content-Type")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        message = f"Content-Encoding: {coding[:40]} is not supported; send the body as it is"
        raise HttpError(415, message, param="Content-Encoding")
    declared = request.headers.get("content-length", "0")
    if "expect" in request.headers and declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read_within(request, limits)
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise HttpError(408, message, headers=_CLOSE) from error


async def _read_within(request: Request, limits: GatewayLimits) -> bytes:
    body, num_read = bytearray(), 0
    async for part in request.stream():
        num_read += len(part)
        if num_read <= limits.max_body_bytes:
            body += part
        elif num_read > _READ_ON * limits.max_body_bytes:
            break
    if num_read > limits.max_body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: GatewayLimits) -> HttpError:
    message = f"the body is larger than the {limits.max_body_bytes} bytes allowed"
    return HttpError(413, message, code="request_too_large", headers=_CLOSE)
