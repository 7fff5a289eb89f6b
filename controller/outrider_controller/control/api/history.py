"""Erases what targets have learnt from a tenant's texts, or recorded of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.metadata.tenants.tenants import TenantStore
from outrider.rpc.access.roles import ClusterSecret, Role, credential
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import attach_pb2, attach_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.control.api.tenants import caller, check_name

_TIMEOUT_S = 10.0


class Histories:
    """Calls every target, and attached servers through their routers; keeps no state."""

    def __init__(
        self,
        leases: MetadataStore,
        store: TenantStore,
        secret: ClusterSecret | None,
        to_target: Connect,
        to_router: Connect,
    ) -> None:
        self._leases = leases
        self._store = store
        self._to_target = to_target
        self._to_router = to_router
        self._credential = credential(secret, Role.CONTROL)

    async def DeleteHistory(self, asked: control.DeleteHistoryRequest, _: object) -> control.DeleteHistoryResponse:
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
        attached = target.info.attached
        async with (self._to_router if attached else self._to_target)(target.address) as channel:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            asked: Message = request
            if attached:
                stub = attach_pb2_grpc.AttachServiceStub(channel)
                asked = attach_pb2.AttachServiceEraseHistoryRequest(worker_id=target.info.worker_id, erasure=request)
            try:
                answer = await stub.EraseHistory(asked, timeout=_TIMEOUT_S, metadata=self._credential)
                return int(answer.num_texts)
            except grpc.RpcError:
                return None
