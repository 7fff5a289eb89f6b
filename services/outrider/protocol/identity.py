"""Who a process says it is: which versions of the protocol it speaks, which release it is of, and its own name."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from outrider.rpc.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """Versions that a process speaks. A new field makes no new one; what an old peer would take amiss does."""

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
    """What keeps this process from working with that one; None when nothing does."""
    theirs = ProtocolRange.of(info)
    if spoken.common(theirs) is not None:
        return None
    return f"protocol_version: {spoken} is spoken here, {theirs} by {info.worker_id}"


def own_info(role: worker_pb2.WorkerRole.ValueType, **more: Any) -> worker_pb2.WorkerInfo:
    """Who this process is, made anew at every start. `more`: fields that only its kind of process knows."""
    return worker_pb2.WorkerInfo(
        protocol_version=SPOKEN.newest,
        min_protocol_version=SPOKEN.oldest,
        role=role,
        worker_id=new_worker_id(role_name(role)),
        version=package_version(),
        **more,
    )


def role_name(role: worker_pb2.WorkerRole.ValueType) -> str:
    """draft, target, …"""
    return worker_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def package_version() -> str:
    """Of the installed distribution; empty when it runs from somewhere else."""
    with suppress(PackageNotFoundError):
        return version("outrider")
    return ""


def new_worker_id(role: str) -> str:
    """Made anew at every start: another process at the same address is another worker."""
    return f"{role}-{secrets.token_hex(6)}"
