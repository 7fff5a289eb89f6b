"""Who a process says it is: which protocol it speaks, which release it is of, and its own name."""

from __future__ import annotations

import secrets
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 1


def package_version() -> str:
    """Of the installed distribution; empty when it runs from somewhere else."""
    with suppress(PackageNotFoundError):
        return version("outrider")
    return ""


def new_worker_id(role: str) -> str:
    """Made anew at every start: another process at the same address is another worker."""
    return f"{role}-{secrets.token_hex(6)}"
