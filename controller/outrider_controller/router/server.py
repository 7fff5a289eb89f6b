"""RouterService: translates, delegates to the rounds, translates back. Also the router's life, whoever runs it.

Ray runs it inside an actor; tests run it as it is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass

from outrider.errors import OutriderError, Overloaded, Unavailable, UnknownModel
from outrider.metadata import MetadataStore
from outrider.protocol.identity import PROTOCOL_VERSION, new_worker_id, package_version
from outrider.rpc.roles import RoleGuard
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import router_pb2_grpc, trace_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.telemetry.metrics import MetadataCollector
from outrider.telemetry.ops import Ops, serving_ops
from outrider.telemetry.tracing import open_tracing
from prometheus_client import CollectorRegistry

from outrider_controller.router.calls import Context, GatewayStream
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.course import NewResponse
from outrider_controller.router.notices import Notices
from outrider_controller.router.request import check_model_name, check_request
from outrider_controller.router.rounds import Rounds
from outrider_controller.router.session import Request
from outrider_controller.router.trace_service import SERVICE as TRACE_SERVICE
from outrider_controller.router.trace_service import TraceServicer

log = logging.getLogger(__name__)

SERVICE = "outrider.rpc.v1.RouterService"


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """All of a gateway's requests on one call. An OutriderError becomes the end of its request."""

    def __init__(
        self, rounds: Rounds, notices: Notices, config: RouterConfig, salt_key: bytes, draining: asyncio.Event
    ) -> None:
        self._rounds = rounds
        self._notices = notices
        self._admission = config.admission
        self._ready_timeout_s = config.failover.wait_for_target_s
        self._salt_key = salt_key
        self._draining = draining
        self._num_calls = 0

    # Written with `context.write` and not as a generator: a cancelled call then ends inside its coroutine, at once, and
    # not when the collector finds an abandoned generator.
    async def RouteMany(  # type: ignore[override]
        self, requests: AsyncIterator[router.RouteManyRequest], context: Context
    ) -> None:
        await GatewayStream(self._answer, self._draining).run(context)

    async def _answer(self, message: router.RouteRequest, new_response: NewResponse, deadline_s: float | None) -> None:
        """Carries one request to its finish. Raises OutriderError."""
        self._num_calls += 1
        self._notices.running(self._num_calls)
        try:
            request = await self._admitted(message)
            if request.finish_reason:
                response = new_response()
                response.finish_reason = request.finish_reason
                response.metrics.SetInParent()
            else:
                await self._rounds.run(request, new_response, deadline_s)
        finally:
            self._num_calls -= 1
            self._notices.running(self._num_calls)

    async def _admitted(self, message: router.RouteRequest) -> Request:
        try:
            return await self._checked(message)
        except OutriderError as error:
            self._notices.rejected(message.tenant[:128], error)
            raise

    async def _checked(self, message: router.RouteRequest) -> Request:
        self._admit()
        model = check_model_name(message)
        await self._rounds.pools.ready(self._ready_timeout_s)
        info = self._rounds.pools.model_info(model)
        if info is None:
            raise self._unknown(model)
        return check_request(message, info, self._salt_key)

    def _unknown(self, model: str) -> OutriderError:
        """A router that has yet to see its first target cannot say that there is none of this name."""
        if not self._rounds.pools.has_seen_targets:
            return Unavailable("no model is served at the moment", reason="NO_MODEL", retry_after_s=1.0)
        return UnknownModel(model)

    def _admit(self) -> None:
        if self._draining.is_set():
            raise Unavailable("the router is draining", reason="DRAINING")
        if self._num_calls > self._admission.max_sessions:
            raise Overloaded(
                f"all {self._admission.max_sessions} places are taken", retry_after_s=self._admission.retry_after_s
            )

    async def ListModels(self, request: router.ListModelsRequest, context: Context) -> router.ListModelsResponse:
        await self._rounds.pools.ready(self._ready_timeout_s)
        return router.ListModelsResponse(models=self._rounds.pools.models())

    def load(self) -> worker.WorkerLoad:
        return worker.WorkerLoad(num_running=self._num_calls, draining=self._draining.is_set())


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that serves."""

    worker_id: str
    life: ServerLife
    rounds: Rounds
    registry: CollectorRegistry
    ops_address: str
    """Empty without an ops port."""

    @property
    def address(self) -> str:
        return self.life.address

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new; returns when what runs has finished, or after `timeout_s`."""
        await self.life.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.rounds.idle()


def _send_spans(stack: AsyncExitStack, rounds: Rounds) -> None:
    tracing = open_tracing("outrider-router")
    if tracing is None:
        return
    # Imported here: it needs what is installed only where spans are wanted.
    from outrider_controller.router.spans import SpanWriter

    writer = SpanWriter(tracing)
    rounds.traces.on_end = writer.ended
    stack.push_async_callback(asyncio.to_thread, writer.close)


@asynccontextmanager
async def running_router(config: RouterConfig, store: MetadataStore) -> AsyncIterator[RunningRouter]:
    """Serves until the block is left. Raises OSError when the address cannot be bound."""
    ops = Ops("router", config)
    info = worker.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        role=worker.WORKER_ROLE_ROUTER,
        worker_id=new_worker_id("router"),
        max_sequences=config.admission.max_sessions,
        version=package_version(),
    )
    async with AsyncExitStack() as stack:
        notices = await stack.enter_async_context(Notices(ops.registry, store))
        rounds = await stack.enter_async_context(Rounds(store, config, notices))
        draining = asyncio.Event()
        salt_key = config.cache_salt_key or secrets.token_bytes(32)
        servicer = RouterServicer(rounds, notices, config, salt_key, draining)
        server = create_server(guard=RoleGuard(config.secret))
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
        rounds.traces.router_id = info.worker_id
        _send_spans(stack, rounds)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(rounds.traces), server)
        services = [SERVICE, TRACE_SERVICE]
        life = await stack.enter_async_context(serving(server, config.listen, services=services, draining=draining))
        MetadataCollector(ops.registry, lambda: store.available, lambda: asdict(store.counters))
        ops.ready["server"] = lambda: life.problem
        ops.ready["targets"] = lambda: rounds.pools.problem
        ops_address = await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await life.ready()
        await stack.enter_async_context(store.register(info, config.advertise or life.address, servicer.load))
        log.info("router %s listens on %s", info.worker_id, life.address)
        yield RunningRouter(info.worker_id, life, rounds, ops.registry, ops_address)
