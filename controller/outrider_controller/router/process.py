"""A router's process: its parts in order, the server, and the drain at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from signal import Signals

from outrider.metadata import MetadataStore
from outrider.metadata.tenants.ledger import ATTACHED
from outrider.protocol.identity import own_info
from outrider.rpc.access.credentials import cluster_port
from outrider.rpc.access.roles import Role, RoleGuard
from outrider.rpc.channel import connect_to
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import attach_pb2_grpc, router_pb2_grpc, trace_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.collector import gc_frozen
from outrider.runtime.supervision import background
from outrider.telemetry.logging import name_worker
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops, serving_ops
from outrider.telemetry.tracing import open_tracing
from prometheus_client import CollectorRegistry

from outrider_controller.process import bound
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import SERVICE as TRACE_SERVICE
from outrider_controller.router.observe.tracing import OnEnd, Traces, TraceServicer
from outrider_controller.router.observe.usage import LedgerWriter
from outrider_controller.router.requests.attaching import SERVICE as ATTACH_SERVICE
from outrider_controller.router.requests.attaching import AttachServicer
from outrider_controller.router.requests.dispatcher import Dispatcher
from outrider_controller.router.requests.plan_follower import PlanFollower
from outrider_controller.router.requests.service import SERVICE, RouterServicer

log = logging.getLogger(__name__)
# How long a starting router waits for the control plane's first decisions.
_PLAN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningRouter:
    worker_id: str
    life: ServerLife
    dispatcher: Dispatcher
    registry: CollectorRegistry

    @property
    def address(self) -> str:
        return self.life.address

    @property
    def draining(self) -> asyncio.Event:
        return self.life.draining

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests; returns when the running ones have finished, or after `timeout_s`."""
        await self.life.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.dispatcher.idle()


def _span_writer(stack: AsyncExitStack) -> OnEnd | None:
    """What makes the spans of a request that has ended; None where no collector wants them."""
    tracing = open_tracing("outrider-router")
    if tracing is None:
        return None
    # Imported here: its dependencies are installed only where spans are wanted.
    from outrider_controller.router.observe.spans import SpanWriter

    writer = SpanWriter(tracing)
    stack.push_async_callback(asyncio.to_thread, writer.close)
    return writer.ended


@asynccontextmanager
async def running_router(
    config: RouterConfig, store: MetadataStore, signals: Sequence[Signals] = ()
) -> AsyncIterator[RunningRouter]:
    """Serves until the block is left; one of `signals` drains it. Raises OSError if the address cannot be bound."""
    ops = Ops("router", config)
    info = own_info(worker.WORKER_ROLE_ROUTER, max_sequences=config.admission.max_sessions)
    async with AsyncExitStack() as stack:
        telemetry = RouterTelemetry(ops.registry, store)
        await stack.enter_async_context(telemetry.events.running())
        connect = connect_to(Role.TARGET, config.tls)
        # Before the dispatcher: requests that end as it closes still have their spans written.
        traces = Traces(config.traces, info.worker_id, _span_writer(stack))
        dispatcher = await stack.enter_async_context(Dispatcher(store, config, telemetry, traces, connect).running())
        await stack.enter_async_context(LedgerWriter(dispatcher.usage, store.ledger, info.worker_id).running())
        by_servers = LedgerWriter(dispatcher.attached_usage, store.ledger, f"{ATTACHED}{info.worker_id}")
        await stack.enter_async_context(by_servers.running())
        draining = asyncio.Event()
        salt_key = config.cache_salt_key or secrets.token_bytes(32)
        servicer = RouterServicer(dispatcher, telemetry, config, salt_key, draining)
        attaching = AttachServicer(dispatcher, store, draining)
        services = [SERVICE, TRACE_SERVICE, ATTACH_SERVICE]
        refused = RefusedCalls(ops.registry, services)
        guard = RoleGuard(config.secret, certificates=config.tls is not None)
        handshakes = Handshakes(ops.registry)
        server = create_server(guard=guard, on_refused=refused.count, on_tls_call=handshakes.called)
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(traces), server)
        attach_pb2_grpc.add_AttachServiceServicer_to_server(attaching, server)
        credentials = cluster_port(config.tls, handshakes.began)
        life = await stack.enter_async_context(
            serving(
                server, config.listen, services=services, signals=signals, draining=draining, credentials=credentials
            )
        )
        attaching.address = config.advertised(life.address)
        MetadataCollector(ops.registry, lambda: store.available, lambda: asdict(store.counters))
        ops.ready["server"] = lambda: life.problem
        ops.ready["targets"] = lambda: dispatcher.fleet.problem
        await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await life.ready()
        control = connect_to(Role.CONTROL, config.tls)
        follower = PlanFollower(info.worker_id, dispatcher.settings_sender, store, control, config.secret)
        await stack.enter_async_context(background(follower.run(), "follow the plan"))
        # The first request already must run in its tenant's mode.
        await follower.tried(_PLAN_TIMEOUT_S)
        await stack.enter_async_context(store.register(info, attaching.address, servicer.load))
        name_worker(info.worker_id)
        log.info("router %s listens on %s", info.worker_id, life.address)
        yield RunningRouter(info.worker_id, life, dispatcher, ops.registry)


@asynccontextmanager
async def router_process(config: RouterConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningRouter]:
    """Runs a router until the end of the block, where it drains. One of `signals` starts the drain earlier."""
    async with (
        MetadataStore.connect(config.metadata_url) as store,
        bound(lambda: running_router(config, store, signals)) as router,
    ):
        with gc_frozen():
            try:
                yield router
            finally:
                await router.drain(config.drain_timeout_s)
