"""Reads request bodies within the gateway's limits of size and time."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from starlette.requests import Request

from outrider.gateway.config import GatewayLimits
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.openai.schemas import Parsed, parse

_CLOSE = {"Connection": "close"}
# A body above the limit is read up to this many times the limit and dropped: else a client that still sends gets a
# connection reset instead of the answer.
_READ_ON = 8
_CODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""zlib's name of each (RFC 9110, 8.4.1)."""


@dataclass(frozen=True, slots=True)
class BodyReader:
    limits: GatewayLimits
    ignores_unknown: bool = False
    """Whether unknown fields are ignored."""

    async def read(self, kind: type[Parsed], request: Request) -> Parsed:
        """Raises HttpError, naming what is at fault."""
        kind.check_headers(request.headers)
        return parse(kind, await read_body(request, self.limits), ignores=self.ignores_unknown)


async def read_body(request: Request, limits: GatewayLimits) -> bytes:
    """The whole body, within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type: has to be application/json, not {kind or 'empty'}", param="Content-Type")
    coding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if coding not in ("identity", *_CODINGS):
        message = f"Content-Encoding: {coding[:40]} is not supported; gzip and deflate are"
        raise HttpError(415, message, param="Content-Encoding", headers={"Accept-Encoding": "gzip, deflate"})
    declared = request.headers.get("content-length", "0")
    if "expect" in request.headers and declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_within(request, limits)
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise HttpError(408, message, headers=_CLOSE) from error
    return body if coding == "identity" else _unpacked(body, coding, limits)


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


def _unpacked(body: bytes, coding: str, limits: GatewayLimits) -> bytes:
    """Never makes more than the limit, however far the body expands."""
    unpacking = zlib.decompressobj(_CODINGS[coding])
    try:
        unpacked = unpacking.decompress(body, limits.max_body_bytes + 1)
    except zlib.error as error:
        raise _malformed(coding, str(error)) from error
    if len(unpacked) > limits.max_body_bytes:
        raise _too_large(limits)
    if not unpacking.eof or unpacking.unused_data:
        raise _malformed(coding, "it is cut off" if not unpacking.eof else "more follows its end")
    return unpacked


def _malformed(coding: str, why: str) -> HttpError:
    return HttpError(400, f"Content-Encoding: the body is not {coding}: {why}", param="Content-Encoding")


def _too_large(limits: GatewayLimits) -> HttpError:
    message = f"the body is larger than the {limits.max_body_bytes} bytes allowed"
    return HttpError(413, message, code="request_too_large", headers=_CLOSE)
