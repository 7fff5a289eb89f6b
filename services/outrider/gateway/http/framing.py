"""Refuses HTTP/1.1 requests whose end a proxy in front may see elsewhere than this server (request smuggling).

RFC 9112 lets a server be lenient in these cases. Behind a proxy that reads them differently, a client could then hide a
second request in its first one.
"""

from __future__ import annotations

import re

import h11

# h11 reads requests, but exports no way to see the lines of a head or a trailer as they came.
from h11._receivebuffer import ReceiveBuffer

_LENIENT_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]")
"""A line feed or a carriage return alone (RFC 9112, 2.2), and a folded field (5.2)."""


class StrictConnection(h11.Connection):
    """The server's side of one connection. `next_event` raises RemoteProtocolError also for lenient requests."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_length(event)
        return event


class _StrictLines(ReceiveBuffer):
    """Refuses heads and trailers with lines that only lenient servers read."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self)
        lines = super().maybe_extract_lines()
        if lines is not None and _LENIENT_LINE.search(before[: len(before) - len(self)]):
            raise h11.LocalProtocolError("a line that does not end in CR LF, or a folded one")
        return lines


def _check_length(request: h11.Request) -> None:
    """The body's length is given once (RFC 9112, 6.1)."""
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("transfer-encoding with content-length, or in HTTP/1.0")
