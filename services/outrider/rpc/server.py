"""A server's life: bound, serving, draining, gone. The same for every process of ours.

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

from outrider.address import check_listen
from outrider.rpc.access import AccessInterceptor
from outrider.rpc.health import Health, add_health
from outrider.rpc.interceptor import ErrorInterceptor, OnRefused
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, Options, server_options
from outrider.rpc.roles import Guard, RoleGuard, check_declared

logger = logging.getLogger(__name__)

_OPEN = RoleGuard()
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class ServerLife:
    """One running server. `leaving`, then `draining`, are set once and stay set."""

    address: str
    """HOST:PORT it is bound to; a port asked for as 0 is the real one here."""
    health: Health
    server: grpc.aio.Server
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """What runs is to end, and nothing new begins."""
    drain_delay_s: float = 0.0
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Health says NOT_SERVING for good; what comes all the same is served until `draining` is set."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def problem(self) -> str:
        """Why it should be sent nothing now; empty when it should."""
        return "draining" if self.leaving.is_set() else "" if self.health.serving else "starting"

    async def ready(self) -> None:
        """Health says SERVING from now on, unless the drain has begun."""
        if not self.leaving.is_set():
            await self.health.set_serving()

    async def drain(self) -> None:
        """Health says NOT_SERVING; `drain_delay_s` later `draining` is set."""
        if self.leaving.is_set():
            return
        self.leaving.set()
        await self.health.set_not_serving()
        await asyncio.sleep(self.drain_delay_s)
        self.draining.set()

    def go_away(self, grace_s: float) -> None:
        """Takes no further call, and tells clients to connect elsewhere (GOAWAY). Those running have `grace_s`."""
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
    on_tls_call: Callable[[str], None] = lambda peer: None,
) -> grpc.aio.Server:
    """A server with our limits, keepalive and error handling, and `more` options. Give it servicers, then `serving`.

    `guard` finds out who calls; the default lets everybody in. `strict`: services (full names) for callers from outside
    the cluster, which refuse requests with fields that this release does not know. `on_refused` hears of each call that
    its caller should not have made so, `on_tls_call` of each over TLS, with its peer.
    """
    options = [*server_options(max_message_bytes), *(more or [])]
    return grpc.aio.server(
        interceptors=[ErrorInterceptor(max_message_bytes, strict, on_refused), AccessInterceptor(guard, on_tls_call)],
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
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[ServerLife]:
    """Binds to HOST:PORT, serves with health and reflection for `services`, and stops at the end. Without credentials
    in plain text.

    Signals given start the drain; a second one ends the process at once. `draining` is set when nothing new is to
    begin, `drain_delay_s` after health has said so: for servicers, which are made before. Calls still running when the
    block is left get `grace_s` to end. Raises OSError when the address cannot be bound, Undeclared for a service with a
    call that nobody has said who may make.
    """
    check_declared(services)
    health = await add_health(server, services)
    bound = bind(server, address, credentials)
    life = ServerLife(bound, health, server, draining or asyncio.Event(), drain_delay_s)
    await server.start()
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, life.on_signal, number)
    try:
        yield life
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        # Not `drain`: who leaves the block has no time for a delay.
        life.leaving.set()
        life.draining.set()
        await health.set_not_serving()
        await server.stop(grace_s)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Binds to HOST:PORT and says where. Raises OSError when that is not possible."""
    try:
        check_listen("listen", address)
    except ValueError as error:
        raise OSError(str(error)) from None
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    if bound == 0:
        raise OSError(f"cannot listen on {address}")
    return f"{address.rpartition(':')[0]}:{bound}"
