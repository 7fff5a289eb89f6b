"""The gateway process: opens its parts in order, drains, and closes them in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from email.utils import formatdate
from functools import partial
from signal import Signals

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from outrider.address import split_address
from outrider.gateway.config import GatewayConfig
from outrider.gateway.generation.generation import Generator
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.gateway.grpc.service import SERVICE, GenerationServicer, sharing
from outrider.gateway.http.app import create_app, for_pages
from outrider.gateway.http.connection import Bounds, closing
from outrider.gateway.routers.routers import FixedRouters, LeasedRouters, RouterPool, RouterSource
from outrider.gateway.tenants.admission import Admission
from outrider.gateway.tenants.auth import KeyGuard
from outrider.gateway.tenants.quota_keeper import QuotaKeeper
from outrider.gateway.tokenizer.catalog import Catalog
from outrider.metadata.store import MetadataStore
from outrider.protocol.identity import own_info
from outrider.protocol.receipts import ReceiptKey
from outrider.rpc.access.credentials import public_port
from outrider.rpc.access.roles import Role, credential
from outrider.rpc.arriving import Arriving
from outrider.rpc.channel import ConnectTo, connect_to
from outrider.rpc.options import public_options
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import generation_pb2_grpc, worker_pb2
from outrider.runtime.collector import gc_frozen
from outrider.runtime.supervision import background
from outrider.telemetry.logging import name_worker
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops, serving_ops
from outrider.telemetry.tracing import Tracing, open_tracing
from outrider.telemetry.vllm_names import Cache

log = logging.getLogger(__name__)
_REFRESH_S = 1.0
_CROSSING_S = 0.2
_BACKLOG = 2048
# How often the date in answers' heads is renewed.
_DATE_S = 1.0
_POLL_S = 0.01
_OTHER_FILES = 64
"""Logs, libraries, the event loop, and connections to routers and the metadata store."""


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A serving gateway. Addresses are HOST:PORT with the bound ports."""

    grpc_address: str
    http_address: str
    """Empty without an ops port."""
    core: Generator
    life: ServerLife


@asynccontextmanager
async def running(config: GatewayConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningGateway]:
    """Runs a gateway until the end of the block, where it drains. One of `signals` starts the drain earlier."""
    async with AsyncExitStack() as stack:
        store, ops = None, Ops("gateway", config)
        if config.metadata_url:
            connected = MetadataStore.connect(config.metadata_url, keys_required_file=config.keys_required_file)
            opened = store = await stack.enter_async_context(connected)
            MetadataCollector(ops.registry, lambda: opened.available, lambda: asdict(opened.counters))
        routers = await stack.enter_async_context(_routers(config, store))
        tracing = open_tracing("outrider-gateway")
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        info = own_info(worker_pb2.WORKER_ROLE_GATEWAY)
        metrics = GatewayMetrics(ops.registry)
        quotas = QuotaKeeper(store, info.worker_id, on_refusal=metrics.over_quota)
        core = _core(config, routers, tracing, metrics, quotas)
        stack.push_async_callback(core.catalog.close)
        stack.callback(core.threads.close)
        guard = KeyGuard(store.tenants if store is not None else None, required=config.require_api_keys)
        limits, max_connections = config.limits, _connections_allowed(config.limits.max_connections)
        handshakes = Handshakes(ops.registry)
        grpc_server = create_server(
            max_message_bytes=limits.max_body_bytes,
            guard=guard,
            strict=[SERVICE],
            on_refused=RefusedCalls(ops.registry, [SERVICE]).count,
            refusing=lambda context: core.admission.refusing(sharing(context)),
            on_tls_call=handshakes.called,
            arriving=Arriving(limits.grpc_places, limits.body_timeout_s, max_waiting=max(1024, limits.max_running)),
            more=public_options(
                max_connections=max_connections,
                max_streams=limits.max_streams,
                first_bytes_s=limits.header_timeout_s,
                idle_s=limits.idle_timeout_s,
                age_s=config.connection_age_s,
            ),
        )
        servicer = GenerationServicer(core, limits.send_timeout_s)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, grpc_server)
        life = await stack.enter_async_context(
            serving(
                grpc_server,
                config.listen_grpc,
                services=[SERVICE],
                signals=signals,
                credentials=public_port(config.public_tls, handshakes.began),
                max_connections=max_connections,
                drain_delay_s=config.leaving_s,
            )
        )
        await stack.enter_async_context(background(_say_leaving(core.admission, life), "say leaving"))
        bounds = Bounds(limits, max_connections)
        app = for_pages(create_app(core, limits, guard, config.http, partial(_caches, store)), config.http.cors_origins)
        http_address = await stack.enter_async_context(_http(closing(app, life.leaving), config, bounds, grace_s=1.0))
        ops.ready["server"] = lambda: core.problem
        await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await stack.enter_async_context(background(_keep_current(core, life), "keep current"))
        if store is not None:
            await stack.enter_async_context(background(quotas.run(), "quotas"))
            lease = store.register(info, config.advertised(life.address), lambda: _load(core))
            await stack.enter_async_context(lease)
        name_worker(info.worker_id)
        log.info("serving gRPC on %s, HTTP on %s", life.address, http_address)
        try:
            yield RunningGateway(life.address, http_address, core, life)
        finally:
            await _drain(core.admission, life, bounds, config.drain_timeout_s)


async def serve(config: GatewayConfig, signals: Sequence[Signals]) -> None:
    """Serves until a signal, then drains."""
    async with running(config, signals) as gateway:
        with gc_frozen():
            await gateway.life.draining.wait()


async def _say_leaving(admission: Admission, life: ServerLife) -> None:
    await life.leaving.wait()
    admission.leaving = True


async def _drain(admission: Admission, life: ServerLife, bounds: Bounds, timeout_s: float) -> None:
    """Closes clients' connections, admits nothing more, and waits for running requests, at most `timeout_s`."""
    await life.drain()
    life.go_away(timeout_s)
    bounds.leave()
    if life.drain_delay_s:
        # Requests that clients sent before they knew are still admitted.
        await asyncio.sleep(_CROSSING_S)
    if not await admission.drain(timeout_s):
        log.warning("%d requests still ran after %g s and are cut off", admission.running, timeout_s)


def _routers(config: GatewayConfig, store: MetadataStore | None) -> RouterPool:
    connect = connect_to(Role.ROUTER, config.tls)
    return RouterPool(
        _source(config, store),
        connect=connect,
        credential=credential(config.secret, Role.GATEWAY),
        certificate=(lambda: connect.version) if isinstance(connect, ConnectTo) else (lambda: ()),
    )


def _source(config: GatewayConfig, store: MetadataStore | None) -> RouterSource:
    if config.routers or store is None:
        return FixedRouters(config.routers)
    return LeasedRouters(store)


def _core(
    config: GatewayConfig,
    routers: RouterPool,
    tracing: Tracing | None,
    metrics: GatewayMetrics,
    quotas: QuotaKeeper,
) -> Generator:
    return Generator(
        catalog=Catalog(
            routers,
            config.parsers,
            config.generation_config == "auto",
            target_wait_s=config.failover.wait_for_restart_s,
            router_wait_s=config.failover.window_s,
        ),
        routers=routers,
        admission=Admission(config.limits.max_running),
        metrics=metrics,
        failover=config.failover,
        request_timeout_s=config.limits.request_timeout_s,
        tracing=tracing,
        quotas=quotas,
        receipt_key=config.receipt_key or ReceiptKey.make(),
    )


async def _caches(store: MetadataStore | None) -> dict[str, Cache]:
    """The KV caches of each model's targets, as their leases tell. Without a metadata store none is known."""
    caches: dict[str, Cache] = {}
    for lease in await store.workers(worker_pb2.WORKER_ROLE_TARGET) if store is not None else ():
        info, before = lease.info, caches.get(lease.info.model, Cache(lease.info.block_size, 0, 0))
        if info.num_blocks:
            counts = before.num_blocks + info.num_blocks, before.num_free_blocks + lease.load.num_free_blocks
            caches[info.model] = Cache(before.block_size, *counts)
    return caches


def _load(core: Generator) -> worker_pb2.WorkerLoad:
    admission = core.admission
    return worker_pb2.WorkerLoad(num_running=admission.running, draining=admission.leaving)


async def _keep_current(core: Generator, life: ServerLife) -> None:
    """Updates the health status: SERVING while some model is ready, or may soon be again."""
    while True:
        try:
            await core.catalog.refresh()
        except Exception:
            log.exception("the list of models could not be refreshed")
        if not life.leaving.is_set() and life.health.serving != (answers := not core.problem):
            await (life.health.set_serving() if answers else life.health.set_not_serving())
        await asyncio.sleep(_REFRESH_S)


@asynccontextmanager
async def _http(app: ASGIApp, config: GatewayConfig, bounds: Bounds, *, grace_s: float) -> AsyncIterator[str]:
    """Serves `app` and yields the bound HOST:PORT. Raises OSError when the address cannot be bound.

    With uvicorn's connections, but without its server: that has signal handlers, no timeout for TLS handshakes, and
    asks only every 0.1 s whether it may end.
    """
    host, port = split_address(config.listen_http)
    listener = _listen(host, port)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=bounds.limits.idle_timeout_s,  # type: ignore[arg-type]  # For `call_later`: may be a float.
    )
    settings.load()
    state, tls = ServerState(), config.public_tls
    server = await asyncio.get_running_loop().create_server(
        partial(bounds.protocol, config=settings, server_state=state, app_state={}),
        sock=listener,
        ssl=tls.public_context() if tls is not None else None,
        ssl_handshake_timeout=bounds.limits.header_timeout_s if tls is not None else None,
        # Number of connections that asyncio accepts at a time. Without free files it tries and logs each of them, and
        # doubles the attempts (until Python 3.13). With 1 it logs once and pauses for a second.
        backlog=1,
    )
    # asyncio has called listen() with its own `backlog` of 1, which is too short a queue in the kernel.
    listener.listen(_BACKLOG)
    async with background(_keep_date(state), "date"):
        try:
            yield f"{host}:{listener.getsockname()[1]}"
        finally:
            server.close()
            await _end(state, grace_s)


async def _keep_date(state: ServerState) -> None:
    while True:
        state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        await asyncio.sleep(_DATE_S)


async def _end(state: ServerState, grace_s: float) -> None:
    """Closes the connections once their answers are sent, at most `grace_s` from now."""
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while state.connections or state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    for task in state.tasks:
        task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it each event may be delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Connections that arrive before the server's loop runs wait here instead of being refused.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _connections_allowed(asked: int) -> int:
    """Returns `asked`, connections on each of two ports, or fewer, with a warning, if the system allows fewer files.

    Raises the process's soft limit as far as needed: the usual 1024 is there for programs that use select().
    """
    needed = 2 * asked + _OTHER_FILES
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != limit < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = asked if limit == resource.RLIM_INFINITY else max(1, (limit - _OTHER_FILES) // 2)
    if room < asked:
        log.warning("%d files may be open: each port takes %d connections instead of %d", limit, room, asked)
    return min(asked, room)
