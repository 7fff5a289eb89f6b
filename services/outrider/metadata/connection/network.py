"""The network stack of this process, and the address at which others reach it."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from outrider.address import is_loopback

_REDIS_PORT = 6379


@cache
def own_network() -> str:
    """Equal for processes that reach each other's loopback interface: one boot of a machine and one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        # Not on Linux. A machine has one such name.
        return socket.gethostname()


def address_towards(url: str) -> str:
    """The IP address of the interface on the route to the store at this URL; an IPv6 one in brackets. Only resolves the
    store's name, and sends it nothing. Raises OSError if there is no route."""
    host, port = _host(_first(url))
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(there)
        own: str = towards.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def has_host(url: str) -> bool:
    """Whether the URL names a host, as `address_towards` needs."""
    return bool(urlsplit(f"//{_first(url)}").hostname)


def is_elsewhere(url: str) -> bool:
    """Whether the URL's store is reached over a network."""
    netloc = urlsplit(url).netloc.rpartition("@")[2]
    return any(not is_loopback(f"{_host(one)[0]}:0") for one in netloc.split(",") if one)


def _first(url: str) -> str:
    """HOST:PORT; the first one of Sentinels, as all must be reachable."""
    return urlsplit(url).netloc.rpartition("@")[2].split(",")[0]


def _host(netloc: str) -> tuple[str, int]:
    parts = urlsplit(f"//{netloc}")
    if not parts.hostname:
        raise OSError("advertise: auto finds no address, for the metadata store is not reached over a network")
    return parts.hostname, parts.port or _REDIS_PORT
