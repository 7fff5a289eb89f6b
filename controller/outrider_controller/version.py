"""Which protocol this controller speaks, and which release it is of."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 1


def package_version() -> str:
    """Of the installed distribution; empty when it runs from somewhere else."""
    with suppress(PackageNotFoundError):
        return version("outrider")
    return ""
