"""Ports for what a test starts and has to name before it listens."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to whoever connects, or asks for any port (Linux: 32768 and up): one of these may be
# somebody else's between our look and our use. Above those of Ray's workers (10002 to 19999).
_FIRST, _LAST = 20_000, 32_767
_RANDOM = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = _RANDOM.randint(_FIRST, _LAST)
            probe.bind((host, port))
            return port
