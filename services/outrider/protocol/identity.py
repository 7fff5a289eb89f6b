"""A process's identity: the protocol versions that it speaks, its release, and its id."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from outrider.metadata.keys import role_name
from outrider.rpc.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """Protocol versions that a process speaks. A change that an old peer would misread needs a new version; a new field
    does not."""

    oldest: int
    newest: int

    @classmethod
    def of(cls, info: worker_pb2.WorkerInfo) -> ProtocolRange:
        return cls(info.min_protocol_version or info.protocol_version, info.protocol_version)

    def common(self, other: ProtocolRange) -> int | None:
        """The newest version that both speak."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest, 1) else None

    def __str__(self) -> str:
        return f"{self.newest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


# A release speaks its own version and the one before, so that processes may be replaced one by one.
SPOKEN = ProtocolRange(oldest=1, newest=1)


def protocol_problem(info: worker_pb2.WorkerInfo, spoken: ProtocolRange = SPOKEN) -> str | None:
    """Why this process cannot work with that one; None when it can."""
    theirs = ProtocolRange.of(info)
    if spoken.common(theirs) is not None:
        return None
    return f"protocol_version: {spoken} is spoken here, {theirs} by {info.worker_id}"


def own_info(role: worker_pb2.WorkerRole.ValueType, **more: Any) -> worker_pb2.WorkerInfo:
    """This process's WorkerInfo, with a new id at every start. `more`: fields that only its kind of process has."""
    return worker_pb2.WorkerInfo(
        protocol_version=SPOKEN.newest,
        min_protocol_version=SPOKEN.oldest,
        role=role,
        worker_id=new_worker_id(role_name(role)),
        version=package_version(),
        **more,
    )


def package_version() -> str:
    """Version of the installed distribution; empty when it is not installed."""
    with suppress(PackageNotFoundError):
        return version("outrider")
    return ""


def new_worker_id(role: str) -> str:
    """A new id at every start: another process at the same address is another worker."""
    return f"{role}-{secrets.token_hex(6)}"
