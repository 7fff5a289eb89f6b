"""Checks of HOST:PORT addresses, and whether other machines can reach them. Pure."""

from __future__ import annotations

import ipaddress


def check_address(field: str, address: str) -> None:
    """Raises ValueError unless it is the address of one process: for malformed ones, no port, or all interfaces."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536) or len(address) > 300:
        raise ValueError(f"{field}: {address[:60]!r} is not HOST:PORT")
    if takes_all_interfaces(address):
        raise ValueError(
            f"{field}: {address[:60]!r} means all interfaces; give the address under which others reach this process"
        )


def check_listen(field: str, address: str) -> None:
    """Raises ValueError if no process can listen there. Port 0 lets the system choose one."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536) or len(address) > 300:
        raise ValueError(f"{field}: {address[:60]!r} is not HOST:PORT")


AUTO = "auto"
"""Advertise the bound address or, if that is all interfaces, the one of the interface that leads to the metadata
store."""


def check_advertised(field: str, advertise: str, listen: str) -> None:
    """Checks the advertised address of a process that listens at `listen`. Raises ValueError if others could not reach
    it."""
    if advertise == AUTO:
        return
    if advertise:
        check_address(field, advertise)
    elif takes_all_interfaces(listen):
        raise ValueError(f"{field}: needed where {listen[:60]!r} listens on all interfaces: HOST:PORT, or auto")


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """Splits HOST:PORT. IPv6 hosts are in brackets. Raises ValueError."""
    check_listen(field, address)
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_ip(host: str) -> bool:
    """Whether a host, without brackets, is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach HOST:PORT."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def takes_all_interfaces(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        # Other notations that the system accepts for all interfaces.
        return host in ("", "*", "0")
