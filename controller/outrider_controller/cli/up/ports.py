"""Ports for processes that are about to start."""

from __future__ import annotations

import random
import socket

# Below the range from which the system takes ports for outgoing connections (32768 on Linux): between our look and the
# process's bind nobody is likely to take one.
_RANGE = range(20_000, 32_000)
_ATTEMPTS = 200
_random = random.SystemRandom()


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Ports:
    """Hands out each port once."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def claim(self, wanted: int = 0) -> int:
        """`wanted`, or a free one for 0. Raises OSError when it is in use."""
        if wanted:
            if wanted in self._taken or not is_free(wanted):
                raise OSError(f"port {wanted} is in use (0 takes any that is free)")
            self._taken.add(wanted)
            return wanted
        for _ in range(_ATTEMPTS):
            port = _random.choice(_RANGE)
            if port not in self._taken and is_free(port):
                self._taken.add(port)
                return port
        raise OSError(f"no free port between {_RANGE.start} and {_RANGE.stop}")
