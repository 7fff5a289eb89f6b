"""ControlService: the operators' API, and the process that serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from signal import Signals
from typing import Any

import grpc
from outrider.errors import Unauthenticated, Unavailable
from outrider.gateway.tenants.auth import KeyGuard
from outrider.metadata import MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.protocol.identity import own_info
from outrider.rpc.access.credentials import cluster_port
from outrider.rpc.access.roles import ANYBODY, NO_ROLES, Access, Caller, Role, RoleGuard
from outrider.rpc.channel import connect_to
from outrider.rpc.link import read_message, read_stream, write_whole
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import control_pb2_grpc, policy_pb2_grpc
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import background, until_first_ends
from outrider.telemetry.logging import name_worker
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops, serving_ops

from outrider_controller.control.alerts.report import AlertMetrics
from outrider_controller.control.api.events import EventFeed
from outrider_controller.control.api.history import Histories
from outrider_controller.control.api.releases import Releases
from outrider_controller.control.api.routers import Routers
from outrider_controller.control.api.speculation import SpeculationCalls
from outrider_controller.control.api.tenants import Tenancy
from outrider_controller.control.api.usage import Bills
from outrider_controller.control.api.workers import Workers
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.console.page import Console
from outrider_controller.control.console.vocabulary import ConsoleVocabulary
from outrider_controller.control.fleet import FleetWatch
from outrider_controller.control.plan.demand import Demand, TenantMetrics
from outrider_controller.control.plan.followers import Follower
from outrider_controller.control.plan.leading import PlanLeader
from outrider_controller.process import bound

log = logging.getLogger(__name__)

SERVICE, POLICY_SERVICE = "outrider.rpc.v1.ControlService", "outrider.rpc.v1.PolicyService"


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


class ControlServicer:
    """Each call is a method of one of its parts, and has its name there."""

    def __init__(self, *parts: object) -> None:
        self._parts = parts

    def __getattr__(self, call: str) -> Any:
        for part in self._parts:
            if hasattr(part, call):
                return getattr(part, call)
        raise AttributeError(f"no part answers {call}")


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """The routers' calls: translates between messages and the plan's leader."""

    def __init__(self, leader: PlanLeader) -> None:
        self._leader = leader

    # Written with `context.write` and not as a generator: a cancelled call then ends inside its coroutine, at once.
    async def Follow(  # type: ignore[override]
        self, requests: AsyncIterator[policy.FollowRequest], context: Any
    ) -> None:
        first = await read_message(context)
        if first is grpc.aio.EOF:
            return
        follower = self._leader.follow(first.epoch)
        self._leader.received(follower, first)
        try:
            received = partial(self._leader.received, follower)
            await until_first_ends(read_stream(context, received), self._write(follower, context))
        finally:
            self._leader.followers.discard(follower)

    async def _write(self, follower: Follower, context: Any) -> None:
        while True:
            decisions = await follower.next()
            await write_whole(context, policy.FollowResponse(epoch=self._leader.epoch, decisions=decisions))


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
        demand = Demand(ops.registry)
        leader = PlanLeader(info.worker_id, store, events, demand)
        TenantMetrics(ops.registry, lambda: leader.planner)
        AlertMetrics(ops.registry, lambda: leader.announcements.alerts.active)
        routers = Routers(store, config.secret, connect_to(Role.ROUTER, config.tls))
        links = connect_to(Role.TARGET, config.tls), connect_to(Role.ROUTER, config.tls)
        histories = Histories(store, config.secret, *links)
        cluster = RoleGuard(config.secret, certificates=config.tls is not None)
        guard = OperatorGuard(cluster, KeyGuard(store.tenants, required=True))
        refused = RefusedCalls(ops.registry, [SERVICE, POLICY_SERVICE])
        handshakes = Handshakes(ops.registry)
        server = create_server(guard=guard, strict=[SERVICE], on_refused=refused.count, on_tls_call=handshakes.called)
        releases = Releases(store.drafts, store, events)
        servicer: Any = ControlServicer(
            Workers(store, events),
            routers,
            Tenancy(store.tenants, events, histories.erase_deleted),
            histories,
            SpeculationCalls(store.plans, leader, releases),
            releases,
            Bills(store.ledger),
            EventFeed(store),
        )
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
        ops.pages.update(Console(servicer, store, ConsoleVocabulary(store, routers), guard).pages())
        await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await life.ready()
        # Decides who leads before the first call of routers and operators.
        with suppress(Unavailable):
            await leader.tick()
        await stack.enter_async_context(store.register(info, config.advertised(life.address), worker.WorkerLoad))
        await stack.enter_async_context(background(leader.run(), "plan"))
        watch = FleetWatch(store, store.cordons, events, leads=lambda: leader.epoch > 0)
        await stack.enter_async_context(background(watch.run(), "watch fleet"))
        await stack.enter_async_context(background(histories.run(), "erase what was ordered"))
        name_worker(info.worker_id)
        log.info("control plane %s listens on %s", info.worker_id, life.address)
        yield RunningControl(life, demand)


@asynccontextmanager
async def control_process(config: ControlConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningControl]:
    """Runs a control plane until the end of the block."""
    async with (
        MetadataStore.connect(config.metadata_url, keys_required_file=config.keys_required_file) as store,
        bound(lambda: running_control(config, store, signals)) as control,
    ):
        yield control
