"""Who is up, who has the prefix, who has room: the target pool and the draft pool as this router sees them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from outrider.errors import Unavailable
from outrider.metadata import LeaseRecord
from outrider.prefix import block_hashes
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.supervision import Backoff, keep_running

from outrider_controller.router.choice import Candidate, believed_load, only_leaving, rank
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.faults import UnreachablePairs
from outrider_controller.router.links import Connect, Listener, TargetLink
from outrider_controller.router.pairing import pairing_problem, same_weights
from outrider_controller.router.worth import Standing

log = logging.getLogger(__name__)

LinkKey = tuple[str, int]
_NONE: Mapping[str, int] = {}
# Whose standing with one draft is remembered.
_MAX_TENANTS = 1024


class Directory(Protocol):
    """The part of the metadata store that the pools read."""

    @property
    def available(self) -> bool: ...

    async def workers(self, role: worker.WorkerRole.ValueType | None = None) -> list[LeaseRecord]: ...

    async def lookup_prefix(self, role: worker.WorkerRole.ValueType, hashes: Sequence[bytes]) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence starts with and under which salt its blocks are shared."""

    token_ids: tuple[int, ...]
    salt: bytes


@dataclass(slots=True, eq=False)
class DraftWorker:
    """A draft as its lease shows it. Targets talk to it, the router does not."""

    worker_id: str
    address: str
    info: worker.WorkerInfo
    leased: bool = True
    open_sequences: set[int] = field(default_factory=set)
    """By this router, through whichever target."""
    standings: dict[str, Standing] = field(default_factory=dict)
    """By tenant: what it has shown to its requests."""

    def standing(self, tenant: str) -> Standing:
        if tenant not in self.standings and len(self.standings) >= _MAX_TENANTS:
            del self.standings[next(iter(self.standings))]
        return self.standings.setdefault(tenant, Standing())


class Pools:
    """One link per leased target, and the leased drafts; picks among them. `async with` it: links live inside."""

    def __init__(
        self,
        directory: Directory,
        config: RouterConfig,
        targets: Listener,
        on_change: Callable[[], None],
        connect: Connect = create_channel,
    ) -> None:
        self._directory = directory
        self._config = config
        self._target_listener = targets
        self._on_change = on_change
        self._connect = connect
        self._targets: dict[str, TargetLink] = {}
        self._drafts: dict[str, DraftWorker] = {}
        self.unreachable = UnreachablePairs(config.failover.draft_backoff_s)
        self._loads: dict[str, worker.WorkerLoad] = {}
        self._seen: dict[str, worker.WorkerInfo] = {}
        self._warned: set[str] = set()
        self._changed = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pools:
        self._task = asyncio.create_task(self._refresh_forever(), name="pools refresh")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(link.stop() for link in self._targets.values()))

    # -- what is there

    def live_targets(self, model: str) -> list[TargetLink]:
        return [t for t in self._targets.values() if t.up and t.info.model == model and self._takes_work(t)]

    def model_info(self, model: str) -> worker.WorkerInfo | None:
        """Of a live target of this name, else of the last one seen; None when there never was one."""
        live = self.live_targets(model)
        return live[0].info if live else self._seen.get(model)

    @property
    def has_seen_targets(self) -> bool:
        """Whether there ever was a target, of whatever model."""
        return bool(self._seen)

    def models(self) -> list[router.ServedModel]:
        """The models that live targets serve."""
        live = [t for t in self._targets.values() if t.up]
        first = {t.info.model: t.info for t in reversed(live)}
        return [
            router.ServedModel(
                model=name,
                max_context_len=info.max_context_len,
                vocab_size=info.vocab_size,
                tokenizer_fingerprint=info.tokenizer_fingerprint,
                num_targets=sum(t.info.model == name for t in live),
                num_drafts=sum(d.leased and pairing_problem(info, d.info) is None for d in self._drafts.values()),
            )
            for name, info in sorted(first.items())
        ]

    async def ready(self, timeout_s: float) -> None:
        """Returns once the leases were read for the first time and every worker they name was tried.

        Raises Unavailable when the metadata store did not answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._refreshed.wait()
        except TimeoutError:
            raise Unavailable("the metadata store has not answered yet", reason="NO_METADATA") from None

    def changed(self) -> asyncio.Event:
        """Set when a worker comes, goes or gets room. Take it before looking, or a change in between is missed."""
        return self._changed

    def notify(self) -> None:
        done, self._changed = self._changed, asyncio.Event()
        done.set()
        self._on_change()

    @property
    def problem(self) -> str:
        """Why no request can be placed; empty when one can. May be asked from any thread."""
        if not self._refreshed.is_set():
            return "the leases have not been read yet"
        return "" if any(target.up for target in list(self._targets.values())) else "no target is connected"

    # -- choosing

    async def choose_target(
        self, model: str, revision: str | None, prefix: Prefix, avoid: Iterable[LinkKey] = ()
    ) -> TargetLink | None:
        """The best live target of this model with room. `revision` holds a request to what it began on."""
        avoided = set(avoid)
        links = {
            t.worker_id: t
            for t in self.live_targets(model)
            if t.key not in avoided and revision in (None, t.info.model_revision)
        }
        best = await self._best(worker.WORKER_ROLE_TARGET, links, prefix)
        return links[best] if best is not None and links[best].up else None

    def revisions_like(self, model: str, revision: str, avoid: Iterable[LinkKey] = ()) -> list[str]:
        """What a request that began on `revision` may go on with: that, while any target has it; else all revisions of
        the same weights, which compute them otherwise."""
        avoided = set(avoid)
        live = {t.info.model_revision for t in self.live_targets(model) if t.key not in avoided}
        return [revision] if revision in live else sorted(r for r in live if same_weights(r, revision))

    async def choose_draft(
        self,
        target: TargetLink,
        prefix: Prefix,
        avoid: Iterable[str] = (),
        together: Mapping[str, int] = _NONE,
    ) -> DraftWorker | None:
        """The best live draft with room that can work with this target; `together`: sequences each drafts for it."""
        avoided = set(avoid)
        drafts = {
            d.worker_id: d
            for d in self._drafts.values()
            if d.worker_id not in avoided
            and self.can_draft(d, target)
            and d.info.max_context_len > len(prefix.token_ids)
        }
        best = await self._best(worker.WORKER_ROLE_DRAFT, drafts, prefix, together)
        return drafts[best] if best is not None and drafts[best].leased else None

    def can_draft(self, draft: DraftWorker, target: TargetLink) -> bool:
        """Whether it is there, takes work, and fits this target, which can reach it as far as is known."""
        now_s = asyncio.get_running_loop().time()
        return (
            draft.leased
            and self._takes_work(draft)
            and self._fits(target.info, draft.info)
            and not self.unreachable.avoids(target.worker_id, draft.worker_id, now_s)
        )

    def has_full_target(self, model: str) -> bool:
        return any(self._candidate(t).full for t in self.live_targets(model))

    def draft_has_room(self) -> bool:
        return any(d.leased and self._takes_work(d) and not self._candidate(d).full for d in self._drafts.values())

    async def _best(
        self,
        role: worker.WorkerRole.ValueType,
        links: Mapping[str, TargetLink] | Mapping[str, DraftWorker],
        prefix: Prefix,
        together: Mapping[str, int] = _NONE,
    ) -> str | None:
        matched = await self._matches(role, links.values(), prefix) if len(links) > 1 else {}
        candidates = [
            self._candidate(link, matched.get(worker_id, 0), together.get(worker_id, 0))
            for worker_id, link in links.items()
        ]
        # Shuffled first: routers that see the same ties must not all pick the same worker.
        random.shuffle(candidates)
        ranked = rank(candidates)
        return ranked[0].worker_id if ranked else None

    async def _matches(
        self, role: worker.WorkerRole.ValueType, links: Iterable[TargetLink | DraftWorker], prefix: Prefix
    ) -> dict[str, int]:
        """Matched leading blocks per worker; the block size is part of a block's identity."""
        matched: dict[str, int] = {}
        for block_size in {link.info.block_size for link in links} - {0}:
            hashes = block_hashes(prefix.token_ids, block_size, prefix.salt)
            if hashes:
                matched.update(await self._directory.lookup_prefix(role, hashes))
        return matched

    def _candidate(self, link: TargetLink | DraftWorker, matched_blocks: int = 0, num_together: int = 0) -> Candidate:
        load = self._load(link)
        return Candidate(
            worker_id=link.worker_id,
            matched_blocks=matched_blocks,
            num_sequences=max(load.num_running + load.num_waiting, len(link.open_sequences)),
            max_sequences=link.info.max_sequences,
            num_waiting=load.num_waiting,
            num_together=num_together,
        )

    def _takes_work(self, link: TargetLink | DraftWorker) -> bool:
        return not self._load(link).draining

    def _load(self, link: TargetLink | DraftWorker) -> worker.WorkerLoad:
        """Without a lease, which the store may have lost, only what can be told of a target that was reached once."""
        known = self._loads.get(link.worker_id)
        if known is not None:
            return known
        return only_leaving(link.load) if isinstance(link, TargetLink) else worker.WorkerLoad()

    def _fits(self, target: worker.WorkerInfo, draft: worker.WorkerInfo) -> bool:
        problem = pairing_problem(target, draft)
        if problem and problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s", problem)
        return problem is None

    # -- following the leases

    async def _refresh_forever(self) -> None:
        # The last known pools keep serving; what broke must not end the only task that would mend them.
        await keep_running(
            self._refresh_and_rest, Backoff(self._config.refresh_s, self._config.refresh_s), self._failed
        )

    async def _refresh_and_rest(self) -> None:
        await self.refresh()
        await asyncio.sleep(self._config.refresh_s)

    def _failed(self, error: Exception) -> None:
        log.error("reading the leases failed", exc_info=error)

    async def refresh(self) -> None:
        """Connects to newly leased workers and lets go of those whose lease and stream are both gone."""
        records = await self._directory.workers()
        self._loads = {r.info.worker_id: believed_load(r) for r in records}
        for record in records:
            if record.info.role == worker.WORKER_ROLE_TARGET:
                self._seen[record.info.model] = record.info
                self._follow(record)
        self._follow_drafts({r.info.worker_id: r for r in records if r.info.role == worker.WORKER_ROLE_DRAFT})
        await self._let_go()
        # An empty list from a store that did not answer is no news.
        if self._directory.available and not self._refreshed.is_set():
            await self._first_connections()
            self._refreshed.set()
        self.notify()

    def _follow(self, record: LeaseRecord) -> None:
        worker_id = record.info.worker_id
        if worker_id not in self._targets:
            self._targets[worker_id] = TargetLink(
                worker_id,
                record.address,
                self._target_listener,
                self._config.link,
                self._config.failover,
                self._connect,
            )

    def _follow_drafts(self, records: Mapping[str, LeaseRecord]) -> None:
        for worker_id, draft in list(self._drafts.items()):
            draft.leased = worker_id in records
            # A target that is still connected to it goes on with it.
            if not draft.leased and not draft.open_sequences:
                del self._drafts[worker_id]
        for worker_id, record in records.items():
            if worker_id not in self._drafts:
                self._drafts[worker_id] = DraftWorker(worker_id, record.address, record.info)

    async def _let_go(self) -> None:
        """A lease may lapse while the worker only lost the metadata store: a stream that stands is proof enough."""
        links = self._targets
        gone = [worker_id for worker_id, link in links.items() if worker_id not in self._loads and not link.up]
        stopping = [links.pop(worker_id) for worker_id in gone]
        await asyncio.gather(*(link.stop() for link in stopping))

    async def _first_connections(self) -> None:
        """A request that arrives as the router starts should meet all targets, not the fastest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.link.connect_timeout_s):
                await asyncio.gather(*(link.tried.wait() for link in self._targets.values()))
