"""The operators' calls on workers: show, cordon, drain, uncordon."""

from __future__ import annotations

import time

from outrider.errors import InvalidRequest, NotFound
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.metadata.keys import role_name
from outrider.metadata.workers.directory import MAX_ID_CHARS
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.control.api.tenants import caller
from outrider_controller.control.fleet import FleetChange

MAX_REASON_CHARS = 200
MAX_GRACE_S = 86_400
_CORDONED = (worker.WORKER_ROLE_DRAFT, worker.WORKER_ROLE_TARGET, worker.WORKER_ROLE_ROUTER)


class Workers:
    """Workers are named by the ids in their leases."""

    def __init__(self, store: MetadataStore, events: EventWriter) -> None:
        self._store = store
        self._events = events

    async def ListWorkers(self, request: control.ListWorkersRequest, _: object) -> control.ListWorkersResponse:
        if request.role not in worker.WorkerRole.values():
            raise InvalidRequest("role", f"{request.role} is not a role")
        workers = list(map(status_of, await self._store.workers(request.role or None)))
        # Read after the leases: reading those is what detects a missing store.
        for (role, worker_id), reason in self._store.refused.items():
            workers.append(control.WorkerStatus(info=worker.WorkerInfo(role=role, worker_id=worker_id), refused=reason))
        return control.ListWorkersResponse(workers=workers, metadata_available=self._store.available)

    async def GetWorker(self, request: control.GetWorkerRequest, _: object) -> control.GetWorkerResponse:
        status = status_of(await self._find(request.worker_id))
        return control.GetWorkerResponse(worker=status, metadata_available=self._store.available)

    async def CordonWorker(self, request: control.CordonWorkerRequest, _: object) -> control.CordonWorkerResponse:
        return control.CordonWorkerResponse(worker=await self._cordon(request.worker_id, request.reason))

    async def DrainWorker(self, request: control.DrainWorkerRequest, _: object) -> control.DrainWorkerResponse:
        status = await self._cordon(request.worker_id, request.reason, request.grace_s)
        return control.DrainWorkerResponse(worker=status)

    async def _cordon(self, worker_id: str, reason: str, grace_s: int | None = None) -> control.WorkerStatus:
        """`grace_s`: also drains it; after this time its sequences move to other workers."""
        _check_reason(reason)
        if grace_s is not None and grace_s > MAX_GRACE_S:
            raise InvalidRequest("grace_s", f"{grace_s}; at most {MAX_GRACE_S}")
        record = await self._find(worker_id)
        if record.info.role not in _CORDONED:
            role = role_name(record.info.role)
            message = f"{worker_id} is a {role}: only drafts, targets and routers are given work that could be withheld"
            raise InvalidRequest("worker_id", message, reason="NOT_CORDONABLE")
        if record.info.attached:
            message = f"{worker_id} takes its requests itself: withhold them there"
            raise InvalidRequest("worker_id", message, reason="NOT_CORDONABLE")
        # The drain of a cordoned worker keeps the cordon's reason if it gives none.
        reason = reason or (record.cordon.reason if record.cordon is not None else "")
        now_ms = round(time.time() * 1000)
        cordon = control.Cordon(
            worker_id=worker_id,
            reason=reason,
            by=caller(),
            since_unix_ms=now_ms,
            hand_over_unix_ms=0 if grace_s is None else now_ms + 1000 * grace_s,
        )
        await self._store.cordons.put(cordon, "cordon worker" if grace_s is None else "drain worker")
        FleetChange(EventKind.WORKER_CORDONED, record, reason, caller(), grace_s).tell(self._events)
        return status_of(await self._find(worker_id))

    async def UncordonWorker(self, request: control.UncordonWorkerRequest, _: object) -> control.UncordonWorkerResponse:
        """Raises NotFound when there is neither such a worker nor a cordon for it."""
        worker_id = request.worker_id
        _check_id(worker_id)
        removed = await self._store.cordons.remove(worker_id, caller())
        if removed:
            self._events.emit(EventKind.WORKER_UNCORDONED, {"worker_id": worker_id, "by": caller()})
        else:
            await self._find(worker_id)
        return control.UncordonWorkerResponse(was_cordoned=removed)

    async def _find(self, worker_id: str) -> LeaseRecord:
        _check_id(worker_id)
        for record in await self._store.workers():
            if record.info.worker_id == worker_id:
                return record
        raise NotFound(f"no worker {worker_id!r} holds a lease", reason="UNKNOWN_WORKER", field="worker_id")


def status_of(record: LeaseRecord) -> control.WorkerStatus:
    return control.WorkerStatus(
        info=record.info,
        load=record.load,
        address=record.address,
        age_ms=record.age_ms,
        pid=record.pid,
        cordon=record.cordon,
    )


def _check_id(worker_id: str) -> None:
    if not (0 < len(worker_id) <= MAX_ID_CHARS and worker_id.isascii() and worker_id.isprintable()):
        raise InvalidRequest("worker_id", f"{worker_id[:40]!r} is not 1 to {MAX_ID_CHARS} printable ASCII characters")


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARS or not (reason.isprintable() or not reason):
        raise InvalidRequest("reason", f"has to be one line of at most {MAX_REASON_CHARS} characters")
