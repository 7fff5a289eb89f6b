"""The known live workers. Pure: the clock is an argument.

A known lease counts until its term ends or it is given back. So if the store loses its data, live workers do not
disappear before they can register again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from google.protobuf.message import DecodeError

from outrider.address import check_address, is_loopback
from outrider.metadata.connection.network import own_network
from outrider.metadata.workers.lease_check import MAX_LEASE_BYTES, check_status
from outrider.rpc.v1 import control_pb2, worker_pb2

LEASE_TTL_S = 5.0
MAX_ID_CHARS = 128
_MAX_REFUSED = 100

Key: TypeAlias = "tuple[worker_pb2.WorkerRole.ValueType, str]"
"""Role and worker id."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One worker as its last heartbeat described it."""

    info: worker_pb2.WorkerInfo
    load: worker_pb2.WorkerLoad
    address: str
    """HOST:PORT."""
    pid: int
    age_ms: int = 0
    """Age of that heartbeat, by the store's clock."""
    cordon: control_pb2.Cordon | None = None

    def __post_init__(self) -> None:
        check_id(self.info.worker_id)
        check_address("address", self.address)

    @property
    def key(self) -> Key:
        return self.info.role, self.info.worker_id

    @property
    def takes_work(self) -> bool:
        return self.cordon is None and not self.load.draining

    def encode(self) -> bytes:
        status = control_pb2.WorkerStatus(
            info=self.info, load=self.load, address=self.address, pid=self.pid, network=own_network()
        )
        return status.SerializeToString()


def decode_lease(key: Key, value: bytes, cordon: bytes = b"") -> LeaseRecord:
    """Raises ValueError when the record is damaged, cannot be a worker's, or belongs to another key."""
    if len(value) + len(cordon) > MAX_LEASE_BYTES:
        raise ValueError(f"lease: {len(value) + len(cordon)} bytes; at most {MAX_LEASE_BYTES} are allowed")
    try:
        status = control_pb2.WorkerStatus.FromString(value)
        cordoned = control_pb2.Cordon.FromString(cordon) if cordon else None
    except DecodeError as error:
        raise ValueError(f"lease: {error}") from None
    # Of the cordon only what lies in its own key counts.
    status.ClearField("cordon")
    if cordoned is not None:
        status.cordon.CopyFrom(cordoned)
    check_status(status)
    if is_loopback(status.address) and status.network not in ("", own_network()):
        raise ValueError(f"lease: {status.address} of {status.info.worker_id} is the loopback interface of elsewhere")
    record = LeaseRecord(status.info, status.load, status.address, status.pid, cordon=cordoned)
    if record.key != key:
        raise ValueError(f"lease: the record of {record.key} lies under {key}")
    return record


def check_id(worker_id: str) -> None:
    if not (0 < len(worker_id) <= MAX_ID_CHARS and worker_id.isascii() and worker_id.isprintable()):
        raise ValueError(f"worker_id: {worker_id[:40]!r} is not 1 to {MAX_ID_CHARS} printable ASCII characters")


@dataclass(frozen=True, slots=True)
class LeaseRead:
    """The result of one read of one key."""

    key: Key
    record: LeaseRecord | None
    """None: the lease was given back, or is refused."""
    ttl_s: float = 0.0
    problem: str = ""
    """Why the lease is refused."""


@dataclass(slots=True)
class _Known:
    record: LeaseRecord
    renewed_s: float
    until_s: float


@dataclass(slots=True)
class WorkerDirectory:
    given_back: frozenset[Key] = frozenset()
    """Leases that were given back, by the last read: their workers were stopped."""
    refused: Mapping[Key, str] = field(default_factory=dict)
    """Leases that cannot be a worker's, by the last read, with the reason. They count for nothing."""
    _known: dict[Key, _Known] = field(default_factory=dict)

    def update(self, reads: Collection[LeaseRead], now_s: float) -> None:
        self.given_back = frozenset(seen.key for seen in reads if seen.record is None and not seen.problem)
        self.refused = dict(itertools.islice(((s.key, s.problem) for s in reads if s.problem), _MAX_REFUSED))
        for seen in reads:
            if seen.record is None:
                self._known.pop(seen.key, None)
            else:
                until_s = now_s + seen.ttl_s
                self._known[seen.key] = _Known(seen.record, until_s - LEASE_TTL_S, until_s)

    def expire(self, now_s: float) -> None:
        self._known = {key: known for key, known in self._known.items() if known.until_s > now_s}

    def extend(self, now_s: float) -> None:
        """To be called after an outage: gives every worker one more term to register again."""
        for known in self._known.values():
            known.until_s = max(known.until_s, now_s + LEASE_TTL_S)

    def records(self, role: worker_pb2.WorkerRole.ValueType | None, now_s: float) -> list[LeaseRecord]:
        """Live workers of one role, or all, ordered by role and id."""
        return [
            replace(known.record, age_ms=max(0, round((now_s - known.renewed_s) * 1000)))
            for key, known in sorted(self._known.items())
            if role is None or key[0] == role
        ]
