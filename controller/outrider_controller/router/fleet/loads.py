"""The loads that workers report with their leases, and the room that they leave this router. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

from outrider.metadata import LeaseRecord
from outrider.metadata.workers.lease import HEARTBEAT_S
from outrider.rpc.v1 import control_pb2
from outrider.rpc.v1 import worker_pb2 as worker

# How long a report is used. Afterwards the worker's load may have changed, which is not reported while the metadata
# store is away.
MAX_REPORT_AGE_S = 2 * HEARTBEAT_S


class LoadedWorker(Protocol):
    """A target or a draft in this router's fleet."""

    worker_id: str
    load: worker.WorkerLoad
    """Its report when this router connected to it; empty without a connection."""
    open_sequences: set[int]
    """Those of this router."""


def load_of(record: LeaseRecord) -> worker.WorkerLoad:
    """The reported load; of an old report only whether the worker drains, which is final."""
    return record.load if record.age_ms <= MAX_REPORT_AGE_S * 1000 else _only_leaving(record.load)


def _only_leaving(load: worker.WorkerLoad) -> worker.WorkerLoad:
    return worker.WorkerLoad(draining=load.draining)


class WorkerLoads:
    """The loads of all workers, as of the last leases read."""

    def __init__(self, num_refreshes: int) -> None:
        """`num_refreshes`: reads of the leases for as long as a report is used."""
        self.cordons: dict[str, control_pb2.Cordon] = {}
        """By worker id: workers that operators have taken out of use."""
        self.num_routers = 1
        self._num_refreshes = num_refreshes
        self._reported: dict[str, worker.WorkerLoad] = {}
        self._elsewhere: dict[str, int] = {}
        self._recent: dict[str, deque[int]] = {}
        """By worker id: this router's open sequences there at the last refreshes."""

    def report(self, records: Iterable[LeaseRecord], connected: Collection[str]) -> None:
        """Takes all leases. A connected worker without a lease stays cordoned if it was."""
        self._reported = {r.info.worker_id: load_of(r) for r in records}
        kept = {i: cordon for i, cordon in self.cordons.items() if i not in self._reported and i in connected}
        self.cordons = {**kept, **{r.info.worker_id: r.cordon for r in records if r.cordon is not None}}
        routers = [r for r in records if r.info.role == worker.WORKER_ROLE_ROUTER and not r.load.draining]
        self.num_routers = max(1, len(routers))

    def count_elsewhere(self, workers: Iterable[LoadedWorker]) -> None:
        """Each worker's reported load, less the most sequences that this router had there since.

        A report is up to `MAX_REPORT_AGE_S` old: it does not have the sequences that this router has opened or closed
        meanwhile.
        """
        before, self._recent, self._elsewhere = self._recent, {}, {}
        for one in workers:
            recent = self._recent[one.worker_id] = before.get(one.worker_id) or deque(maxlen=self._num_refreshes)
            recent.append(len(one.open_sequences))
            load = self._reported.get(one.worker_id, worker.WorkerLoad())
            self._elsewhere[one.worker_id] = max(0, load.num_running + load.num_waiting - max(recent))

    def of(self, one: LoadedWorker) -> worker.WorkerLoad:
        """The reported load. Without a lease, which the store may have lost: whether the worker drained at connect."""
        known = self._reported.get(one.worker_id)
        return known if known is not None else _only_leaving(one.load)

    def takes_work(self, one: LoadedWorker) -> bool:
        return one.worker_id not in self.cordons and not self.of(one).draining

    def num_elsewhere(self, one: LoadedWorker) -> int:
        """Sequences that other routers have open there."""
        return self._elsewhere.get(one.worker_id, 0)
