"""Ends connections to a gRPC port that have said nothing, when places are scarce. gRPC itself waits for their first
bytes for seconds, and turns others away meanwhile.

A client speaks first, in plain text and with TLS. So one that has not after a second is none, or too slow to be waited
for where others wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

_LOOK_EVERY_S = 0.25
_GRACE_MS = 1000
_PREFACE_BYTES = 24
"""With fewer, neither a preface of HTTP/2 nor a hello of TLS is here."""
_TCP_INFO_BYTES, _LAST_RECEIVED_AT, _BYTES_RECEIVED_AT = 136, 52, 128
"""Of Linux's struct tcp_info: last_data_recv in ms, and bytes_received."""


@dataclass(frozen=True, slots=True)
class Connection:
    fd: int
    address: str
    silent_ms: int
    num_bytes: int

    @property
    def silent(self) -> bool:
        return self.num_bytes < _PREFACE_BYTES and self.silent_ms >= _GRACE_MS


async def end_silent(port: int, most: int) -> NoReturn:
    """`most`: connections that may be open. Above half of them, silent ones are ended until no more than that are left,
    those of the address that has most of them first."""
    while True:
        pause_s = _LOOK_EVERY_S
        # Not at each one while there are few. It fails where no file may be opened, and elsewhere than on Linux.
        with suppress(OSError):
            if len(os.listdir("/proc/self/fd")) > most // 2:
                began_s = time.monotonic()
                await asyncio.to_thread(_make_room, port, most // 2)
                pause_s = max(pause_s, 20 * (time.monotonic() - began_s))
        await asyncio.sleep(pause_s)


def _make_room(port: int, most: int) -> None:
    there = list(_connections(port))
    silent = [one for one in there if one.silent]
    by_address = Counter(one.address for one in silent)
    silent.sort(key=lambda one: (-by_address[one.address], -one.silent_ms))
    for one in silent[: max(0, len(there) - most)]:
        with suppress(OSError), _duplicate(one.fd) as found:
            # The number may be another connection's by now.
            if (now := _look(one.fd, found, port)) is not None and now.silent:
                found.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _duplicate(int(name)) as found:
            if (one := _look(int(name), found, port)) is not None:
                yield one


def _duplicate(fd: int) -> socket.socket:
    """Shares the connection, and stays the same one when its owner closes it. Raises OSError for what is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _look(fd: int, found: socket.socket, port: int) -> Connection | None:
    """None for another socket. Raises OSError for one that listens, or is gone."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
        return None
    address = found.getpeername()[0]
    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return None
    (silent_ms,) = struct.unpack_from("=I", info, _LAST_RECEIVED_AT)
    (num_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return Connection(fd, address, silent_ms, num_bytes)
