"""Ends connections to a gRPC port that have said nothing, when places are scarce. gRPC itself waits for their first
bytes for seconds, and turns others away meanwhile.

A client speaks first, in plain text and with TLS. So one that has not after a second is none, or too slow to be waited
for where others wait.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

_LOOK_EVERY_S = 0.25
_GRACE_MS = 1000
_MANY = 1 << 16
_PREFACE_BYTES = 24
"""With fewer, neither a preface of HTTP/2 nor a hello of TLS is here."""
_TCP_INFO_BYTES, _LAST_RECEIVED_AT, _BYTES_RECEIVED_AT = 136, 52, 128
"""Of Linux's struct tcp_info: last_data_recv in ms, and bytes_received."""


@dataclass(frozen=True, slots=True)
class PeerSocket:
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
        pause_s, files = _LOOK_EVERY_S, _files()
        # Not at each one while there are few.
        if len(files) > most // 2:
            began_s = time.monotonic()
            _make_room(files, port, most // 2)
            pause_s = max(pause_s, 20 * (time.monotonic() - began_s))
        await asyncio.sleep(pause_s)


def files_allowed() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MANY if limit == resource.RLIM_INFINITY else min(limit, _MANY)


def _files() -> Sequence[int]:
    """The numbers of open files; all that there may be, once none can be opened to find out."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(files_allowed()) if os.path.isdir("/proc/self") else ()


def _make_room(files: Sequence[int], port: int, most: int) -> None:
    there = [one for fd in files if (one := _look(fd, port)) is not None]
    silent = [one for one in there if one.silent]
    by_address = Counter(one.address for one in silent)
    silent.sort(key=lambda one: (-by_address[one.address], -one.silent_ms))
    for one in silent[: max(0, len(there) - most)]:
        # The number may be another file's by now.
        _look(one.fd, port, end=True)


def _look(fd: int, port: int, *, end: bool = False) -> PeerSocket | None:
    """None for another file. Opens none, for there may be no room. `end`: ends it if it is silent."""
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return None
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (silent_ms,) = struct.unpack_from("=I", info, _LAST_RECEIVED_AT)
        (num_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
        one = PeerSocket(fd, found.getpeername()[0], silent_ms, num_bytes)
        if end and one.silent:
            found.shutdown(socket.SHUT_RDWR)
        return one
    except (OSError, struct.error):
        # It listens, or is gone; or an older system says less.
        return None
    finally:
        # It is gRPC's.
        found.detach()
