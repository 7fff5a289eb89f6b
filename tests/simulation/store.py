"""A simulated metadata store: leases that expire, a prefix index, and outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import worker_pb2 as worker

from tests.simulation.network import Host

LEASE_TTL_S = 5.0


@dataclass(slots=True)
class _Lease:
    host: Host
    info: worker.WorkerInfo
    address: str
    load: Callable[[], worker.WorkerLoad]
    beat_s: float
    hashes: set[bytes] = field(default_factory=set)


class SimulatedStore:
    """Implements the parts of the metadata store that routers and workers use."""

    def __init__(self) -> None:
        self.away_until_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, _Lease] = {}
        self._last: list[LeaseRecord] = []
        self._read_s = 0.0

    @property
    def available(self) -> bool:
        return self._loop.time() >= self.away_until_s

    def register(
        self, host: Host, info: worker.WorkerInfo, address: str, load: Callable[[], worker.WorkerLoad]
    ) -> None:
        self._leases[info.worker_id] = _Lease(host, info, address, load, self._loop.time())

    def prefix_changed(self, worker_id: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if (lease := self._leases.get(worker_id)) is not None:
            lease.hashes.update(added)
            lease.hashes.difference_update(removed)

    async def workers(self, role: worker.WorkerRole.ValueType | None = None) -> list[LeaseRecord]:
        if self.available:
            self._expire()
            self._last = [LeaseRecord(x.info, x.load(), x.address, 1) for x in self._leases.values()]
            self._read_s = self._loop.time()
        age_ms = round((self._loop.time() - self._read_s) * 1000)
        return [replace(record, age_ms=age_ms) for record in self._last if role in (None, record.info.role)]

    async def lookup_prefix(
        self, role: worker.WorkerRole.ValueType, hashes: Sequence[bytes], worker_ids: Collection[str]
    ) -> dict[str, int]:
        found: dict[str, int] = {}
        for worker_id, lease in self._leases.items():
            if lease.info.role == role and worker_id in worker_ids:
                count = next((i for i, h in enumerate(hashes) if h not in lease.hashes), len(hashes))
                found[worker_id] = count
        return {worker_id: count for worker_id, count in found.items() if count}

    async def emit(self, kind: str, fields: Mapping[str, str | int | float | bool]) -> None:
        """Events are dropped: only people read them."""

    def _expire(self) -> None:
        now_s = self._loop.time()
        for worker_id, lease in list(self._leases.items()):
            if lease.host.alive and lease.host.silent_until_s <= now_s:
                lease.beat_s = now_s
            elif now_s - lease.beat_s > LEASE_TTL_S:
                del self._leases[worker_id]
