"""Messages between rank 0 and one follower, framed, on a socket pair.

Not a collective: a follower may wait hours for the next step, which a collective's timeout forbids. And when either
process ends, the stream ends at once.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

_FRAME = struct.Struct("=BQ")


class PeerGone(Exception):
    """The process at the other end has ended."""


class Kind(IntEnum):
    LOAD = 1
    """Rank 0: load this model, with this many KV blocks."""
    READY = 2
    """Follower: loaded."""
    STEP = 3
    """Rank 0: run this step."""
    STOP = 4
    """Rank 0: the group ends."""


class Link:
    """One end. Each direction is used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        first, second = socket.socketpair()
        return cls(first), cls(second)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises PeerGone."""
        try:
            self._socket.sendall(_FRAME.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> tuple[Kind, bytes]:
        """Waits as long as the other process lives. Raises PeerGone, or ValueError for an invalid message."""
        kind, length = _FRAME.unpack(self._read(_FRAME.size))
        return Kind(kind), self._read(length)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Whether the other end closed within `timeout_s` seconds. Messages that still arrive are dropped."""
        self._socket.settimeout(timeout_s)
        try:
            while self._socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(length - len(data))
            except OSError as error:
                raise PeerGone(str(error)) from error
            if not part:
                raise PeerGone("its end of the link is closed")
            data += part
        return bytes(data)
