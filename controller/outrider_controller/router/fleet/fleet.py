"""The workers that this router knows: a link to each leased target, and the drafts from their leases."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import grpc
from outrider.errors import Unavailable
from outrider.metadata import LeaseRecord
from outrider.rpc.access.roles import Role, credential
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.link import PeerLink, StreamEnded, problem_of, watch_silence
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import target_pb2 as target
from outrider.rpc.v1 import target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import Backoff, background, keep_running, stop

from outrider_controller.plan_messages import MAX_PRICE, bounded
from outrider_controller.router.config import FailoverConfig, LinkConfig, RouterConfig
from outrider_controller.router.fleet.loads import MAX_REPORT_AGE_S, WorkerLoads
from outrider_controller.router.fleet.placement import info_problem
from outrider_controller.router.request.failover import TargetKey

log = logging.getLogger(__name__)


class WorkerLeases(Protocol):
    """The part of the metadata store that names workers."""

    @property
    def available(self) -> bool: ...

    async def workers(self, role: worker.WorkerRole.ValueType | None = None) -> list[LeaseRecord]: ...


@dataclass(slots=True, eq=False)
class LeasedDraft:
    """A draft, known from its lease only: targets connect to it, the router does not."""

    worker_id: str
    address: str
    info: worker.WorkerInfo
    leased: bool = True
    load: worker.WorkerLoad = field(default_factory=worker.WorkerLoad)
    open_sequences: set[int] = field(default_factory=set)
    """Those of this router, through all targets."""


class Fleet:
    """Links live while it is `running`."""

    def __init__(
        self,
        leases: WorkerLeases,
        config: RouterConfig,
        listener: TargetListener,
        on_change: Callable[[], None],
        connect: Connect = create_channel,
    ) -> None:
        self.targets: dict[str, LeasedTarget] = {}
        self.attached: dict[str, TargetLink] = {}
        """Servers that take their requests themselves."""
        self.drafts: dict[str, LeasedDraft] = {}
        self.seen: dict[str, worker.WorkerInfo] = {}
        """By model: the target that was leased last, even if it is gone."""
        self.loads = WorkerLoads(1 + math.ceil(MAX_REPORT_AGE_S / config.refresh_s))
        self.link_setup = LinkSetup(
            listener, config.link, config.failover, connect, credential(config.secret, Role.ROUTER)
        )
        self._leases = leases
        self._config = config
        self._on_change = on_change
        self._gone_s: dict[str, float] = {}
        """By model: when a connection to one of its targets last ended, by the loop's clock."""
        self._changed = asyncio.Event()
        self._refreshed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with background(_keep_refreshing(self, self._config.refresh_s), "refresh fleet"):
                yield
        finally:
            await asyncio.gather(*(link.stop() for link in self.targets.values()))

    def live_targets(self, model: str) -> list[TargetLink]:
        return [t for t in self.targets.values() if t.up and t.info.model == model and self.loads.takes_work(t)]

    def model_info(self, model: str) -> worker.WorkerInfo | None:
        """Of a live target of this model, else of the last one seen; None when there never was one."""
        live = self.live_targets(model)
        return live[0].info if live else self.seen.get(model)

    def cordoned(self, model: str) -> bool:
        """Whether the model has connected targets, and operators have taken all of them out of use."""
        there = [t.worker_id for t in self.targets.values() if t.up and t.info.model == model]
        return bool(there) and self.loads.cordons.keys() >= set(there)

    def cut_off(self, model: str) -> bool:
        """Whether this router has lost all targets of the model although they live, and there are other routers."""
        there = [t for t in self.targets.values() if t.lease.model == model]
        return self.loads.num_routers > 1 and bool(there) and all(t.cut_off for t in there)

    def back_until_s(self, model: str) -> float:
        """Latest time, by the loop's clock, by which this model's last target may have restarted. -inf where there was
        none, or where operators have taken one out of use."""
        there = [t for t in self.targets.values() if t.up and t.info.model == model]
        if any(t.worker_id in self.loads.cordons for t in there):
            return -math.inf
        leaving = any(self.loads.of(t).draining for t in there)
        gone_s = asyncio.get_running_loop().time() if leaving else self._gone_s.get(model, -math.inf)
        return gone_s + self._config.failover.wait_for_restart_s

    async def ready(self, timeout_s: float) -> None:
        """Returns once the leases were read for the first time and a connection to each of their targets was tried.

        Raises Unavailable when the metadata store did not answer within `timeout_s`.
        """
        if self._refreshed.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._refreshed.wait()
        except TimeoutError:
            raise Unavailable("the metadata store has not answered yet", reason="NO_METADATA") from None

    def changed(self) -> asyncio.Event:
        """Set when a worker comes, goes or gets room. Take it before reading the fleet, or a change may be missed."""
        return self._changed

    def went_down(self, link: TargetLink) -> None:
        self._gone_s[link.info.model] = asyncio.get_running_loop().time()
        self.notify()

    def notify(self) -> None:
        done, self._changed = self._changed, asyncio.Event()
        done.set()
        self._on_change()

    @property
    def problem(self) -> str:
        """Why no request can be placed; empty when one can. Thread-safe."""
        if not self._refreshed.is_set():
            return "the leases have not been read yet"
        links = [*self.targets.values(), *self.attached.values()]
        return "" if any(link.up for link in links) else "no target is connected"

    def num_leaving(self, model: str) -> int:
        """Sequences of this router at targets that take no more work."""
        leaving = (t for t in self.targets.values() if t.up and t.info.model == model and not self.loads.takes_work(t))
        return sum(len(target.open_sequences) for target in leaving)

    async def refresh(self) -> None:
        """Connects to newly leased targets, and drops those whose lease and stream are both gone."""
        records = await self._leases.workers()
        self.loads.report(records, self.targets)
        targets = [r for r in records if r.info.role == worker.WORKER_ROLE_TARGET and not r.info.attached]
        await self._follow_targets(targets)
        self._follow_drafts({r.info.worker_id: r for r in records if r.info.role == worker.WORKER_ROLE_DRAFT})
        self.loads.count_elsewhere([*self.targets.values(), *self.drafts.values()])
        # An empty list from a store that did not answer does not count as a reading.
        if self._leases.available and not self._refreshed.is_set():
            await _until_tried(self.targets.values(), self._config.link.connect_timeout_s)
            self._refreshed.set()
        self.notify()

    async def _follow_targets(self, records: Collection[LeaseRecord]) -> None:
        links, leased = self.targets, {record.info.worker_id for record in records}
        for record in records:
            worker_id = record.info.worker_id
            self.seen[record.info.model] = record.info
            if worker_id not in links:
                links[worker_id] = LeasedTarget(worker_id, record.address, self.link_setup)
            links[worker_id].renewed(record)
        # A worker that only lost the metadata store loses its lease; an open stream shows that it is alive.
        gone = [worker_id for worker_id, link in links.items() if worker_id not in leased and not link.up]
        await asyncio.gather(*(link.stop() for link in [links.pop(worker_id) for worker_id in gone]))

    def _follow_drafts(self, records: Mapping[str, LeaseRecord]) -> None:
        for worker_id, draft in list(self.drafts.items()):
            draft.leased = worker_id in records
            # A target may still be connected to it, and draft with it.
            if not draft.leased and not draft.open_sequences:
                del self.drafts[worker_id]
        for worker_id, record in records.items():
            if worker_id not in self.drafts:
                self.drafts[worker_id] = LeasedDraft(worker_id, record.address, record.info)


async def _until_tried(links: Iterable[LeasedTarget], timeout_s: float) -> None:
    """A request that arrives during the start should be placed among all targets, not on the first to connect."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(link.tried.wait() for link in links))


async def _keep_refreshing(fleet: Fleet, pause_s: float) -> NoReturn:
    async def refresh_and_sleep() -> None:
        await fleet.refresh()
        await asyncio.sleep(pause_s)

    def failed(error: Exception) -> None:
        log.error("reading the leases failed", exc_info=error)

    # The last known fleet keeps serving. An error must not end this task: no other reads the leases.
    await keep_running(refresh_and_sleep, Backoff(pause_s, pause_s), failed)


# -- the connection to one target


@dataclass(frozen=True, slots=True)
class TargetListener:
    """Receives the reports of the links. Called in the event loop; must neither raise nor block."""

    up: Callable[[TargetLink], None]
    down: Callable[[TargetLink, str], None]
    """The second argument is the reason."""
    replied: Callable[[TargetLink, target.VerifyResponse], None]


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """What the links to all targets have in common."""

    listener: TargetListener
    config: LinkConfig
    failover: FailoverConfig
    connect: Connect
    credential: tuple[tuple[str, str], ...]
    """gRPC metadata of each call."""


@dataclass(slots=True)
class RowPrice:
    """What one more drafted row in a step costs, as a target last reported it."""

    row: float = 0.0
    best_chance: float = 0.0
    """Probability of the likeliest first token that a draft proposes there."""
    at_s: float = -math.inf

    def update(self, reply: target.VerifyResponse, now_s: float) -> None:
        self.row, self.best_chance = bounded(reply.row_price, MAX_PRICE), bounded(reply.best_chance, 1.0)
        self.at_s = now_s


class TargetLink:
    """One target's stream: what is known of the target, and what waits to be written to it. Knows no requests."""

    def __init__(self, worker_id: str, address: str, max_message_bytes: int) -> None:
        self.worker_id = worker_id
        self.address = address
        self.outbox = BatchingOutbox(target.VerifyRequest, max_message_bytes)
        self.info = worker.WorkerInfo()
        self.load = worker.WorkerLoad()
        self.open_sequences: set[int] = set()
        self.generation = 0
        self.price = RowPrice()
        self.up = False

    @property
    def key(self) -> TargetKey:
        """This worker over this connection: a sequence that failed there avoids it by this key."""
        return self.worker_id, self.generation

    def came_up(self, info: worker.WorkerInfo, load: worker.WorkerLoad) -> None:
        self.info, self.load = info, load
        self.outbox.clear()
        self.generation += 1
        self.up = True

    def went_down(self) -> None:
        self.up = False
        self.outbox.clear()


class LeasedTarget(TargetLink, PeerLink[target.VerifyResponse, BatchingOutbox[target.VerifyRequest]]):
    """A target of the fleet, from its first lease until `stop`: the router keeps one stream to it."""

    def __init__(self, worker_id: str, address: str, setup: LinkSetup) -> None:
        TargetLink.__init__(self, worker_id, address, setup.config.max_message_bytes)
        PeerLink.__init__(self, f"worker {worker_id}", setup.connect, self.outbox, address)
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has succeeded or failed."""
        self.lease = worker.WorkerInfo()
        self._setup = setup
        self._stub: target_pb2_grpc.TargetServiceAsyncStub
        self._clock = asyncio.get_running_loop().time
        self._received_s = self._renewed_s = 0.0
        self._lost_s = self._clock()
        backoff = Backoff(setup.config.first_backoff_s, setup.config.max_backoff_s)
        self._task = asyncio.create_task(self.keep(itertools.repeat(address), backoff), name=f"link {worker_id}")

    async def stop(self) -> None:
        await stop(self._task)

    def renewed(self, record: LeaseRecord) -> None:
        """Takes what was last read of its lease."""
        self.lease, self._renewed_s = record.info, self._clock() - record.age_ms / 1000

    @property
    def cut_off(self) -> bool:
        """It lives: since the connection was lost, or could not be made, it has renewed its lease."""
        return not self.up and self._renewed_s - self._lost_s > MAX_REPORT_AGE_S

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        self._stub = target_pb2_grpc.TargetServiceStub(channel)
        reply = await self._get_info(self._setup.config.connect_timeout_s)
        if problem := info_problem(reply.info, reply.load, worker.WORKER_ROLE_TARGET, self.worker_id):
            raise StreamEnded(problem)
        self.came_up(reply.info, reply.load)
        self._received_s = self._clock()
        self._connected()
        self.tried.set()
        self._setup.listener.up(self)
        return self._stub.Verify(metadata=self._setup.credential)

    async def _get_info(self, timeout_s: float) -> target.TargetServiceGetInfoResponse:
        request = target.TargetServiceGetInfoRequest()
        return await self._stub.GetInfo(request, timeout=timeout_s, metadata=self._setup.credential)

    def _received(self, message: target.VerifyResponse) -> None:
        self._received_s = self._clock()
        self._setup.listener.replied(self, message)

    async def _watch(self, call: Any) -> None:
        failover = self._setup.failover
        await watch_silence(
            self._silent_s,
            lambda: self._get_info(failover.probe_timeout_s),
            every_s=failover.stall_after_s / 4,
            after_s=failover.stall_after_s,
            most=failover.max_failed_probes,
        )

    def _silent_s(self) -> float:
        """Raises StreamEnded where even a worker that answers probes has been silent for too long."""
        if not self.open_sequences:
            # A stream without sequences is idle: silence counts from the first sequence on.
            self._received_s = self._clock()
        silent_s = self._clock() - self._received_s
        if silent_s > self._setup.failover.max_silence_s:
            raise StreamEnded(f"silent for {silent_s:.0f} s")
        return silent_s

    def _ended(self, why: Exception | None) -> None:
        self.tried.set()
        if not self.up:
            return
        self.went_down()
        self._lost_s = self._clock()
        try:
            self._setup.listener.down(self, "the link was stopped" if why is None else problem_of(why))
        finally:
            self.open_sequences.clear()
