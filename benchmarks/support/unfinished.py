"""Clients whose requests do not end, in a process of their own: python -m benchmarks.support.unfinished HTTP GRPC KEY
COUNT BYTES AGAIN. Half of COUNT connections speak HTTP, half gRPC; each sends all but the last of BYTES as far as the
server takes them, and rests. Of those that the server closes, AGAIN a second begin again. With BYTES 0 all speak HTTP,
and send whole requests, each at once after the answer to the one before. A line says when all have begun.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import struct
import sys
from contextlib import suppress

from outrider.gateway.http.connection import MAX_HEAD_BYTES

from benchmarks.support.paced_fleet import MODEL

_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x6, 0x8
_ACK, _END_HEADERS = 0x1, 0x4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW = 4
_FRAME = MAX_HEAD_BYTES
_METHOD = "/outrider.rpc.v1.GenerationService/Generate"
_AT_ONCE = 200
_ANSWERS = 16
"""To each whole request."""
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(text: str) -> bytes:
    """Without Huffman coding; the length as a number of seven bits (RFC 7541, 5.1)."""
    data, rest = text.encode(), len(text) - 127
    if rest < 0:
        return bytes([len(data)]) + data
    return b"\x7f" + bytes([rest & 127 | 128, rest >> 7]) + data


async def _greedy(address: str, key: str, size: int) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(
        {"model": MODEL, "prompt": [7] * 64, "max_tokens": 24, "n": _ANSWERS, "ignore_eos": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nAuthorization: Bearer {key}\r\n\r\n"
    try:
        while True:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if found := _LENGTH.search(answer):
                await reader.readexactly(int(found[1]))
    finally:
        writer.close()


async def _http(address: str, key: str, size: int) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
        )
        writer.write(f"{head}Authorization: Bearer {key}\r\n\r\n".encode() if key else f"{head}\r\n".encode())
        for start in range(0, size - 1, _FRAME):
            writer.write(b" " * min(_FRAME, size - 1 - start))
            await writer.drain()
        await reader.read()
    finally:
        writer.close()


async def _grpc(address: str, key: str, size: int) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        fields = {":path": _METHOD, ":authority": "x", "te": "trailers", "content-type": "application/grpc"}
        fields |= {"authorization": f"Bearer {key}"} if key else {}
        head = b"\x83\x86" + b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in fields.items())
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0) + _frame(_HEADERS, _END_HEADERS, 1, head))
        left, prefix = size - 1, b"\x00" + struct.pack(">I", size)
        windows = {0: 65_535, 1: 65_535}
        while True:
            while (room := min(*windows.values(), left, _FRAME - len(prefix))) > 0:
                writer.write(_frame(_DATA, 0, 1, prefix + b" " * room))
                left -= room
                windows = {stream: window - room - len(prefix) for stream, window in windows.items()}
                prefix = b""
                await writer.drain()
            header = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
            kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
            if kind == _WINDOW_UPDATE:
                windows[stream] = windows.get(stream, 0) + int.from_bytes(payload, "big")
            elif kind == _SETTINGS and not flags & _ACK:
                for name, value in struct.iter_unpack(">HI", payload):
                    windows[1] += value - 65_535 if name == _INITIAL_WINDOW else 0
                writer.write(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                writer.write(_frame(_PING, _ACK, 0, payload))
            elif kind == _HEADERS:
                # The answer, which is a refusal.
                return
    finally:
        writer.close()


async def _main(http: str, grpc: str, key: str, count: int, size: int, again: float) -> None:
    begun, opening, pace = 0, asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(1)

    async def client(number: int) -> None:
        nonlocal begun
        ask, address = (_greedy, http) if not size else (_http, http) if number % 2 else (_grpc, grpc)
        async with opening:
            first = asyncio.ensure_future(ask(address, key, size))
            await asyncio.wait({first}, timeout=0.2)
            begun += 1
        while True:
            with suppress(OSError, EOFError):
                await first
            async with pace:
                await asyncio.sleep(1 / again)
            first = asyncio.ensure_future(ask(address, key, size))

    clients = [asyncio.create_task(client(number)) for number in range(count)]
    while begun < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    print("begun", flush=True)
    await asyncio.gather(*clients)


if __name__ == "__main__":
    # As if it were on another machine: it takes only the time that the others leave.
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    http, grpc, key, count, size, again = sys.argv[1:]
    asyncio.run(_main(http, grpc, key.strip("-"), int(count), int(size), float(again)))
