"""The life cycle of a gRPC server, the same in every process: bind, serve with health and reflection, drain, stop.

server = create_server()
add_DraftServiceServicer_to_server(servicer, server)
async with serving(server, "127.0.0.1:0", services=[SERVICE]) as life:
    ...                          # load the model; health says NOT_SERVING
    await life.ready()           # SERVING
    await life.draining.wait()   # SIGTERM or SIGINT: NOT_SERVING already
    ...                          # finish what runs
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.address import check_listen
from outrider.rpc.access.guard import AccessInterceptor
from outrider.rpc.access.roles import Guard, RoleGuard, check_declared
from outrider.rpc.arriving import Arriving
from outrider.rpc.health import HealthService
from outrider.rpc.interceptor import ErrorInterceptor, OnRefused, Refusing
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, Options, server_options
from outrider.rpc.silent import end_silent, files_allowed
from outrider.runtime.supervision import background

logger = logging.getLogger(__name__)

_OPEN = RoleGuard()
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OPEN_PLACES = 4
"""Messages of callers who need not prove anything that are read at once: of health checks and reflection."""
_OPEN_TIMEOUT_S = 30.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_REFLECTION = "grpc.reflection.v1.ServerReflection"


class Health:
    """A server's health status: for the whole server as "", and for each service's name."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = HealthService()
        self._names = ("", *services)
        self.serving = False

    async def set_serving(self) -> None:
        await self._set(True)

    async def set_not_serving(self) -> None:
        await self._set(False)

    async def _set(self, serving: bool) -> None:
        self.serving = serving
        for name in self._names:
            self.servicer.set(name, _SERVING if serving else _NOT_SERVING)


async def add_health(server: grpc.aio.Server, services: Sequence[str]) -> Health:
    """Adds health checks, at first NOT_SERVING, and reflection, for services by their full names."""
    health = Health(services)
    await health.set_not_serving()
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    _add_reflection(server, services)
    return health


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds it as v1 and v1alpha, whose messages have the same encoding. Skipped if not installed."""
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2
        from grpc_reflection.v1alpha._async import ReflectionServicer
    except ImportError:
        return
    names = [*services, "grpc.health.v1.Health", reflection.SERVICE_NAME, _REFLECTION]
    servicer: Any = ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (reflection.SERVICE_NAME, _REFLECTION)
        )
    )


@dataclass(slots=True)
class ServerLife:
    """One running server. `leaving`, then `draining`, are set once and stay set."""

    address: str
    """The bound HOST:PORT; for port 0 the one that the system chose."""
    health: Health
    server: grpc.aio.Server
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Running calls should end, and no new work begins."""
    drain_delay_s: float = 0.0
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """The health status is NOT_SERVING from now on. Calls that arrive anyway are served until `draining` is set."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def problem(self) -> str:
        """Why it should get no calls now; empty if it should."""
        return "draining" if self.leaving.is_set() else "" if self.health.serving else "starting"

    async def ready(self) -> None:
        """Sets the health status to SERVING, unless the drain has begun."""
        if not self.leaving.is_set():
            await self.health.set_serving()

    async def drain(self) -> None:
        """Sets the health status to NOT_SERVING, and `draining` after `drain_delay_s`."""
        if self.leaving.is_set():
            return
        self.leaving.set()
        await self.health.set_not_serving()
        await asyncio.sleep(self.drain_delay_s)
        self.draining.set()

    def go_away(self, grace_s: float) -> None:
        """Accepts no further call, and asks clients to connect elsewhere (GOAWAY). Running calls have `grace_s`."""
        self._keep(self.server.stop(grace_s))

    def on_signal(self, number: signal.Signals) -> None:
        if self.leaving.is_set():
            logger.warning("%s again: leaving at once", number.name)
            os._exit(128 + number)
        logger.info("%s: draining", number.name)
        self._keep(self.drain())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def create_server(
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    more: Options | None = None,
    guard: Guard = _OPEN,
    strict: Collection[str] = (),
    on_refused: OnRefused = lambda method, reason: None,
    refusing: Refusing | None = None,
    on_tls_call: Callable[[str], None] = lambda peer: None,
    arriving: Arriving | None = None,
) -> grpc.aio.Server:
    """A server with our limits, keepalive and error handling, and `more` options. Add servicers, then use `serving`.

    `guard` checks callers; the default admits all. `strict`: services (full names) for callers from outside the
    cluster, which refuse requests with fields that this release does not know. `on_refused` is called for each
    invalid or forbidden call, `refusing` awaited before any error is sent, `on_tls_call` called for each call over TLS,
    with its peer. `arriving` bounds messages that have not arrived whole; None: those of admitted callers are not
    bounded.
    """
    # Of an option that is given twice gRPC takes the first.
    options = list(dict([*server_options(max_message_bytes, files_allowed() // 2), *(more or [])]).items())
    return grpc.aio.server(
        interceptors=[
            ErrorInterceptor(max_message_bytes, strict, on_refused, refusing),
            AccessInterceptor(guard, on_tls_call, arriving, Arriving(_OPEN_PLACES, _OPEN_TIMEOUT_S)),
        ],
        options=options,
    )


@asynccontextmanager
async def serving(
    server: grpc.aio.Server,
    address: str,
    *,
    services: Sequence[str],
    signals: Sequence[signal.Signals] = (),
    draining: asyncio.Event | None = None,
    drain_delay_s: float = 0.0,
    grace_s: float = 1.0,
    max_connections: int | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[ServerLife]:
    """Binds to HOST:PORT, serves with health and reflection for `services`, and stops at the end of the block. Plain
    text without credentials.

    One of the `signals` starts the drain; a second one ends the process at once. `draining` is set `drain_delay_s`
    after the health status changes; pass an event for servicers, which are made earlier. `max_connections`: as in the
    server's options; None: those of `create_server`. At the end of the block
    running calls have `grace_s` to end. Raises OSError when the address cannot be bound, Undeclared for a service with
    a method that is missing in the table of `roles`.
    """
    check_declared(services)
    health = await add_health(server, services)
    bound = bind(server, address, credentials)
    life = ServerLife(bound, health, server, draining or asyncio.Event(), drain_delay_s)
    await server.start()
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, life.on_signal, number)
    port = int(bound.rpartition(":")[2])
    most = max_connections or files_allowed() // 2
    try:
        async with background(end_silent(port, most), "end silent connections"):
            yield life
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        # Not `drain`, because its delay would hold up the end of the block.
        life.leaving.set()
        life.draining.set()
        await health.set_not_serving()
        await server.stop(grace_s)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Binds to HOST:PORT and returns the bound address. Raises OSError when that is not possible."""
    try:
        check_listen("listen", address)
    except ValueError as error:
        raise OSError(str(error)) from None
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        # Its text advises to set a variable, and has no reason.
        raise OSError(f"cannot listen on {address}: it is in use, or no address of this machine") from None
    if bound == 0:
        raise OSError(f"cannot listen on {address}")
    return f"{address.rpartition(':')[0]}:{bound}"
