"""Erases what targets have learnt from a tenant's texts, or recorded of them."""

from __future__ import annotations

import asyncio

import grpc
from outrider.metadata import LeaseRecord
from outrider.metadata.tenants.tenants import TenantStore
from outrider.rpc.access.roles import ClusterSecret, Role, credential
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import target_pb2, target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.control.api.routers import RouterLeases
from outrider_controller.control.api.tenants import caller, check_name

_TIMEOUT_S = 10.0


class Histories:
    """Calls every target; keeps no state."""

    def __init__(
        self, leases: RouterLeases, store: TenantStore, secret: ClusterSecret | None, connect: Connect
    ) -> None:
        self._leases = leases
        self._store = store
        self._connect = connect
        self._credential = credential(secret, Role.CONTROL)

    async def delete(self, asked: control.DeleteHistoryRequest) -> control.DeleteHistoryResponse:
        """Raises InvalidRequest, and Unavailable when the audit entry cannot be written: then nothing is erased."""
        tenant = asked.tenant
        check_name("tenant", tenant)
        await self._store.note(f"delete {'samples' if asked.samples else 'history'}", tenant, by=caller())
        request = target_pb2.EraseHistoryRequest(tenant=tenant, samples=asked.samples)
        targets = await self._leases.workers(worker.WORKER_ROLE_TARGET)
        erased = await asyncio.gather(*(self._erase(target, request) for target in targets))
        away = [target.info.worker_id for target, count in zip(targets, erased, strict=True) if count is None]
        return control.DeleteHistoryResponse(num_texts=sum(filter(None, erased)), unreachable_targets=sorted(away))

    async def _erase(self, target: LeaseRecord, request: target_pb2.EraseHistoryRequest) -> int | None:
        """How many texts the target has forgotten; None when it does not answer."""
        async with self._connect(target.address) as channel:
            try:
                stub = target_pb2_grpc.TargetServiceStub(channel)
                answer = await stub.EraseHistory(request, timeout=_TIMEOUT_S, metadata=self._credential)
                return answer.num_texts
            except grpc.RpcError:
                return None
