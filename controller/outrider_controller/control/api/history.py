"""Has erased what targets, routers and volumes keep of a tenant's texts. An order stands in the metadata store: whoever
does not answer is asked until it does, and what was away asks when it returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any

import grpc
from google.protobuf.message import Message
from outrider.errors import NotFound, Unavailable
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.metadata.erasures import Order
from outrider.rpc.access.roles import ClusterSecret, Role, credential
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import attach_pb2, attach_pb2_grpc, target_pb2, target_pb2_grpc, trace_pb2, trace_pb2_grpc
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.control.api.tenants import caller, check_name

log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_ASK_EVERY_S = 2.0


class Histories:
    """Calls every target and router, and attached servers through their routers."""

    def __init__(
        self, store: MetadataStore, secret: ClusterSecret | None, to_target: Connect, to_router: Connect
    ) -> None:
        self._store = store
        self._to_target = to_target
        self._to_router = to_router
        self._credential = credential(secret, Role.CONTROL)
        self._held: dict[Order, set[str]] = defaultdict(set)
        """Volumes of which somebody keeps samples that it has read."""

    async def DeleteHistory(self, asked: control.DeleteHistoryRequest, _: object) -> control.DeleteHistoryResponse:
        """Raises InvalidRequest, and Unavailable when the order cannot be written: then nothing is erased."""
        check_name("tenant", asked.tenant)
        order = await self._store.erasures.order(asked.tenant, samples=asked.samples, by=caller())
        return await self._carry_out(order)

    async def erase_deleted(self, tenant: str) -> list[str]:
        """Carries out what the deletion of the tenant has ordered, and names who has not obeyed yet."""
        orders = [one for one in await self._store.erasures.orders() if one.tenant == tenant]
        answers = await asyncio.gather(*map(self._carry_out, orders))
        return sorted({one for answer in answers for one in answer.pending})

    async def _carry_out(self, order: Order) -> control.DeleteHistoryResponse:
        holders = await self._holders(order)
        counts = await asyncio.gather(*(self._erase(holder, order) for holder in holders))
        away = [one.info.worker_id for one, count in zip(holders, counts, strict=True) if count is None]
        targets = {one.info.worker_id for one in holders if one.info.role == worker.WORKER_ROLE_TARGET}
        return control.DeleteHistoryResponse(
            num_texts=sum(filter(None, counts)),
            unreachable_targets=sorted(targets.intersection(away)),
            pending=await self._pending(order),
        )

    async def ListErasures(self, asked: control.ListErasuresRequest, _: object) -> control.ListErasuresResponse:
        """Raises Unavailable."""
        erasures = [
            control.Erasure(
                tenant=order.tenant,
                samples=order.samples,
                ordered_unix_us=order.at_us,
                pending=await self._pending(order),
            )
            for order in await self._store.erasures.orders()
        ]
        return control.ListErasuresResponse(erasures=erasures)

    async def DeleteVolume(self, asked: control.DeleteVolumeRequest, _: object) -> control.DeleteVolumeResponse:
        """Raises NotFound, Unavailable."""
        if asked.volume_id not in await self._store.erasures.volumes():
            raise NotFound(f"no volume {asked.volume_id[:80]!r}", field="volume_id")
        await self._store.tenants.note("delete volume", asked.volume_id, by=caller())
        await self._store.erasures.forget([asked.volume_id])
        return control.DeleteVolumeResponse()

    async def run(self) -> None:
        """Asks those who have not obeyed, for ever."""
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            try:
                await self._ask_again()
            except Unavailable:
                continue
            except Exception as error:
                log.exception("erasures could not be carried out", exc_info=error)

    async def _ask_again(self) -> None:
        erasures = self._store.erasures
        obeyed = await erasures.who_obeyed()
        for order in await erasures.orders():
            holders = await self._holders(order)
            waiting = [one for one in holders if obeyed.get((one.info.worker_id, order.field), 0) < order.at_us]
            await asyncio.gather(*(self._erase(one, order) for one in waiting))
        known = {one.info.worker_id for one in await self._store.workers()} | (await erasures.volumes()).keys()
        if gone := {holder for holder, _ in obeyed} - known:
            await erasures.forget(gone)

    async def _holders(self, order: Order) -> list[LeaseRecord]:
        targets = await self._store.workers(worker.WORKER_ROLE_TARGET)
        return targets if order.samples else targets + await self._store.workers(worker.WORKER_ROLE_ROUTER)

    async def _pending(self, order: Order) -> list[str]:
        obeyed = await self._store.erasures.who_obeyed()
        named = {one.info.worker_id: one.info.worker_id for one in await self._holders(order)}
        if order.samples:
            for volume_id, where in (await self._store.erasures.volumes()).items():
                why = ": somebody has read samples there" if volume_id in self._held[order] else ""
                named[volume_id] = f"{volume_id} ({where}){why}"
        return sorted(named[one] for one in named if obeyed.get((one, order.field), 0) < order.at_us)

    async def _erase(self, holder: LeaseRecord, order: Order) -> int | None:
        """How many texts the worker has forgotten; None when it does not answer."""
        try:
            if holder.info.role == worker.WORKER_ROLE_ROUTER:
                return await self._erase_traces(holder, order)
            answer = await self._erase_at_target(holder, order)
            if answer.held:
                self._held[order].add(answer.volume_id)
                return int(answer.num_texts)
            self._held[order].discard(answer.volume_id)
            for one in filter(None, (holder.info.worker_id, answer.volume_id)):
                await self._store.erasures.obeyed(one, order)
            return int(answer.num_texts)
        except (grpc.RpcError, Unavailable):
            return None

    async def _erase_traces(self, router: LeaseRecord, order: Order) -> int:
        async with self._to_router(router.address) as channel:
            stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
            request = trace_pb2.EraseTracesRequest(tenant=order.tenant, ordered_unix_us=order.at_us)
            await stub.EraseTraces(request, timeout=_TIMEOUT_S, metadata=self._credential)
        await self._store.erasures.obeyed(router.info.worker_id, order)
        return 0

    async def _erase_at_target(self, target: LeaseRecord, order: Order) -> target_pb2.EraseHistoryResponse:
        request = target_pb2.EraseHistoryRequest(
            tenant=order.tenant, samples=order.samples, ordered_unix_us=order.at_us
        )
        attached = target.info.attached
        async with (self._to_router if attached else self._to_target)(target.address) as channel:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            asked: Message = request
            if attached:
                stub = attach_pb2_grpc.AttachServiceStub(channel)
                asked = attach_pb2.AttachServiceEraseHistoryRequest(worker_id=target.info.worker_id, erasure=request)
            answer: target_pb2.EraseHistoryResponse = await stub.EraseHistory(
                asked, timeout=_TIMEOUT_S, metadata=self._credential
            )
            return answer
