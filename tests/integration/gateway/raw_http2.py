"""HTTP/2 as no client library would speak it, by frames (RFC 9113, 4.1)."""

from __future__ import annotations

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0x0, 0x1, 0x3, 0x4
END_STREAM, END_HEADERS = 0x1, 0x4
CANCEL = struct.pack(">I", 8)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_head(path: str) -> bytes:
    """POST http://x/`path`, as HPACK literals without indexing (RFC 7541, 6.2.2)."""
    fields = {":path": path, ":authority": "x", "te": "trailers", "content-type": "application/grpc"}
    literals = [b"\x00" + _text(name) + _text(value) for name, value in fields.items()]
    return b"\x83\x86" + b"".join(literals)


def call_message(message: bytes) -> bytes:
    return b"\x00" + struct.pack(">I", len(message)) + message


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """After the client's half of the opening. Whatever the server sends may be left unread."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    return reader, writer


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value.encode()
