"""ControlService: the operators' API, and the process that serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from signal import Signals
from typing import Any, TypeAlias

import grpc
from outrider.errors import Unauthenticated, Unavailable
from outrider.gateway.tenants.auth import KeyGuard
from outrider.metadata import MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.protocol.identity import own_info
from outrider.rpc.access.credentials import cluster_port
from outrider.rpc.access.roles import ANYBODY, NO_ROLES, Access, Caller, Role, RoleGuard
from outrider.rpc.channel import connect_to
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import control_pb2_grpc, policy_pb2_grpc, usage_pb2
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import background
from outrider.telemetry.logging import name_worker
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops, serving_ops

from outrider_controller.control.alerts.report import AlertMetrics, AlertReport, WebhookMetrics
from outrider_controller.control.alerts.webhook import Webhook
from outrider_controller.control.api.events import EventFeed
from outrider_controller.control.api.history import Histories
from outrider_controller.control.api.releases import Releases
from outrider_controller.control.api.routers import Routers
from outrider_controller.control.api.speculation import SpeculationCalls
from outrider_controller.control.api.tenants import Tenancy
from outrider_controller.control.api.usage import bill
from outrider_controller.control.api.workers import Workers
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.console.page import Console
from outrider_controller.control.console.vocabulary import ConsoleVocabulary
from outrider_controller.control.fleet import FleetWatch
from outrider_controller.control.plan.demand import Demand, TenantMetrics
from outrider_controller.control.plan.follow import SERVICE as POLICY_SERVICE
from outrider_controller.control.plan.follow import PolicyServicer
from outrider_controller.control.plan.leading import PlanLeader
from outrider_controller.process import bound

log = logging.getLogger(__name__)

SERVICE = "outrider.rpc.v1.ControlService"


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class OperatorGuard:
    """Checks callers. Without certificates and a cluster secret every client of the port is an operator, which is meant
    for a single machine."""

    cluster: RoleGuard
    keys: KeyGuard

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        if not self.cluster.asks:
            return ANYBODY
        # With a certificate of any role, an API key can still give access that the role does not.
        if not roles.isdisjoint(access.roles) or (roles and not token) or self.cluster.roles_of(token):
            return await self.cluster.admit(access, token, roles)
        if not token:
            message = "no credential: set OUTRIDER_OPERATOR_TOKEN, to the operator's token or an API key for admins"
            raise Unauthenticated(message, reason="NO_CREDENTIAL")
        return await self.keys.admit(access, token)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Translates, delegates, translates back."""

    def __init__(
        self, store: MetadataStore, events: EventWriter, routers: Routers, leader: PlanLeader, histories: Histories
    ) -> None:
        self._store = store
        self._routers = routers
        self._workers = Workers(store, events)
        self._releases = Releases(store.drafts, store, events)
        self._speculation = SpeculationCalls(store.plans, leader, self._releases)
        self._tenancy = Tenancy(store.tenants, events)
        self._histories = histories
        self._feed = EventFeed(store)

    async def ListWorkers(self, request: control.ListWorkersRequest, context: Context) -> control.ListWorkersResponse:
        workers = await self._workers.list(request.role)
        # Read after the leases: reading those is what detects a missing store.
        return control.ListWorkersResponse(workers=workers, metadata_available=self._store.available)

    async def GetWorker(self, request: control.GetWorkerRequest, context: Context) -> control.GetWorkerResponse:
        status = await self._workers.get(request.worker_id)
        return control.GetWorkerResponse(worker=status, metadata_available=self._store.available)

    async def CordonWorker(
        self, request: control.CordonWorkerRequest, context: Context
    ) -> control.CordonWorkerResponse:
        return control.CordonWorkerResponse(worker=await self._workers.cordon(request.worker_id, request.reason))

    async def UncordonWorker(
        self, request: control.UncordonWorkerRequest, context: Context
    ) -> control.UncordonWorkerResponse:
        return control.UncordonWorkerResponse(was_cordoned=await self._workers.uncordon(request.worker_id))

    async def DrainWorker(self, request: control.DrainWorkerRequest, context: Context) -> control.DrainWorkerResponse:
        status = await self._workers.cordon(request.worker_id, request.reason, request.grace_s)
        return control.DrainWorkerResponse(worker=status)

    async def ListSequences(
        self, request: control.ListSequencesRequest, context: Context
    ) -> control.ListSequencesResponse:
        return await self._routers.sequences(request)

    async def ListActivities(
        self, request: control.ListActivitiesRequest, context: Context
    ) -> control.ListActivitiesResponse:
        return await self._routers.activities()

    async def GetTrace(
        self, request: control.ControlServiceGetTraceRequest, context: Context
    ) -> control.ControlServiceGetTraceResponse:
        return control.ControlServiceGetTraceResponse(traces=await self._routers.trace(request.request_id))

    async def ExportTraces(
        self, request: control.ControlServiceExportTracesRequest, context: Context
    ) -> AsyncIterator[control.ControlServiceExportTracesResponse]:
        async for found in self._routers.traces(request.filter):
            yield control.ControlServiceExportTracesResponse(trace=found)

    async def ListTenants(self, request: control.ListTenantsRequest, context: Context) -> control.ListTenantsResponse:
        return await self._tenancy.list(request)

    async def GetTenant(self, request: control.GetTenantRequest, context: Context) -> control.GetTenantResponse:
        return control.GetTenantResponse(tenant=await self._tenancy.get(request.name))

    async def PutTenants(self, request: control.PutTenantsRequest, context: Context) -> control.PutTenantsResponse:
        return await self._tenancy.put(request)

    async def DeleteTenant(
        self, request: control.DeleteTenantRequest, context: Context
    ) -> control.DeleteTenantResponse:
        return control.DeleteTenantResponse(num_revoked_keys=await self._tenancy.delete(request.name))

    async def DeleteHistory(
        self, request: control.DeleteHistoryRequest, context: Context
    ) -> control.DeleteHistoryResponse:
        return await self._histories.delete(request)

    async def ListKeys(self, request: control.ListKeysRequest, context: Context) -> control.ListKeysResponse:
        return await self._tenancy.keys(request)

    async def ListAudit(self, request: control.ListAuditRequest, context: Context) -> control.ListAuditResponse:
        return await self._tenancy.audit(request)

    async def CreateKey(self, request: control.CreateKeyRequest, context: Context) -> control.CreateKeyResponse:
        return await self._tenancy.create_key(request)

    async def RevokeKey(self, request: control.RevokeKeyRequest, context: Context) -> control.RevokeKeyResponse:
        return control.RevokeKeyResponse(info=await self._tenancy.revoke_key(request.id))

    async def SetSpeculation(
        self, request: control.SetSpeculationRequest, context: Context
    ) -> control.SetSpeculationResponse:
        return control.SetSpeculationResponse(override=await self._speculation.set(request))

    async def Explain(self, request: control.ExplainRequest, context: Context) -> control.ExplainResponse:
        return await self._speculation.explain(request.tenant)

    async def WatchEvents(
        self, request: control.WatchEventsRequest, context: Context
    ) -> AsyncIterator[control.WatchEventsResponse]:
        async with aclosing(self._feed.watch(request)) as responses:
            async for response in responses:
                yield response

    async def ListDrafts(self, request: control.ListDraftsRequest, context: Context) -> control.ListDraftsResponse:
        return control.ListDraftsResponse(drafts=await self._releases.versions(request.draft))

    async def StartRollout(
        self, request: control.StartRolloutRequest, context: Context
    ) -> control.StartRolloutResponse:
        return control.StartRolloutResponse(rollout=await self._releases.start(request))

    async def EndRollout(self, request: control.EndRolloutRequest, context: Context) -> control.EndRolloutResponse:
        return control.EndRolloutResponse(rollout=await self._releases.end(request))

    async def DeleteDraft(self, request: control.DeleteDraftRequest, context: Context) -> control.DeleteDraftResponse:
        return control.DeleteDraftResponse(draft=await self._releases.delete(request.draft))

    async def GetUsage(self, request: usage_pb2.GetUsageRequest, context: Context) -> usage_pb2.GetUsageResponse:
        return await bill(self._store.ledger, request)


def _cluster(config: ControlConfig) -> RoleGuard:
    return RoleGuard(config.secret, certificates=config.tls is not None)


@dataclass(frozen=True, slots=True)
class RunningControl:
    life: ServerLife
    demand: Demand

    @property
    def address(self) -> str:
        return self.life.address

    @property
    def draining(self) -> asyncio.Event:
        return self.life.draining


@asynccontextmanager
async def running_control(
    config: ControlConfig, store: MetadataStore, signals: Sequence[Signals] = ()
) -> AsyncIterator[RunningControl]:
    """Serves until the block is left; one of `signals` drains it. Raises OSError if the address cannot be bound."""
    info = own_info(worker.WORKER_ROLE_CONTROL)
    async with AsyncExitStack() as stack:
        ops = Ops("control", config)
        MetadataCollector(ops.registry, lambda: store.available, lambda: asdict(store.counters))
        events = await stack.enter_async_context(EventWriter(store).running())
        webhook_metrics = WebhookMetrics(ops.registry)
        webhook = Webhook(config.webhook, webhook_metrics.count) if config.webhook.url else None
        if webhook is not None:
            await stack.enter_async_context(background(webhook.run(), "webhook"))
        report = AlertReport(events, webhook)
        demand = Demand(ops.registry)
        leader = PlanLeader(info.worker_id, store.plans, store.tenants, events, demand, store, store.drafts, report)
        TenantMetrics(ops.registry, lambda: leader.planner)
        AlertMetrics(ops.registry, lambda: leader.announcements.alerts.active)
        routers = Routers(store, config.secret, connect_to(Role.ROUTER, config.tls))
        links = connect_to(Role.TARGET, config.tls), connect_to(Role.ROUTER, config.tls)
        histories = Histories(store, store.tenants, config.secret, *links)
        guard = OperatorGuard(_cluster(config), KeyGuard(store.tenants, required=True))
        refused = RefusedCalls(ops.registry, [SERVICE, POLICY_SERVICE])
        handshakes = Handshakes(ops.registry)
        server = create_server(guard=guard, strict=[SERVICE], on_refused=refused.count, on_tls_call=handshakes.called)
        servicer = ControlServicer(store, events, routers, leader, histories)
        control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(leader), server)
        services, credentials = [SERVICE, POLICY_SERVICE], cluster_port(config.tls, handshakes.began)
        life = await stack.enter_async_context(
            serving(
                server,
                config.listen,
                services=services,
                signals=signals,
                credentials=credentials,
                grace_s=config.drain_timeout_s,
            )
        )
        ops.ready["server"] = lambda: life.problem
        ops.pages.update(Console(servicer, store, ConsoleVocabulary(store, routers)).pages())
        await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await life.ready()
        # Decides who leads before the first call of routers and operators.
        with suppress(Unavailable):
            await leader.tick()
        await stack.enter_async_context(store.register(info, config.advertised(life.address), worker.WorkerLoad))
        await stack.enter_async_context(background(leader.run(), "plan"))
        watch = FleetWatch(store, store.cordons, events, leads=lambda: leader.epoch > 0)
        await stack.enter_async_context(background(watch.run(), "watch fleet"))
        name_worker(info.worker_id)
        log.info("control plane %s listens on %s", info.worker_id, life.address)
        yield RunningControl(life, demand)


@asynccontextmanager
async def control_process(config: ControlConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningControl]:
    """Runs a control plane until the end of the block."""
    async with (
        MetadataStore.connect(config.metadata_url) as store,
        bound(lambda: running_control(config, store, signals)) as control,
    ):
        yield control
