"""Which network stack this process runs on, and by which of its interfaces others reach it."""

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
    """Alike for processes that reach each other's loopback interface: of one boot of a machine, in one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        # Not on Linux. One machine has one such name.
        return socket.gethostname()


def address_towards(url: str) -> str:
    """The IP address of the interface that leads to the store at this URL; an IPv6 one in brackets. Asks DNS for the
    store's name, and sends nothing. Raises OSError where there is no way."""
    host, port = _host(_first(url))
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(there)
        own: str = towards.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def has_host(url: str) -> bool:
    """Whether the URL names a host, so that `address_towards` has somewhere to look."""
    return bool(urlsplit(f"//{_first(url)}").hostname)


def is_elsewhere(url: str) -> bool:
    """Whether the store at this URL is reached over a network, as far as the URL says."""
    netloc = urlsplit(url).netloc.rpartition("@")[2]
    return any(not is_loopback(f"{_host(one)[0]}:0") for one in netloc.split(",") if one)


def _first(url: str) -> str:
    """HOST:PORT; of Sentinels the first, for all of them are to be reached."""
    return urlsplit(url).netloc.rpartition("@")[2].split(",")[0]


def _host(netloc: str) -> tuple[str, int]:
    parts = urlsplit(f"//{netloc}")
    if not parts.hostname:
        raise OSError("advertise: auto finds no address, for the metadata store is not reached over a network")
    return parts.hostname, parts.port or _REDIS_PORT
