"""The known routers, and the choice of one for the next request."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from outrider.errors import Unavailable
from outrider.gateway.routers.router_stream import BrokenCalls, Credential, RouterStream, no_broken_calls
from outrider.metadata.connection.timeouts import CALL_TIMEOUT_S
from outrider.metadata.store import MetadataStore
from outrider.metadata.workers.directory import LEASE_TTL_S
from outrider.protocol.identity import protocol_problem
from outrider.rpc.access.certificates import Version
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import router_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

Clock = Callable[[], float]
_RETIRE_GRACE_S = 600.0
# Most tenants whose turns a gateway keeps.
_MAX_TENANTS = 10_000


class RouterSource(Protocol):
    async def addresses(self) -> list[str]:
        """HOST:PORT of every router believed to be up."""


@dataclass(frozen=True, slots=True)
class FixedRouters:
    given: tuple[str, ...]

    async def addresses(self) -> list[str]:
        return list(self.given)


@dataclass(slots=True)
class LeasedRouters:
    """Routers that hold a lease in the metadata store, read at most every `max_age_s`."""

    store: MetadataStore
    max_age_s: float = 0.5
    _known: list[str] = field(default_factory=list)
    _read_s: float = float("-inf")
    _reading: asyncio.Task[None] | None = None
    _reported: set[str] = field(default_factory=set)
    """Routers whose incompatibility has been logged."""

    async def addresses(self) -> list[str]:
        age_s = time.monotonic() - self._read_s
        if self._reading is None and age_s >= self.max_age_s:
            self._reading = asyncio.create_task(self._read(), name="read routers")
        # Known routers are valid for the term of a lease. With none no request can be answered, so wait longer.
        if self._reading is not None and (age_s > LEASE_TTL_S or not self._known):
            await asyncio.wait({self._reading}, timeout=CALL_TIMEOUT_S if self._known else None)
        return self._known

    async def _read(self) -> None:
        try:
            leases = await self.store.workers(worker_pb2.WORKER_ROLE_ROUTER)
            self._known = [lease.address for lease in leases if lease.takes_work and self._understands(lease.info)]
        finally:
            self._read_s, self._reading = time.monotonic(), None

    def _understands(self, info: worker_pb2.WorkerInfo) -> bool:
        problem = protocol_problem(info)
        if problem is not None and info.worker_id not in self._reported:
            self._reported.add(info.worker_id)
            log.warning("a router is not used: %s", problem)
        return problem is None


@dataclass(slots=True)
class Rotation:
    """Round robin that skips routers for a while after they failed. No I/O.

    Each tenant has its own turns. Each router divides its part of the targets by fair shares, so a tenant gets its
    share of all targets only if its requests are spread evenly over the routers.
    """

    cooldown_s: float = 2.0
    _turns: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """By tenant, least recently used first."""
    _failed_s: dict[str, float] = field(default_factory=dict)

    def failed(self, address: str, now_s: float) -> None:
        self._failed_s[address] = now_s

    def recovered(self, address: str) -> None:
        self._failed_s.pop(address, None)

    def choose(self, addresses: Iterable[str], now_s: float, tenant: str = "") -> str | None:
        """None if there is no address. If all failed, one of them is chosen: it may be back."""
        ordered = sorted(set(addresses))
        if not ordered:
            return None
        self._failed_s = {a: s for a, s in self._failed_s.items() if now_s - s < self.cooldown_s}
        healthy = [a for a in ordered if a not in self._failed_s]
        if not healthy:
            return min(ordered, key=lambda a: self._failed_s[a])
        return healthy[self._turn(tenant) % len(healthy)]

    def _turn(self, tenant: str) -> int:
        # A hash, so that not all tenants begin with the same router.
        turn = self._turns.pop(tenant, zlib.crc32(tenant.encode())) + 1
        self._turns[tenant] = turn
        if len(self._turns) > _MAX_TENANTS:
            self._turns.popitem(last=False)
        return turn


@dataclass(frozen=True, slots=True)
class Router:
    address: str
    channel: grpc.aio.Channel
    stub: router_pb2_grpc.RouterServiceAsyncStub
    stream: RouterStream
    credential: Credential = ()
    """Metadata for each call."""
    certificate: Version = ()
    """Version of this process's certificate when it connected."""

    @classmethod
    def at(
        cls,
        address: str,
        connect: Connect = create_channel,
        credential: Credential = (),
        certificate: Version = (),
        broken: BrokenCalls | None = None,
    ) -> Router:
        channel = connect(address)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return cls(address, channel, stub, RouterStream(stub, credential, broken), credential, certificate)

    async def close(self, grace_s: float | None = None) -> None:
        """Waits up to `grace_s` for the stream to end; a draining router ends it after its last answer."""
        try:
            await self.channel.close(grace_s)
        finally:
            await self.stream.close()


class RouterPool:
    """Connections to routers. Use with `async with`; leaving the block ends the calls that still run."""

    def __init__(
        self,
        source: RouterSource,
        clock: Clock = time.monotonic,
        connect: Connect = create_channel,
        credential: Credential = (),
        certificate: Callable[[], Version] = lambda: (),
    ) -> None:
        """`certificate`: the version that `connect` uses now. When it changes, every router is connected to anew."""
        self._source = source
        self._certificate = certificate
        self._credential = credential
        self._clock = clock
        self._connect = connect
        self._rotation = Rotation()
        self._routers: dict[str, Router] = {}
        self._broken = no_broken_calls()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RouterPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        routers, self._routers = self._routers, {}
        await asyncio.gather(*(router.close() for router in routers.values()))

    async def pick(self, tenant: str = "") -> Router:
        """The router for the tenant's next call. Raises Unavailable when none is known."""
        addresses = await self._source.addresses()
        self._retire(set(self._routers) - set(addresses) | self._outdated())
        address = self._rotation.choose(addresses, self._clock(), tenant)
        if address is None:
            raise Unavailable("no router is known", reason="NO_ROUTER", retry_after_s=1.0)
        return self._router(address)

    async def every(self) -> list[Router]:
        return [self._router(address) for address in await self._source.addresses()]

    def failed(self, router: Router) -> None:
        """To be called when a router broke or could not be reached: others are preferred for a while."""
        self._rotation.failed(router.address, self._clock())

    def answered(self, router: Router) -> None:
        self._rotation.recovered(router.address)

    def _outdated(self) -> set[str]:
        certificate = self._certificate()
        return {address for address, router in self._routers.items() if router.certificate != certificate}

    def _retire(self, gone: set[str]) -> None:
        """Closes these connections once their calls have ended, because a draining router is off the list too."""
        for address in gone:
            task = asyncio.create_task(self._routers.pop(address).close(_RETIRE_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _router(self, address: str) -> Router:
        if address not in self._routers:
            given = self._connect, self._credential, self._certificate(), self._broken
            self._routers[address] = Router.at(address, *given)
        return self._routers[address]
